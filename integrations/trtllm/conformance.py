"""Compares the installed TensorRT-LLM with contract.yaml, and one layer's steps with its own functions.

    python -m replayssm.integrations.trtllm.conformance

Exit code 0: everything compared agrees; 1: it does not, each difference on a line of its own; 2: TensorRT-LLM is not installed,
so nothing was compared.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, Layout

from . import engine
from .contract import Contract, Form, Symbol, load, signature
from .managers import form_of
from .recurrent import Batch, Recurrent

OK, DRIFT, ABSENT = 0, 1, 2
STEPS, ROWS = 20, 3  # more than a window, so that rings fold
OUTPUT_BOUND, STATE_BOUND = 1e-2, 1e-3  # of the rms
BF16 = 2.0**-7  # an element's rounding, of both outputs


def main() -> int:
    """Compare, print, and return the exit code."""
    contract = load()
    try:
        found = engine.version()
    except ModuleNotFoundError as error:
        if error.name != contract.package:
            raise
        print("TensorRT-LLM is not installed: nothing was compared")
        return ABSENT
    wrong = [] if contract.supports(found) else [f"version: expected {contract.versions}, got {found}"]
    wrong += [line for symbol in contract.symbols for line in differences(symbol)]
    wrong += list(_models(contract)) + list(_forms(contract)) + list(parity())
    unseen = sum(len(symbol.attributes) + len(symbol.tensors) for symbol in contract.symbols)
    print(f"TensorRT-LLM {found}: {len(contract.symbols)} symbols and 3 families' steps compared, {len(wrong)} differences")
    print(f"not compared, since they need a running engine: {unseen} attributes and tensor arguments")
    for line in wrong:
        print(f"  {line}")
    return DRIFT if wrong else OK


# ---- signatures ----------------------------------------------------------------------------------------------------------


def differences(symbol: Symbol) -> Iterator[str]:
    """What of a symbol is otherwise in the installed release; what is optional or of one form of the managers may be absent."""
    if symbol.kind in ("attributes", "tensors"):
        return
    found = engine.locate(symbol)
    if found is None:
        if not (symbol.optional or symbol.form):
            yield f"{symbol.name}: expected in {' or '.join(symbol.modules)}, found none"
        return
    module, one = found
    where = f"{module}.{symbol.name}"
    if "update_mamba_states" in symbol.methods and _form(one) != symbol.form:
        return  # another form's class of this name: _forms says which there are
    if symbol.kind == "dataclass":
        fields = {field.name for field in dataclasses.fields(one)}
        missing = set(signature(symbol.parameters).parameters) - fields
        if missing:
            yield f"{where}: expected fields {sorted(missing)}, found {sorted(fields)}"
    elif symbol.parameters:
        yield from _signature(where, one, signature(symbol.parameters))
    for name, parameters in symbol.methods.items():
        method = inspect.getattr_static(one, name, None)
        if method is None:
            yield f"{where}.{name}: expected, found none"
        elif parameters != "property" and not isinstance(method, property):
            yield from _signature(f"{where}.{name}", getattr(one, name), signature(parameters))


def _signature(where: str, one: Any, wanted: Signature) -> Iterator[str]:
    """Every parameter that the shim names is taken by that name, and none that it does not know is required."""
    try:
        found = inspect.signature(one)
    except (TypeError, ValueError) as error:
        yield f"{where}: expected {wanted}, got no signature ({error})"
        return
    taken = {name: p for name, p in found.parameters.items() if name != "self"}
    open_ended = any(p.kind == Parameter.VAR_KEYWORD for p in taken.values())
    further = any(p.kind == Parameter.VAR_KEYWORD for p in wanted.parameters.values())
    named = [p for p in wanted.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
    missing = [p.name for p in named if p.name not in taken and not open_ended]
    required = [
        name for name, p in taken.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in wanted.parameters
    ]  # fmt: skip
    order = [p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    if missing or (required and not further) or [name for name in taken if name in order] != [n for n in order if n in taken]:
        yield f"{where}: expected {wanted}, got {found}"


def _models(contract: Contract) -> Iterator[str]:
    for architecture, model in contract.models.items():
        symbol = Symbol(name=model.class_name, kind="class", modules=[model.module], source="index")
        if engine.locate(symbol) is None:
            yield f"{architecture}: expected {model.class_name} in {model.module}, found none"


def _forms(contract: Contract) -> Iterator[str]:
    """At least one cache manager that the shim can subclass."""
    managers = [one for one in contract.symbols if "update_mamba_states" in one.methods]
    forms = {form for one in managers if (found := engine.locate(one)) and (form := _form(found[1]))}
    print(f"cache managers: {', '.join(sorted(forms)) or 'none'}")
    if not forms:
        yield f"cache managers: expected one of {[one.name for one in managers]}, found none of a known shape"


def _form(manager: type) -> Form | None:
    try:
        return form_of(manager)
    except engine.Refused:
        return None


# ---- one layer's steps ---------------------------------------------------------------------------------------------------


def parity() -> Iterator[str]:
    """The core over a pool as the engine lays it out, beside the engine's own functions over a copy of it."""
    device = _device()
    if device is None:
        yield "steps: expected a CUDA device to compare them on, found none"
        return
    for name, family in (("selective_state_update", _mamba2), ("fused_sigmoid_gating_delta_rule_update", _gdn),
                         ("fused_recurrent_kda", _kda)):  # fmt: skip
        function = engine.find(name)
        if function is None:
            yield f"{name}: expected for the comparison of steps, found none"
            continue
        outputs, states = family(function, device)
        for what, error, bound in (("outputs", outputs, OUTPUT_BOUND), ("states", states, STATE_BOUND)):
            if not error < bound:
                yield f"{name}: expected {what} within {bound:.0e} of the core's, got {error:.1e}"


def _device() -> torch.device | None:
    return torch.device("cuda") if torch.cuda.is_available() else None


Step = Callable[[Recurrent, Tensor, Tensor], tuple[Tensor, Tensor]]


def _run(layout: Layout, device: torch.device, step: Step, A: Tensor | None = None) -> tuple[float, float]:
    """Worst error of outputs and of final states over their rms; ``step`` gives both outputs and advances the engine's pool."""
    pool = torch.randn(ROWS + 2, 2, layout.H, layout.V, layout.K, device=device)[:, :1].transpose(0, 1) * layout.K**-0.5
    theirs, slots = pool[0].clone(), torch.arange(ROWS, 0, -1, dtype=torch.int32, device=device)
    recurrent = Recurrent(layout, pool, None, rows=ROWS)
    if A is not None and recurrent.A is not None:
        recurrent.A[0] = A
    worst = 0.0
    for _ in range(STEPS):
        recurrent.begin(Batch(slots, 0, 1))
        ours, wanted = step(recurrent, theirs, slots)
        recurrent.finish(0)
        worst = max(worst, _error(ours, wanted, BF16))
    recurrent.settle(slots.tolist())
    at = slots.long()
    return worst, _error(pool[0, at], theirs[at])


def _error(ours: Tensor, wanted: Tensor, rounding: float = 0.0) -> float:
    """Worst element's difference beyond its rounding, over the rms."""
    wanted = wanted.float()
    beyond = ((ours.float() - wanted).abs() - rounding * wanted.abs()).max() / wanted.square().mean().sqrt()
    return float(beyond.clamp(min=0).nan_to_num(float("inf")))


def _draw(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, device=device).bfloat16()

    H, G, V, K = layout.H, layout.G, layout.V, layout.K
    gate = (H, K) if layout.recurrence.per_channel else (H,)
    return {"q": draw(G, K), "k": draw(G, K), "v": draw(H, V), "b": draw(H), "a": draw(*gate)}


def _mamba2(function: Callable, device: torch.device) -> tuple[float, float]:
    layout = Layout(MAMBA2, H=16, G=2, V=64, K=128, order="token")
    H, V, K = layout.H, layout.V, layout.K
    A, bias, D = -torch.rand(H, device=device), torch.randn(H, device=device), torch.randn(H, device=device)

    def step(recurrent: Recurrent, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        x = _draw(layout, device)
        wanted = torch.empty_like(x["v"])
        function(pool, x["v"], x["b"].float()[..., None].expand(-1, -1, V), A[:, None, None].expand(H, V, K), x["k"], x["q"],
                 D[:, None].expand(H, V), z=None, dt_bias=bias[:, None].expand(H, V), dt_softplus=True,
                 state_batch_indices=slots, out=wanted)  # fmt: skip
        del x["a"]
        return recurrent.step(0, **x, dt_bias=bias, D=D), wanted

    return _run(layout, device, step, A)


def _gdn(function: Callable, device: torch.device) -> tuple[float, float]:
    layout = Layout(GDN, H=4, G=2, V=128, K=128, order="token")
    A_log, bias = torch.rand(layout.H, device=device), torch.randn(layout.H, device=device)

    def step(recurrent: Recurrent, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        x = _draw(layout, device)
        lengths = torch.arange(ROWS + 1, device=device)
        wanted = function(A_log=A_log, dt_bias=bias, q=x["q"][None], k=x["k"][None], v=x["v"][None], a=x["a"], b=x["b"],
                          initial_state_source=pool, initial_state_indices=slots, cu_seqlens=lengths,
                          use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0)  # fmt: skip
        return recurrent.step(0, **x, A=-A_log.exp(), dt_bias=bias), wanted[0]

    return _run(layout, device, step)


def _kda(function: Callable, device: torch.device) -> tuple[float, float]:
    layout = Layout(KDA, H=4, G=4, V=128, K=128, order="token")
    A_log, bias = torch.rand(layout.H, device=device), torch.randn(layout.H, layout.K, device=device)

    def step(recurrent: Recurrent, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        x = _draw(layout, device)
        at = slots.long()
        wanted, pool[at] = function(
            q=x["q"][:, None], k=x["k"][:, None], v=x["v"][:, None], g=x["a"][:, None], beta=x["b"][:, None].float(),
            A_log=A_log, dt_bias=bias.flatten(), initial_state=pool[at], output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=None, state_v_first=True,
        )  # fmt: skip
        return recurrent.step(0, **x, A=-A_log.exp(), dt_bias=bias), wanted[:, 0]

    return _run(layout, device, step)


if __name__ == "__main__":
    sys.exit(main())
