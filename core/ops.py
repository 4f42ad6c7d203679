"""The public operations, as functions over plain tensors and as opaque ops ``torch.ops.replayssm.*`` for torch.compile.

``backend`` is "triton" or "torch"; ``layout`` of an op is ``Layout.spec``. Every buffer an op writes is declared mutated.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from . import eager, kernels, launch
from .cursor import Cursors
from .kernels import arguments
from .kernels.arguments import Inputs, Weights, tokens
from .layout import STORED, Buffers, Layout, states

BACKENDS = ("triton", "torch")


def _cursor_backend(backend: str) -> ModuleType:
    return kernels.cursor if backend == "triton" else eager


def plan(
    slots: Tensor,
    t: Tensor | None,
    force: Tensor | None,
    cu_seqlens: Tensor | None,
    cursors: Cursors,
    out: Tensor,
    T: int,
    layout: Layout,
    backend: str,
    parents: Tensor | None = None,
    tree: Tensor | None = None,
) -> None:
    """Write plan rows ``out`` [B, len(PLAN)] int32, mark their slots pending and move the cursors of those that flush.

    Args:
        slots: [B] int32 or int64; negative rows are padding.
        t: [B] tokens per row, or None for T each (with cu_seqlens: the differences).
        force: [B] non-zero where the row flushes in any case, or None.
        cu_seqlens: [B + 1] first packed token of each row, or None where row b starts at b T.
        cursors: of the slots; all but ``key`` are written.
        parents: [B, T_max] the token that each follows, -1 for the committed history, or None where it is the one before.
        tree: with parents, [B, 2, T_max] int32, written: parents, and the bits of each token and its ancestors.
    """
    if slots.shape[0]:
        rules = _cursor_backend(backend)
        rules.plan(slots, t, force, cu_seqlens, cursors, out, T, layout, parents, tree)


def commit(plan: Tensor, accepted: Tensor | None, cursors: Cursors, backend: str) -> None:
    """Move the cursors of the plan's pending slots by ``accepted`` [B] tokens (None: all); again changes nothing."""
    if plan.shape[0]:
        _cursor_backend(backend).commit(plan, accepted, cursors)


def compact(
    plan: Tensor,
    path: Tensor,
    accepted: Tensor | None,
    buffers: Buffers,
    pending: Tensor,
    layout: Layout,
    backend: str,
) -> None:
    """Move the records of the first ``accepted`` [B] nodes (None: t) of each ``path`` [B, T_max] together, all layers.

    For the plan's pending slots; before ``commit``.
    """
    if plan.shape[0] == 0:
        return
    if backend == "torch":
        eager.compact(plan, path, accepted, buffers, pending, layout)
    else:
        kernels.compact.compact(plan, path, accepted, buffers, pending, layout)


def step(
    plan: Tensor,
    layer: int,
    x: dict[str, Tensor | None],
    w: dict[str, Tensor | None],
    buffers: Buffers,
    out: Tensor,
    T: int,
    layout: Layout,
    backend: str,
    pool: Buffers | None = None,
    tree: Tensor | None = None,
) -> None:
    """One step of one layer: see ``ReplayState.step``. ``pool``: the buffers' Rows, where the caller keeps them."""
    if plan.shape[0] == 0:
        return
    if backend == "torch":
        eager.step(plan, layer, **x, **w, buffers=buffers, out=out, T=T, layout=layout, tree=tree)
        return
    inputs = Inputs(*(tokens(x[name]) for name in Inputs._fields))
    weights, pool, B = Weights(**w), pool or arguments.pool(buffers), plan.shape[0]
    if T <= 1:
        kernels.decode.decode(plan, layer, inputs, weights, pool, out, layout, launch.decode(layout, B))
    else:
        kernels.verify.verify(plan, layer, inputs, weights, pool, out, T, layout, launch.verify(layout, B), tree)


def conv(
    plan: Tensor,
    layer: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    out: Tensor,
    T: int,
    silu: bool,
    layout: Layout,
    backend: str,
    tree: Tensor | None = None,
) -> None:
    """Causal convolution of one layer's step: see ``ReplayState.conv``. ``ring`` [L, S, 1, R, C] is read and written."""
    if plan.shape[0] == 0:
        return
    if backend == "torch":
        eager.conv(plan, layer, x, weight, bias, ring, out, layout.R, T, silu, tree)
    else:
        kernels.conv.conv(plan, layer, x, weight, bias, arguments.rows(ring), out, layout.R, silu, tree)


def materialize(
    slots: Tensor,
    n: Tensor | None,
    buffers: Buffers,
    cursors: Cursors,
    A: Tensor | None,
    target: Tensor,
    to_slots: Tensor,
    layout: Layout,
    backend: str,
) -> None:
    """target[:, to_slots[i]] = the states of slots[i] after the first n[i] records: see ``ReplayState.materialize``."""
    if slots.shape[0] == 0:
        return
    if backend == "torch":
        eager.materialize(buffers, slots, cursors, n, states(target), to_slots, None, A, 0, layout)
    else:
        pool, into, record = arguments.pool(buffers), arguments.pool(states(target)), launch.materialize(layout)
        kernels.materialize.materialize(pool, slots, cursors, n, into, to_slots, None, A, 0, layout, record)


def flush(plan: Tensor, buffers: Buffers, A: Tensor | None, layout: Layout, backend: str, pool: Buffers | None = None) -> None:
    """Fold the rings of the plan's flushing rows into their checkpoints and read copies, all layers, with ``A`` [L, H].

    After ``plan``, which has moved the cursors, and before any ``step``. ``pool``: the buffers' Rows, where the caller keeps
    them.
    """
    if plan.shape[0] == 0:
        return
    if backend == "torch":
        eager.flush(plan, buffers, A, layout)
    else:
        kernels.materialize.flush(plan, pool or arguments.pool(buffers), A, layout, launch.materialize(layout))


def load(source: Tensor, buffers: Buffers, key: Tensor, slots: Tensor, first: int, layout: Layout, backend: str) -> None:
    """Checkpoints and read copies of slots[i], layers `first` on = source[:, i], rounded for the slots' keys.

    Args:
        source: [L, B, H, V, K] of any supported dtype, contiguous in [V, K].
        buffers: of all layers; written.
        key: [S] the cursors' keys.
    """
    if slots.shape[0] == 0:
        return
    rows = torch.arange(slots.shape[0], device=slots.device, dtype=slots.dtype)
    if backend == "torch":
        eager.materialize(states(source), rows, None, None, buffers, slots, key, None, first, layout)
    else:
        pool, record = arguments.pool(buffers), launch.materialize(layout)
        given = arguments.pool(states(source))
        kernels.materialize.materialize(given, rows, None, None, pool, slots, key, None, first, layout, record)


# ---- torch.ops.replayssm.* ---------------------------------------------------------------------------------------------

_library = torch.library.Library("replayssm", "DEF")
_CURSORS = "Tensor start, Tensor count, Tensor pending, Tensor flushes, Tensor key"
_MOVED = "Tensor(s!) start, Tensor(c!) count, Tensor(p!) pending, Tensor(f!) flushes, Tensor key"
_KEPT = "Tensor start, Tensor(c!) count, Tensor(p!) pending, Tensor flushes, Tensor key"
_ALWAYS = ("state", "k", "v")
_RINGS = Buffers._fields[len(STORED) : -1]  # all but conv


def _buffers(written: tuple[str, ...] = (), fields: tuple[str, ...] = Buffers._fields) -> str:
    """Schema of buffers, those named marked as mutated."""
    return ", ".join(
        f"Tensor{f'({name}!)' if name in written else ''}{'' if name in _ALWAYS else '?'} buffer_{name}" for name in fields
    )


_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor? b, Tensor? a, Tensor? z, Tensor? A, Tensor? dt_bias, Tensor? D"
_END = "str layout, str backend"
IMPLEMENTATIONS: dict[str, Callable[..., None]] = {}  # of each op, with its schema's arguments


def _define(name: str, schema: str, implementation: Callable[..., None]) -> None:
    IMPLEMENTATIONS[name] = implementation
    _library.define(f"{name}({schema}) -> ()")
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"replayssm::{name}", lambda *args: None, lib=_library)


def _step_op(plan_rows, tree, layer, q, k, v, b, a, z, A, dt_bias, D, *rest):
    *buffers, out, T, layout, backend = rest
    x = {"q": q, "k": k, "v": v, "b": b, "a": a, "z": z}
    w = {"A": A, "dt_bias": dt_bias, "D": D}
    step(plan_rows, layer, x, w, Buffers(*buffers), out, T, Layout.parse(layout), backend, tree=tree)


def _plan_op(slots, t, force, cu_seqlens, parents, *rest):
    *cursors, out, tree, T, layout, backend = rest
    plan(slots, t, force, cu_seqlens, Cursors(*cursors), out, T, Layout.parse(layout), backend, parents, tree)


def _compact_op(plan_rows, path, accepted, *rest):
    *buffers, pending, layout, backend = rest
    compact(plan_rows, path, accepted, Buffers(*buffers), pending, Layout.parse(layout), backend)


def _commit_op(plan_rows, accepted, *rest):
    *cursors, _, backend = rest
    commit(plan_rows, accepted, Cursors(*cursors), backend)


def _conv_op(plan_rows, tree, layer, x, weight, bias, ring, out, T, silu, layout, backend):
    conv(plan_rows, layer, x, weight, bias, ring, out, T, silu, Layout.parse(layout), backend, tree)


def _materialize_op(slots, n, *rest):
    (*tensors, A, target, to_slots, layout, backend), fields = rest, len(Buffers._fields)
    materialize(
        slots, n, Buffers(*tensors[:fields]), Cursors(*tensors[fields:]), A, target, to_slots, Layout.parse(layout), backend
    )


def _flush_op(plan_rows, *rest):
    *buffers, A, layout, backend = rest
    flush(plan_rows, Buffers(*buffers), A, Layout.parse(layout), backend)


def _load_op(source, *rest):
    *tensors, key, slots, first, layout, backend = rest
    absent = [None] * (len(Buffers._fields) - len(STORED))
    load(source, Buffers(*tensors, *absent), key, slots, first, Layout.parse(layout), backend)


_define(
    "plan",
    f"Tensor slots, Tensor? t, Tensor? force, Tensor? cu_seqlens, Tensor? parents, {_MOVED}, Tensor(o!) out, "
    f"Tensor(t!)? tree, int T, {_END}",
    _plan_op,
)
_define(
    "compact",
    f"Tensor plan, Tensor path, Tensor? accepted, {_buffers((*_RINGS, 'conv'))}, Tensor pending, {_END}",
    _compact_op,
)
_define("commit", f"Tensor plan, Tensor? accepted, {_KEPT}, {_END}", _commit_op)
_define(
    "step",
    f"Tensor plan, Tensor? tree, int layer, {_TOKENS}, {_buffers(_RINGS)}, Tensor(o!) out, int T, {_END}",
    _step_op,
)
_define(
    "conv",
    f"Tensor plan, Tensor? tree, int layer, Tensor x, Tensor weight, Tensor? bias, Tensor(r!) ring, Tensor(o!) out, int T, "
    f"bool silu, {_END}",
    _conv_op,
)
_define(
    "materialize",
    f"Tensor slots, Tensor? n, {_buffers()}, {_CURSORS}, Tensor? A, Tensor(t!) target, Tensor to_slots, {_END}",
    _materialize_op,
)
_define("flush", f"Tensor plan, {_buffers(STORED)}, Tensor? A, {_END}", _flush_op)
_define("load", f"Tensor source, {_buffers(STORED, STORED)}, Tensor key, Tensor slots, int first, {_END}", _load_op)
