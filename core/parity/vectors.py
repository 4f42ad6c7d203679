"""Golden vectors: files of inputs, and of outputs, states and cursors after every step, for every family, format and T.

docs/vectors.md describes them for engines in other languages. ``python -m replayssm.parity.vectors`` writes them again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..cursor import PLAN
from ..formats import LOADED, Stored
from ..layout import Conv, Layout
from ..recurrence import FAMILIES
from ..reference import Ring, decode
from ..soak.check import distance
from ..soak.inputs import Inputs
from ..state import ReplayState
from .implementation import Entry
from .problem import FACTOR

VERSION, SEED = 1, 20260
FOLDER = Path(__file__).parent / "golden"
H, V, K, W = 2, 16, 32, 3
STEPS = {1: 12, 3: 10}  # per T
SLOTS = (1, 0)  # of three; slot 2 is nobody's
KEYS = {1: 2**40 + 7, 0: 11}
FILES = tuple(FAMILIES)
# By name: the format of the checkpoint and of a copy that outputs are read from.
CASES: dict[str, tuple[str, str | None]] = {
    name: (name, None) for name in ("fp32", "bf16", "fp16", "e4m3", "int8", "int16", "nvfp4", "fp16+sr", "e4m3+sr", "int8+sr")
} | {f"read-{name}": ("fp32", name) for name in ("e4m3", "int8", "nvfp4")}
ACTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = {"values": "", "scale": "_scale", "row_scale": "_row_scale"}
# How far from the expected value of a rounded state: an implementation that rounds otherwise, or not at all, is beyond.
ROUNDING = 0.5


def layout_of(family: str, T: int, case: str, act: str) -> Layout:
    """The layout of one file's case."""
    state, read = CASES[case]
    G = 2 if FAMILIES[family].per_channel and FAMILIES[family].delta else 1
    return Layout(family, H, G, V, K, W, T, state=state, read=read, act=ACTS[act])  # type: ignore[arg-type]


class StoredRing(Ring):
    """The oracle's ring with checkpoints, and copies that outputs are read from, rounded as a layout says; in fp64 or fp32."""

    def __init__(self, layout: Layout, weights: dict[str, Tensor | None], dtype: torch.dtype = torch.float64) -> None:
        super().__init__(layout.recurrence, layout.W, layout.R, layout.phases, **weights)
        self.layout, self.dtype = layout, dtype
        self.stored: dict[int, Stored] = {}
        self.copies: dict[int, Tensor] = {}

    def load(self, slot: int, state: Tensor) -> None:
        super().load(slot, state)
        self._store(slot, LOADED)

    def _store(self, slot: int, flush: int) -> None:
        layout, s = self.layout, self.slots[slot]
        exact, draws = s.checkpoint.float(), None
        if layout.format.stochastic:
            key, number = torch.tensor([KEYS[slot]]), torch.tensor([flush])
            draws = formats.draws(layout.seed, 0, key, number, layout.H, layout.V, layout.K)[0]
        self.stored[slot] = layout.format.encode(exact, draws)
        if layout.state != "fp32":
            s.checkpoint = layout.format.decode(self.stored[slot]).to(self.dtype)
        if layout.read_format is not None:
            self.stored[slot] = layout.read_format.encode(exact)
            self.copies[slot] = layout.read_format.decode(self.stored[slot]).to(self.dtype)

    def _run(self, state: Tensor, records: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        if not records:
            return torch.empty(0), state
        joined = {name: torch.cat([r[name] for r in records]) for name in records[0]}
        return decode(self.row, state, **joined, **self.weights, dtype=self.dtype)  # type: ignore[arg-type]  # tensors alone

    def step(
        self, slot: int, tokens: list[dict[str, Tensor]], force: bool = False, parents: list[int] | None = None
    ) -> Tensor | None:
        s = self.slots[slot]
        number = s.flushes
        outputs = super().step(slot, tokens, force, parents)
        flush = s.flush
        if flush:
            self._store(slot, number)
        if flush or slot in self.copies:  # outputs read what is stored
            checkpoint, s.checkpoint = s.checkpoint, self.copies.get(slot, s.checkpoint)
            outputs = super().step(slot, tokens, False, parents)
            s.checkpoint, s.flush = checkpoint, flush
        return outputs


@dataclass(frozen=True)
class Given:
    """One T's inputs."""

    slots: Tensor  # [N, B]
    t: Tensor
    accepted: Tensor
    force: Tensor
    x: dict[str, Tensor]  # [N, B, T, ...], zeros where there is no token
    initial: Tensor  # [B, H, V, K] of SLOTS


def _inputs(family: str, T: int) -> tuple[dict[str, Tensor | None], Given]:
    """Weights and one T's inputs: chains of drafts, some rejected; padding; forced flushes; values that bf16 holds."""
    layout, draw, N, B = layout_of(family, T, "fp32", "bf16"), random.Random(f"{SEED} {family} {T}"), STEPS[T], 3
    source = Inputs(replace(layout, conv=Conv(1), R=0), 1, torch.device("cpu"), SEED)
    weights = {name: None if x is None else x[0].bfloat16().float() for name, x in source.weights.items()}
    table = []
    for _ in range(N):
        rows = [*SLOTS, -1] if draw.random() < 0.8 else [draw.choice(SLOTS), -1, -1]
        draw.shuffle(rows)
        tokens = [0 if slot < 0 else draw.randint(0 if T > 1 else 1, T) for slot in rows]
        kept = [draw.choice([n, n, draw.randint(0, n)]) for n in tokens]
        table.append([rows, tokens, kept, [int(draw.random() < 0.1) for _ in rows]])
    slots, t, accepted, force = torch.tensor(table, dtype=torch.int32).unbind(1)
    x = {name: one[0].bfloat16().unflatten(0, (N, B)) for name, one in source.draw(N * B, T)[0].items()}
    live = torch.arange(T) < t[..., None]
    x = {name: torch.where(live.view(*live.shape, *[1] * (one.dim() - 3)), one, 0) for name, one in x.items()}
    shape = len(SLOTS), layout.H, layout.V, layout.K
    initial = (torch.randn(shape, generator=source.generator) * layout.K**-0.5).bfloat16().float()
    return weights, Given(slots, t, accepted, force, x, initial)


@dataclass(frozen=True)
class Expected:
    """What one case gives after every step."""

    outputs: Tensor  # [N, B, T, H, V]
    states: Tensor  # [N, slots, H, V, K] after the step's commit, of SLOTS
    stored: Tensor  # the same of the checkpoint, or of the copy that outputs are read from, decoded
    tensors: dict[str, Tensor]  # that as it is stored, [N, slots, ...]
    cursors: dict[str, Tensor]  # start, count, flushes [N, slots]; flush [N, B]


def _expected(layout: Layout, weights: dict[str, Tensor | None], given: Given, dtype: torch.dtype) -> Expected:
    """One case by the ring oracle."""
    ring, one = StoredRing(layout, weights, dtype), layout.read_format or layout.format
    for slot, state in zip(SLOTS, given.initial, strict=True):
        ring.load(slot, state)
    N, B, T = *given.t.shape, layout.T_max
    outputs = torch.zeros(N, B, T, layout.H, layout.V, dtype=dtype)
    flush = torch.zeros(N, B, dtype=torch.int32)
    states, stored, cursors = [], [], []
    for n in range(N):
        for i, slot in enumerate(given.slots[n].tolist()):
            if slot < 0:
                continue
            t = int(given.t[n, i])
            tokens = [{name: x[n, i, j][None] for name, x in given.x.items()} for j in range(t)]
            o = ring.step(slot, tokens, bool(given.force[n, i]))
            if o is not None:
                outputs[n, i, :t] = o
            flush[n, i] = int(ring.slots[slot].flush)
            ring.commit(slot, int(given.accepted[n, i]))
        states.append(torch.stack([ring.materialize(slot) for slot in SLOTS]))
        stored.append([ring.stored[slot] for slot in SLOTS])
        cursors.append([[getattr(ring.slots[slot], name) for slot in SLOTS] for name in ("start", "count", "flushes")])
    tensors = {
        part: torch.stack([torch.stack([getattr(x, part) for x in row]) for row in stored])
        for part in PARTS
        if getattr(stored[0][0], part) is not None
    }
    decoded = torch.stack([torch.stack([one.decode(x) for x in row]) for row in stored])
    numbers = torch.tensor(cursors, dtype=torch.int32).unbind(1)
    named = dict(zip(("start", "count", "flushes"), numbers, strict=True)) | {"flush": flush}
    return Expected(outputs, torch.stack(states), decoded, tensors, named)


def generate(family: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A file's tensors, and what its header says."""
    tensors: dict[str, Tensor] = {}
    bounds: dict[str, Any] = {}
    for T in STEPS:
        weights, given = _inputs(family, T)
        tensors |= {name: x for name, x in weights.items() if x is not None}
        tensors |= {f"T{T}/{name}": getattr(given, name) for name in ("slots", "t", "accepted", "force", "initial")}
        tensors |= {f"T{T}/{name}": x for name, x in given.x.items()}
        exact = None
        for case in CASES:
            layout = layout_of(family, T, case, "fp32")
            true, plain = (_expected(layout, weights, given, dtype) for dtype in (torch.float64, torch.float32))
            exact = exact or true
            at = f"T{T}/{case}"
            tensors[f"{at}/outputs"] = true.outputs.float()
            if case == "fp32":
                tensors[f"{at}/states"] = true.states.float()
                tensors |= {f"T{T}/{name}": x for name, x in true.cursors.items()}
            else:
                tensors |= {f"{at}/stored{suffix}": true.tensors[p] for p, suffix in PARTS.items() if p in true.tensors}
            bounds.setdefault(f"T{T}", {})[case] = _bounds(case, true, plain, exact)
    about = {"family": family, "H": H, "G": layout.G, "V": V, "K": K, "W": W, "R": {f"T{T}": W + T for T in STEPS},
             "slots": list(SLOTS), "keys": [KEYS[slot] for slot in SLOTS], "rounding_seed": 0, "layer": 0, "seed": SEED,
             "bounds": bounds}  # fmt: skip
    return {name: x.contiguous() for name, x in tensors.items()}, about


def _bounds(case: str, true: Expected, plain: Expected, exact: Expected) -> dict[str, float]:
    """FACTOR times a plain fp32 run's error; of a rounded state, and of outputs read from one, ROUNDING times its rounding."""
    rounded = {name: worst(plain.outputs.to(act), true.outputs, 2) for name, act in ACTS.items()}
    outputs = worst(exact.outputs, true.outputs, 2)
    found = {f"outputs_{name}": FACTOR * error + ROUNDING * outputs for name, error in rounded.items()}
    if case == "fp32":
        return found | {"states": FACTOR * worst(plain.states, true.states, 3)}
    return found | {"states": FACTOR * worst(plain.stored, true.stored, 3) + ROUNDING * worst(exact.stored, true.stored, 3)}


def worst(x: Tensor, exact: Tensor, dims: int) -> float:
    """The largest |x - exact| / |exact| over the last dimensions; where the expected value is 0, x must be."""
    return float(distance(x, exact, dims).max())


def write(folder: Path) -> list[Path]:
    """All files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for family in FILES:
        tensors, about = generate(family)
        header = {"golden_vectors": str(VERSION), "about": json.dumps(about)}
        save_file(tensors, folder / f"{family}.safetensors", header)
    return [folder / f"{family}.safetensors" for family in FILES]


def read(family: str, folder: Path = FOLDER) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A file's tensors, and what its header says. ValueError where it is none of this version's."""
    from safetensors import safe_open

    path = folder / f"{family}.safetensors"
    if not path.is_file():
        raise ValueError(f"vectors: expected {path}; `python -m replayssm.parity.vectors` writes it")
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        if header.get("golden_vectors") != str(VERSION):
            raise ValueError(f"vectors: expected version {VERSION} in {path}, got {header.get('golden_vectors')}")
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(header["about"])


# ---- the checker ----------------------------------------------------------------------------------------------------------

BACKENDS = {"core torch": "torch", "core Triton": "triton"}


def _checked(entries: Sequence[Entry]) -> list[str]:
    names = [one.name for one in entries if one.name in BACKENDS]
    if not names:
        raise ValueError(f"implementation: expected one of {', '.join(BACKENDS)} for vectors")
    return names


def total(entries: Sequence[Entry], families: Sequence[str] | None = None) -> int:
    """How many rows ``check`` gives."""
    return len(_checked(entries)) * len(families or FILES) * len(STEPS) * len(CASES) * len(ACTS)


def check(
    entries: Sequence[Entry], families: Sequence[str] | None = None, device: str = "cpu", folder: Path = FOLDER
) -> Iterator[dict[str, Any]]:
    """Our backends on every file's every case: rows as of the matrix, with ``cursors_differing``."""
    for family in families or FILES:
        tensors, about = read(family, folder)
        for name in _checked(entries):
            for T in STEPS:
                for case in CASES:
                    for act in ACTS:
                        yield _row(name, family, T, case, act, tensors, about, device)


def _row(
    name: str, family: str, T: int, case: str, act: str, tensors: dict[str, Tensor], about: dict[str, Any], device: str
) -> dict[str, Any]:
    bounds = about["bounds"][f"T{T}"][case]
    row = {"family": family, "act": str(ACTS[act]).removeprefix("torch."), "scenario": f"T {T}, {case}", "implementation": name,
           "native": False, "output_bound": bounds[f"outputs_{act}"], "state_bound": bounds["states"]}  # fmt: skip
    try:
        found = _replay(layout_of(family, T, case, act), BACKENDS[name], tensors, device)
    except NotImplementedError as error:
        return row | {"absent": str(error)}
    at = f"T{T}/{case}"
    one = formats.named(CASES[case][1] or CASES[case][0])
    if case == "fp32":
        states = worst(found.states, tensors[f"{at}/states"], 3)
    else:
        stored = Stored(*(tensors.get(f"{at}/stored{suffix}") for suffix in PARTS.values()))  # type: ignore[arg-type]
        states = worst(found.stored, one.decode(stored), 3)
    differing = sum(int((x != tensors[f"T{T}/{name}"]).sum()) for name, x in found.cursors.items())
    outputs = worst(found.outputs, tensors[f"{at}/outputs"], 2)
    return row | {"output_error": outputs, "state_error": states, "cursors_differing": differing}


def _rows(stored: Stored, slots: Tensor) -> Stored:
    """The first layer's states of these slots."""
    return Stored(*(None if x is None else x[0, slots.long()] for x in stored))  # type: ignore[arg-type]  # values always are


def _replay(layout: Layout, backend: str, tensors: dict[str, Tensor], device: str) -> Expected:
    """A file's case by ReplayState's public calls."""
    if backend == "triton" and device == "cpu" and layout.state == "bf16":
        raise NotImplementedError("Triton's interpreter converts to bf16 by truncation, not to nearest")
    T, at = layout.T_max, f"T{layout.T_max}"
    given = {name.removeprefix(f"{at}/"): x.to(device) for name, x in tensors.items() if name.count("/") == 1 and at in name}
    weights = {name: tensors[name].to(device) for name in ("A", "dt_bias", "D") if name in tensors}
    A = weights.pop("A")[None] if layout.recurrence.decay == "derived" else None
    state = ReplayState(layout, 1, 3, device, backend, A=A, max_rows=3, debug=True)
    live = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    state.load(live, given["initial"][None], keys=torch.tensor([KEYS[slot] for slot in SLOTS], device=device))
    x = {name: one.to(layout.act) for name, one in given.items() if one.dim() > 3 and name != "initial"}
    if layout.recurrence.decay == "ready":
        x["a"] = given["a"].float()
    one, stored = layout.read_format or layout.format, []
    outputs, states, cursors, flush = [], [], [], []
    for n in range(len(given["t"])):
        plan = state.plan(given["slots"][n], t=given["t"][n], force=given["force"][n])
        o = state.step(0, plan, **{name: one[n].flatten(0, 1) for name, one in x.items()}, **weights)
        state.commit(plan, given["accepted"][n])
        outputs.append(o.unflatten(0, (-1, T)))
        states.append(state.materialize(live)[0])
        kept = state.buffers.copy or state.buffers.checkpoint
        stored.append(one.decode(_rows(kept, live)))
        cursors.append(torch.stack([getattr(state.cursors, name)[live.long()] for name in ("start", "count", "flushes")]))
        flush.append(plan.rows[:, PLAN.index("flush")].clone())
    numbers = dict(zip(("start", "count", "flushes"), torch.stack(cursors, 1).cpu(), strict=True))
    return Expected(
        torch.stack(outputs).cpu(), torch.stack(states).cpu(), torch.stack(stored).cpu(), {},
        numbers | {"flush": torch.stack(flush).cpu()},
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=FOLDER)
    for path in write(parser.parse_args().out):
        print(f"{path}: {path.stat().st_size / 2**20:.2f} MB")
