"""What works on this machine: found by running it beside the oracle where that is possible, and why the rest does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from packaging.requirements import Requirement
from torch import Tensor

from . import formats, launch, records
from .layout import Layout
from .recurrence import GDN, KDA, KDA_SAFE, MAMBA2, Recurrence
from .reference import Ring
from .state import ReplayState

FAMILIES = (MAMBA2, GDN, KDA, KDA_SAFE)
# Per mode: tokens of a step, what each follows, and which of them stay.
MODES: dict[str, tuple[int, list[int] | None, list[int]]] = {
    "decode": (1, None, [0]),
    "verify": (3, None, [0, 1]),
    "trees": (3, [-1, 0, 0], [0, 2]),
}
# Largest relative error that passes: activations and ring are bf16; the coarser formats round states besides.
BOUND = {"fp32": 2e-2, "fp16": 2e-2, "bf16": 4e-2}
COARSE_BOUND = 0.3


@dataclass(frozen=True)
class Package:
    """A package that matters: the version found, the versions supported ("" where unknown), and why it does not do."""

    name: str
    version: str | None
    supported: str
    problem: str


@dataclass(frozen=True)
class Probe:
    """Some steps of a small layer beside the oracle.

    Attributes:
        status: "works", "unsupported" where nothing ran, "broken" where it failed or computed something else.
        error: relative error of outputs and final state; None where it did not run to the end.
        reason: why it does not work.
    """

    family: str
    mode: str
    state: str
    status: str
    error: float | None
    reason: str


@dataclass(frozen=True)
class Engine:
    """An engine and what of ReplaySSM works with it here.

    Attributes:
        package: what is installed of it.
        works: whether its models can decode with ReplaySSM here.
        families, modes, states: what of them will work; empty where nothing does.
        reasons: why not, or what else does not.
    """

    package: Package
    works: bool
    families: tuple[str, ...]
    modes: tuple[str, ...]
    states: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Integration:
    """What one integration translates."""

    engine: str
    distribution: str
    families: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


INTEGRATIONS = (
    Integration(
        "transformers",
        "transformers",
        families=("mamba2", "gdn", "kda", "kda_safe"),
        modes=("decode", "assisted generation (chains)"),
        limits=("assisted generation of Mamba2ForCausalLM: transformers cannot find its cache", "no trees"),
    ),
    Integration(
        "sglang",
        "sglang",
        families=("mamba2", "gdn", "kda", "kda_safe"),
        modes=("decode", "speculation (chains, trees)"),
        limits=(
            "states in fp32, bf16, fp16 and fp16+sr, which its prefill reads, with any read copy",
            "docs/sglang.md: refusals",
        ),
    ),
    Integration(
        "trtllm",
        "tensorrt-llm",
        families=("mamba2", "gdn", "kda", "kda_safe"),
        modes=("decode", "verify (chains)"),
        limits=("not compared with this engine: python -m replayssm.integrations.trtllm.conformance does that", "no trees"),
    ),
    Integration(
        "flashinfer",
        "flashinfer-python",
        families=("mamba2", "gdn", "kda", "kda_safe"),
        modes=("decode", "speculative decode (chains)", "states at a prefix (mamba2)"),
        limits=("no trees, no nvfp4; e4m3, int8 and int16 for mamba2 alone", "GDN's ring folds open-loop, KDA has none"),
    ),
)


def machine() -> dict[str, str]:
    """System, Python, and each GPU with its capability, memory and driver."""
    found = {"system": platform.platform(), "python": platform.python_version()}
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found[f"gpu {i}"] = f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB"
        found[f"launches, gpu {i}"] = launches(about.name)
    if torch.cuda.is_available():
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(command, capture_output=True, text=True).stdout.split()[0]
        except (OSError, IndexError):
            found["driver"] = "unknown"
    else:
        found["gpu"] = "none that torch can use: states run with backend torch"
    return found


def launches(device: str) -> str:
    """Whether the launches of a GPU's kernels were measured on it, and where its user's records are."""
    rule = f"by rules measured on {', '.join(launch.MEASURED_ON)}"
    if device not in launch.MEASURED_ON:
        rule += ", not measured on this one: `replayssm tune` does that"
    file = records.path()
    try:
        own = [record for record in records.read(file) if record.device == device]
    except ValueError as wrong:
        return str(wrong)
    return f"{rule}; {len(own)} records of its own in {file}" if own else rule


def supported() -> dict[str, Requirement]:
    """Per distribution the versions that this package's metadata allows; empty where it was not installed as one."""
    try:
        lines = importlib.metadata.requires("replayssm") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    every = [Requirement(line) for line in lines]
    return {one.name: one for one in every}


def package(name: str, allowed: dict[str, Requirement]) -> Package:
    """What is installed of a distribution, and whether its version does."""
    wanted = str(allowed[name].specifier) if name in allowed else ""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Package(name, None, wanted, "not installed")
    if name in allowed and not allowed[name].specifier.contains(version, prereleases=True):
        return Package(name, version, wanted, f"version: supported are {wanted}, found {version}")
    return Package(name, version, wanted, "")


def probe(row: Recurrence, mode: str, state: str, device: str) -> Probe:
    """Steps over more than one window of a layer of 2 heads of 16 x 32, one request; the final state counts as well."""
    about = (row.name, mode, state)
    try:
        error = _error(row, mode, state, device)
    except NotImplementedError as unsupported:
        return Probe(*about, "unsupported", None, str(unsupported))
    except Exception as failed:  # whatever it is, it is what the user wants to know
        return Probe(*about, "broken", None, f"{type(failed).__name__}: {failed}")
    bound = BOUND.get(state, COARSE_BOUND)
    if not error < bound:
        return Probe(*about, "broken", error, f"error against the oracle: expected below {bound:.0e}, got {error:.1e}")
    return Probe(*about, "works", error, "")


def probes(device: str) -> Iterator[Probe]:
    """Every family and mode, and every state format in decode."""
    for row in FAMILIES:
        for mode in MODES:
            yield probe(row, mode, "fp32", device)
        for state in formats.FORMATS:
            if state != "fp32":
                yield probe(row, "decode", state, device)


def count() -> int:
    """How many probes there are."""
    return len(FAMILIES) * (len(MODES) + len(formats.FORMATS) - 1)


def _error(row: Recurrence, mode: str, state: str, device: str) -> float:
    """The larger relative error of outputs and final state."""
    T, parents, stay = MODES[mode]
    layout = Layout(row, H=2, G=2, V=16, K=32, W=4, T_max=T, state=state)
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    A, D, bias = -rand(2).exp(), None if row.delta else rand(2), rand(*((2, 32) if row.per_channel else (2,)))
    ours = ReplayState(layout, 1, 1, device, A=None if row.stores_g else A[None])
    oracle = Ring(row, layout.W, layout.R, layout.phases, A=A, dt_bias=bias, D=D)
    slots, begin = ints(0), rand(1, 1, 2, 16, 32)
    ours.load(slots, begin)
    oracle.load(0, begin[0, 0])
    got, truth = [], []
    for _ in range(4):
        x = {"q": rand(T, 2, 32), "k": rand(T, 2, 32) / 4, "v": rand(T, 2, 16), "b": rand(T, 2)}
        if row.stores_g:
            x["a"] = rand(T, *bias.shape)
        x = {name: one.to(layout.act) for name, one in x.items()}
        plan = ours.plan(slots, T, parents=None if parents is None else ints(*parents)[None])
        got.append(ours.step(0, plan, **x, A=A if row.stores_g else None, dt_bias=bias, D=D))
        outputs = oracle.step(0, [{name: one[i : i + 1] for name, one in x.items()} for i in range(T)], parents=parents)
        assert outputs is not None
        truth.append(outputs)
        ours.commit(plan, ints(len(stay)), None if parents is None else ints(*stay, *[0] * (T - len(stay)))[None])
        oracle.commit(0, len(stay), None if parents is None else stay)
    pairs = ((torch.cat(got), torch.cat(truth)), (ours.materialize(slots)[0, 0], oracle.materialize(0)))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def engine(one: Integration, allowed: dict[str, Requirement], states: tuple[str, ...]) -> Engine:
    """Whether an engine's models can decode with ReplaySSM here.

    Args:
        states: the checkpoint formats that work here.
    """
    found = package(one.distribution, allowed)
    reasons = [found.problem] if found.problem else []
    name = f"{__package__}.integrations.{one.engine}"
    try:
        known = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        known = False
    if not known:
        reasons.append("this version of ReplaySSM has no integration for it")
    elif not reasons:
        try:
            importlib.import_module(name)
        except Exception as failed:
            reasons.append(f"its integration does not import: {type(failed).__name__}: {failed}")
    if reasons:
        return Engine(found, False, (), (), (), tuple(reasons))
    return Engine(found, True, one.families, one.modes, states, one.limits)
