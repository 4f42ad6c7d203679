"""The public operations, as functions over plain tensors and as opaque ops ``torch.ops.replayssm.*`` for torch.compile.

``backend`` is "triton" or "torch"; ``layout`` of an op is ``Layout.spec``. Every buffer an op writes is declared mutated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import eager, kernels, launch
from .cursor import Cursors
from .kernels import arguments
from .layout import STORED, Buffers, Inputs, Layout, Weights, states

BACKENDS = ("triton", "torch")
Ready = Callable[..., None]  # an operation with all that stays the same from step to step settled
Pool = Buffers | None


def _nothing(*args: object) -> None:
    """What there is to do for no rows."""


def plan(B: int, T: int, tree: bool, cursors: Cursors, layout: Layout, backend: str) -> Ready:
    """The plan of a step of B rows: call it with (slots, t, force, cu_seqlens, parents, out, tree).

    It writes plan rows ``out``, marks their slots pending and moves the cursors of those that flush.

    Args:
        slots: [B] int32 or int64; negative rows are padding.
        t: [B] tokens per row, or None for T each (with cu_seqlens: the differences).
        force: [B] non-zero where the row flushes in any case, or None.
        cu_seqlens: [B + 1] first packed token of each row, or None where row b starts at b T.
        parents: [B, T_max] the token that each follows, -1 for the committed history, or None where it is the one before.
        out: [B, len(PLAN)] int32, written.
        tree: with parents, [B, 2, T_max] int32, written: parents, and the bits of each token and its ancestors.
        cursors: of the slots; all but ``key`` are written.
    """
    if B == 0:
        return _nothing
    if backend == "torch":
        return partial(eager.plan, cursors=cursors, T=T, layout=layout)
    return kernels.cursor.plan(B, T, tree, cursors, layout)


def commit(B: int, cursors: Cursors, backend: str) -> Ready:
    """The commit of B rows: call it with (plan, accepted), [B] tokens that stay (None: all); again changes nothing."""
    if B == 0:
        return _nothing
    return partial(eager.commit, cursors=cursors) if backend == "torch" else kernels.cursor.commit(B, cursors)


def compact(B: int, buffers: Buffers, pending: Tensor, layout: Layout, backend: str) -> Ready:
    """Moves accepted paths of B rows together, all layers: call it with (plan, path, accepted), before ``commit``.

    The records of the first ``accepted`` [B] nodes (None: t) of each ``path`` [B, T_max] of the plan's pending slots.
    """
    if B == 0:
        return _nothing
    if backend == "torch":
        return partial(eager.compact, buffers=buffers, pending=pending, layout=layout)
    return kernels.compact.compact(B, buffers, pending, layout)


def step(B: int, T: int, x: Inputs, out: Tensor, buffers: Buffers, layout: Layout, backend: str, pool: Pool = None) -> Ready:
    """One step of one layer, B rows of at most T tokens: call it with (plan, tree, layer, x, w, out), see ``ReplayState.step``.

    Args:
        x, out: for their strides alone.
        pool: the buffers' Rows, where the caller keeps them.
    """
    if B == 0:
        return _nothing
    if backend == "torch":
        return partial(eager.step, buffers=buffers, T=T, layout=layout)
    pool = pool or arguments.pool(buffers)
    if T <= 1:
        launched = kernels.decode.decode(B, pool, layout, launch.decode(layout, B))
    else:
        launched = kernels.verify.verify(B, T, pool, layout, launch.verify(layout, B))
    strides: list[Any] = [None if one is None else one.stride()[:2] for one in (*x, out)]

    def run(plan: Tensor, tree: Tensor | None, layer: int, x: Inputs, w: Weights, out: Tensor) -> None:
        *tokens, to = [s and (one, *s) for one, s in zip((*x, out), strides, strict=True)]
        planned = (plan,) if T <= 1 else (plan, tree)
        launched(*planned, layer, tuple(tokens), tuple(w), to)

    return run


def conv(
    B: int, tree: bool, x: Tensor, weight: Tensor, out: Tensor, ring: Tensor, T: int, silu: bool, layout: Layout, backend: str
) -> Ready:
    """One layer's convolution of B rows: call it with (plan, tree, layer, x, weight, bias, out), see ``ReplayState.conv``.

    Args:
        x, weight, out: for their strides and sizes alone.
        ring: [L, S, 1, R, C], read and written.
    """
    if B == 0:
        return _nothing
    if backend == "torch":
        return partial(eager.conv, ring=ring, T=T, silu=silu, layout=layout)
    launched = kernels.conv.conv(B, weight.shape[1], silu, tree, arguments.rows(ring), layout)
    read, written = x.stride(0), out.stride(0)

    def run(plan: Tensor, tree: Tensor | None, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        launched(plan, tree, layer, (x, read, 0), weight, bias, (out, written, 0))

    return run


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


def flush(B: int, buffers: Buffers, A: Tensor | None, layout: Layout, backend: str, pool: Pool = None) -> Ready:
    """Folds the rings of B rows' flushing ones into checkpoints and read copies, all layers, with ``A`` [L, H].

    Call it with (plan,), after ``plan``, which has moved the cursors, and before any ``step``. ``pool``: as in ``step``.
    """
    if B == 0:
        return _nothing
    if backend == "torch":
        return partial(eager.flush, buffers=buffers, A=A, layout=layout)
    launched = kernels.materialize.flush(B, pool or arguments.pool(buffers), A, layout, launch.materialize(layout))
    return lambda plan: launched(plan, None, None, None)


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


def _step_op(plan_rows, tree, layer, *rest):
    x, w, rest = Inputs(*rest[:6]), Weights(*rest[6:9]), rest[9:]
    *buffers, out, T, layout, backend = rest
    step(plan_rows.shape[0], T, x, out, Buffers(*buffers), Layout.parse(layout), backend)(plan_rows, tree, layer, x, w, out)


def _plan_op(slots, t, force, cu_seqlens, parents, *rest):
    *cursors, out, tree, T, layout, backend = rest
    ready = plan(slots.shape[0], T, tree is not None, Cursors(*cursors), Layout.parse(layout), backend)
    ready(slots, t, force, cu_seqlens, parents, out, tree)


def _compact_op(plan_rows, path, accepted, *rest):
    *buffers, pending, layout, backend = rest
    compact(plan_rows.shape[0], Buffers(*buffers), pending, Layout.parse(layout), backend)(plan_rows, path, accepted)


def _commit_op(plan_rows, accepted, *rest):
    *cursors, _, backend = rest
    commit(plan_rows.shape[0], Cursors(*cursors), backend)(plan_rows, accepted)


def _conv_op(plan_rows, tree, layer, x, weight, bias, ring, out, T, silu, layout, backend):
    B, has_tree = plan_rows.shape[0], tree is not None
    ready = conv(B, has_tree, x, weight, out, ring, T, silu, Layout.parse(layout), backend)
    ready(plan_rows, tree, layer, x, weight, bias, out)


def _materialize_op(slots, n, *rest):
    (*tensors, A, target, to_slots, layout, backend), fields = rest, len(Buffers._fields)
    materialize(
        slots, n, Buffers(*tensors[:fields]), Cursors(*tensors[fields:]), A, target, to_slots, Layout.parse(layout), backend
    )


def _flush_op(plan_rows, *rest):
    *buffers, A, layout, backend = rest
    flush(plan_rows.shape[0], Buffers(*buffers), A, Layout.parse(layout), backend)(plan_rows)


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
