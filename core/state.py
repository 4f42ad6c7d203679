"""ReplayState: the recurrent state of all layers and slots, and everything that can be done with it."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from . import checks, cursor, ops, transfer
from .checks import INTEGERS, Checks, describe, expect, forms
from .cursor import PLAN_WIDTH, Cursors, Plan
from .export import Export
from .formats import Stored
from .layout import STORED, Buffers, Inputs, Layout, Weights

MOST_READY = 4096


def _debug_from_environment() -> bool:
    value = os.environ.get("REPLAYSSM_DEBUG", "0")
    if value not in ("0", "1"):
        raise ValueError(f"REPLAYSSM_DEBUG: expected '0' or '1', got {value!r}")
    return value == "1"


class ReplayState:
    """Checkpoints, rings and cursors of `layers` equal layers and `slots` requests.

    A step is ``plan``, then ``step`` once per layer, then ``commit``. Between a commit and the next plan, and only there, the
    state may be folded, materialized, loaded, copied, reset, exported and imported.

    Args:
        layout: of every layer.
        layers, slots: how many.
        device: where an allocated state lives; ignored with ``buffers``.
        backend: "triton" (a CUDA GPU, or CPU under TRITON_INTERPRET=1) or "torch" (any device); None takes triton on CUDA.
        A: [layers, H] fp32, ``-exp(A_log)`` of every layer, for families whose g is derived (Mamba-2), whose folds need it.
            Kept by reference: write into it when weights change.
        buffers: tensors [layers, slots, ...] that an engine owns, with any slot, head and row strides; None allocates.
        max_rows: most batch rows of a step, padding included; default ``slots``.
        debug: check cursors, slots and the order of calls at the price of device reads; None reads REPLAYSSM_DEBUG.

    Attributes:
        buffers, cursors: the tensors themselves; written by this object's methods alone.
    """

    def __init__(
        self,
        layout: Layout,
        layers: int,
        slots: int,
        device: torch.device | str = "cpu",
        backend: str | None = None,
        A: Tensor | None = None,
        buffers: Buffers | None = None,
        max_rows: int | None = None,
        debug: bool | None = None,
    ) -> None:
        max_rows = slots if max_rows is None else max_rows
        if min(layers, slots, max_rows) < 1:
            raise ValueError(f"layers, slots, max_rows: expected >= 1, got {layers}, {slots}, {max_rows}")
        if buffers is not None:
            device = buffers.state.device
        device = checks.present(device)
        backend = backend or ("triton" if device.type == "cuda" else "torch")
        if backend not in ops.BACKENDS:
            raise NotImplementedError(f"backend: expected one of {list(ops.BACKENDS)}, got {backend!r}")
        if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise NotImplementedError(
                f"backend: triton needs a CUDA device (or TRITON_INTERPRET=1), got {device}; use backend='torch'"
            )
        checks.kept_A(A, layout, layers, device)
        if backend == "triton":
            checks.number_formats(layout, device)
        self.layout, self.layers, self.slots, self.device, self.backend, self.A = layout, layers, slots, device, backend, A
        if buffers is None:
            buffers = layout.allocate(layers, slots, device)
        elif buffers.state.shape[:2] != (layers, slots):
            raise ValueError(f"buffers: expected [{layers}, {slots}, ...], got {list(buffers.state.shape)}")
        layout.check(buffers)
        self.buffers: Buffers = buffers
        self.cursors: Cursors = cursor.allocate(slots, device)
        debug = _debug_from_environment() if debug is None else debug
        self._checks = Checks(layout, layers, slots, self.device, self.cursors, debug)
        self._plans = torch.zeros(max_rows, PLAN_WIDTH, dtype=torch.int32, device=device)
        self._trees = torch.zeros(max_rows, 2, layout.T_max, dtype=torch.int32, device=device)
        self._pool = ops.arguments.pool(buffers) if backend == "triton" else None
        self._A = None if A is None else A.unbind()
        self._ready: dict[Hashable, Any] = {}
        self._ran: set[int] = set()
        self._spec = layout.spec  # TorchDynamo cannot trace its making

    @property
    def debug(self) -> bool:
        """Whether cursors, slots and the order of calls are checked at the price of device reads."""
        return self._checks.debug

    # ---- a step --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        slots: Tensor,
        t: int | Tensor = 1,
        force: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Plan:
        """Decide the step, which rows flush and where records go, and flush: two launches for all layers, the first a tiny one.

        Args:
            slots: [B] int32 or int64 on the device; negative rows are padding. No live slot twice.
            t: tokens of every row, or [B] of each. Row b's tokens start at packed row ``b T``, T being ``t`` or, for a
                tensor, the layout's T_max.
            force: [B] bool or int, non-zero where a row flushes in any case; with t = 0 the flush is alone.
            cu_seqlens: [B + 1] int, first packed token of each row; then t is their difference and must be left alone.
            parents: [B, T_max] int, contiguous: each row a draft tree whose token i follows token parents[b, i] < i, or the
                committed history where that is -1; entries from t on mean nothing. Copied. None: token i follows i - 1.

        Returns:
            The plan, valid until the next one. Its slots are pending until ``commit``.
        """
        per_row = t if isinstance(t, Tensor) else None
        T = t if isinstance(t, int) and cu_seqlens is None else self.layout.T_max
        args = slots, per_row, force, cu_seqlens, parents
        if torch.compiler.is_compiling():
            plan = self._planned(T, t, slots, force, cu_seqlens, parents)
            torch.ops.replayssm.plan(*args, *self.cursors, plan.rows, plan.tree, T, self._spec, self.backend)
            torch.ops.replayssm.flush(plan.rows, *self.buffers, self.A, self._spec, self.backend)
        else:
            key = "plan", None if per_row is not None else t, forms(*args)
            run, flush, plan = self._ready.get(key) or self._keep(
                key, self._ready_plan(self._planned(T, t, slots, force, cu_seqlens, parents))
            )
            if self.debug:
                self._checks.debug_plan(slots, T, per_row, cu_seqlens, parents)
            run(*args, plan.rows, plan.tree)
            flush(plan.rows)
        self._ran.clear()
        return plan

    def _planned(
        self,
        T: int,
        t: int | Tensor,
        slots: Tensor,
        force: Tensor | None,
        cu_seqlens: Tensor | None,
        parents: Tensor | None,
    ) -> Plan:
        """The views that a plan of these arguments is written to, once they are as expected."""
        self._checks.plan(slots, t, force, cu_seqlens, parents, self._plans.shape[0])
        B = slots.shape[0]
        return Plan(self._plans[:B], T, None if cu_seqlens is not None else B * T, None if parents is None else self._trees[:B])

    def _ready_plan(self, plan: Plan) -> tuple[ops.Ready, ops.Ready, Plan]:
        B, backend = plan.rows.shape[0], self.backend
        run = ops.plan(B, plan.T, plan.tree is not None, self.cursors, self.layout, backend)
        return run, ops.flush(B, self.buffers, self.A, self.layout, backend, self._pool), plan

    def _keep(self, key: Hashable, ready: Any) -> Any:
        """Keep it ready: arguments of a form that was seen need no check and no look by Triton again."""
        if len(self._ready) >= MOST_READY:
            self._ready.clear()
        self._ready[key] = ready
        return ready

    def step(
        self,
        layer: int,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor | None = None,
        a: Tensor | None = None,
        z: Tensor | None = None,
        A: Tensor | None = None,
        dt_bias: Tensor | None = None,
        D: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One layer's outputs for the plan's tokens; appends their records, folding the ring first where the plan says so.

        Inputs are packed tokens, read alone, with unit inner stride and any token and head stride, so that views of a
        projection need no copy. q, k, v, z have the layout's activation dtype; b and a any floating dtype.

        Args:
            q, k: [N, G, K]; Mamba-2: C, B.
            v: [N, H, V]; Mamba-2: x.
            b: [N, H], input of beta; Mamba-2: dt. None where beta is 1.
            a: [N, H], or [N, H, K] per channel: input of g, natural log. None where g is derived.
            z: [N, H, V], the epilogue's gate, or None.
            A: [H] fp32, ``-exp(A_log)``, for the softplus and safe decays; a derived decay takes the state's own.
            dt_bias: [H], or [H, K] per channel, floating, or None.
            D: [H], floating, or None.
            out: [N, H, V], written and returned; None allocates.

        Returns:
            o [N, H, V] in the activation dtype. Rows of padding and of unused tokens are 0.

        Raises:
            ValueError: a wrong shape, dtype, device or inner stride, named; nothing is written then.

        Source: output-only form of the recurrence in ``replayssm.recurrence``.
        """
        self._checks.layer(layer)
        if self._A is not None:
            if A is not None:
                raise ValueError(f"A: expected None for {self.layout.recurrence.name}, got {describe(A)}")
            A = self._A[layer]
        x, w = Inputs(q, k, v, b, a, z), Weights(A, dt_bias, D)
        if out is None and v is not None:  # one that is absent is refused below
            out = torch.empty(v.shape, dtype=self.layout.act, device=v.device)
        compiling = torch.compiler.is_compiling()
        if compiling:
            self._checks.step(plan.tokens, x, w, out)
        else:
            key = "step", plan, forms(*x, *w, out)
            run = self._ready.get(key) or self._keep(key, self._ready_step(plan, x, w, out))
        assert out is not None
        if self.debug:
            if layer in self._ran:
                raise RuntimeError(f"layer {layer} ran twice under one plan; call commit and plan between steps")
            self._ran.add(layer)
        if compiling:
            torch.ops.replayssm.step(plan.rows, plan.tree, layer, *x, *w, *self.buffers, out, plan.T, self._spec, self.backend)
        else:
            run(plan.rows, plan.tree, layer, x, w, out)
        return out

    def _ready_step(self, plan: Plan, x: Inputs, w: Weights, out: Tensor | None) -> ops.Ready:
        self._checks.step(plan.tokens, x, w, out)
        assert out is not None
        return ops.step(plan.rows.shape[0], plan.T, x, out, self.buffers, self.layout, self.backend, self._pool)

    def conv(
        self,
        layer: int,
        plan: Plan,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        silu: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal depthwise convolution of the plan's tokens, x [N, C] -> [N, C]; appends x to the conv-input ring.

        Args:
            x: [N, C] raw inputs in the activation dtype, unit inner stride.
            weight: [C, width] floating, contiguous; bias: [C] or None.
            silu: whether ``y * sigmoid(y)`` follows.
        """
        self._checks.layer(layer)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        compiling = torch.compiler.is_compiling()
        if compiling:
            self._checks.conv(plan.tokens, x, weight, bias, out)
        else:
            key = "conv", plan, silu, forms(x, weight, bias, out)
            run = self._ready.get(key) or self._keep(key, self._ready_conv(plan, x, weight, bias, out, silu))
        if compiling:
            torch.ops.replayssm.conv(
                plan.rows, plan.tree, layer, x, weight, bias, self.buffers.conv, out, plan.T, silu, self._spec, self.backend
            )
        else:
            run(plan.rows, plan.tree, layer, x, weight, bias, out)
        return out

    def _ready_conv(self, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, silu: bool) -> ops.Ready:
        self._checks.conv(plan.tokens, x, weight, bias, out)
        ring, B = self.buffers.conv, plan.rows.shape[0]
        assert ring is not None
        return ops.conv(B, plan.tree is not None, x, weight, out, ring, plan.T, silu, self.layout, self.backend)

    def commit(self, plan: Plan, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        """Keep some of each row's tokens and move the cursors past them. Again changes nothing.

        Args:
            accepted: [B] int, how many, 0 ... t; None keeps all t.
            path: [B, T_max] int, contiguous, of a plan with parents alone: the numbers of the tokens that stay, from a root
                down; the first accepted[b] count. Their records are moved together in every layer. Without parents it is the
                first tokens that stay.
        """
        compiling = torch.compiler.is_compiling()
        if compiling:
            self._checks.commit(plan, accepted, path)
        else:
            key = "commit", plan, forms(accepted, path)
            compact, run = self._ready.get(key) or self._keep(key, self._ready_commit(plan, accepted, path))
        if self.debug:
            self._checks.debug_commit(plan, accepted, path)
        if not compiling:
            compact(plan.rows, path, accepted)
            run(plan.rows, accepted)
            return
        if path is not None:
            torch.ops.replayssm.compact(
                plan.rows, path, accepted, *self.buffers, self.cursors.pending, self._spec, self.backend
            )
        torch.ops.replayssm.commit(plan.rows, accepted, *self.cursors, self._spec, self.backend)

    def _ready_commit(self, plan: Plan, accepted: Tensor | None, path: Tensor | None) -> tuple[ops.Ready, ops.Ready]:
        self._checks.commit(plan, accepted, path)
        B, pending = plan.rows.shape[0], self.cursors.pending
        compact = ops.compact(B if path is not None else 0, self.buffers, pending, self.layout, self.backend)
        return compact, ops.commit(B, self.cursors, self.backend)

    # ---- between steps -------------------------------------------------------------------------------------------------

    def fold(self, slots: Tensor) -> None:
        """Flush the slots' rings in place, all layers: their checkpoints are then the exact states. Negative slots: nothing.

        A step without tokens, planned and committed beside the fixed plan buffer.
        """
        B = self._checks.slots("slots", slots, settled=True, distinct=True)
        rows, force = slots.new_empty(B, PLAN_WIDTH, dtype=torch.int32), torch.ones_like(slots)
        args = slots, None, force, None, None
        if torch.compiler.is_compiling():
            torch.ops.replayssm.plan(*args, *self.cursors, rows, None, 0, self._spec, self.backend)
            torch.ops.replayssm.flush(rows, *self.buffers, self.A, self._spec, self.backend)
            torch.ops.replayssm.commit(rows, None, *self.cursors, self._spec, self.backend)
        else:
            ops.plan(B, 0, False, self.cursors, self.layout, self.backend)(*args, rows, None)
            ops.flush(B, self.buffers, self.A, self.layout, self.backend, self._pool)(rows)
            ops.commit(B, self.cursors, self.backend)(rows, None)

    def materialize(
        self, slots: Tensor, n: Tensor | None = None, target: Tensor | None = None, to_slots: Tensor | None = None
    ) -> Tensor:
        """The exact states after each slot's first n committed records, all layers; live slots stay as they are.

        Args:
            slots: [B]; negative rows are skipped.
            n: [B] int, 0 ... count of the slot; None for all its records.
            target: [L, B', H, V, K] of fp32, bf16 or fp16, contiguous in [V, K], written; None allocates fp32.
            to_slots: [B] row of the target for each slot; None for 0 ... B - 1.

        Returns:
            The target.
        """
        B, layout = self._checks.slots("slots", slots, settled=True), self.layout
        self._checks.n(slots, n)
        if target is None:
            if to_slots is not None:
                raise ValueError("target: expected a tensor where to_slots says its rows, got None")
            target = torch.zeros(self.layers, B, layout.H, layout.V, layout.K, device=self.device)
        self._checks.states("target", target)
        if target.shape[0] != self.layers or (to_slots is None and target.shape[1] < B):
            raise ValueError(f"target: expected [{self.layers}, at least {B}, ...], got {list(target.shape)}")
        if to_slots is None:
            to_slots = torch.arange(B, device=self.device, dtype=slots.dtype)
        expect("to_slots", to_slots, (B,), INTEGERS, self.device)
        if self.debug:
            self._checks.debug_slots("to_slots", to_slots, target.shape[1], distinct=True)
        if torch.compiler.is_compiling():
            torch.ops.replayssm.materialize(
                slots, n, *self.buffers, *self.cursors, self.A, target, to_slots, self._spec, self.backend
            )
        else:
            ops.materialize(slots, n, self.buffers, self.cursors, self.A, target, to_slots, layout, self.backend)
        return target

    def conv_window(self, slots: Tensor, n: Tensor | None = None) -> Tensor:
        """The convolution's last width - 1 inputs after each slot's first n records, [L, B, width - 1, C], oldest first."""
        spec, ring = self._checks.convolution(), self.buffers.conv
        assert ring is not None
        self._checks.slots("slots", slots, settled=True)
        self._checks.n(slots, n)
        at = slots.long().clamp(min=0)
        end = self.cursors.start[at] + (self.cursors.count[at] if n is None else n)
        rows = (end[:, None] + torch.arange(1 - spec.width, 0, device=self.device)) % self.layout.R
        return ring[:, at[:, None], 0, rows]

    def load(self, slots: Tensor, states: Tensor, conv: Tensor | None = None, keys: Tensor | None = None) -> None:
        """After prefill: the slots start anew from these states, with empty rings.

        Args:
            slots: [B]; negative rows are skipped.
            states: [L, B, H, V, K]; fp32, bf16 or fp16, contiguous in [V, K].
            conv: [L, B, width - 1, C] last inputs of the convolution, oldest first; required with a layout that has one.
            keys: [B] int64, the requests' own numbers; None leaves the slots' keys.
        """
        self._checks.keys(keys, self._checks.slots("slots", slots, settled=True, distinct=True))
        self._checks.loaded(self.layers, slots, states, conv)
        self._restart(slots, keys)  # before the load, whose rounding may be keyed
        self._load(0, slots, states, conv)

    def load_layer(self, layer: int, slots: Tensor, states: Tensor, conv: Tensor | None = None) -> None:
        """One layer's part of ``load``, for a prefill that hands over layer by layer; cursors stay.

        The slots' rings must be empty: nothing decoded yet, or folded since. With ``conv``, cursors must also be as
        ``reset`` leaves them. A step may be pending already, if this layer is still to run.

        Args:
            slots, states [B, H, V, K], conv [B, width - 1, C]: as in ``load``.
        """
        self._checks.layer(layer)
        self._checks.slots("slots", slots, settled=layer in self._ran, distinct=True)
        if self.debug:
            self._checks.debug_empty(slots, conv is not None)
        states, conv = states[None], None if conv is None else conv[None]
        self._checks.loaded(1, slots, states, conv)
        self._load(layer, slots, states, conv)

    def _load(self, first: int, slots: Tensor, states: Tensor, conv: Tensor | None) -> None:
        """Checkpoints, read copies and convolution windows of the layers from `first` on."""
        key = self.cursors.key
        if torch.compiler.is_compiling():
            torch.ops.replayssm.load(states, *self.buffers[: len(STORED)], key, slots, first, self._spec, self.backend)
        else:
            ops.load(states, self.buffers, key, slots, first, self.layout, self.backend)
        if conv is not None and self.buffers.conv is not None:
            back, R = conv.shape[2], self.layout.R
            for i, ring in enumerate(self.buffers.conv[first : first + states.shape[0]]):
                ops.eager.scatter(ring[:, 0, R - back :], slots, conv[i])

    def reset(self, slots: Tensor, keys: Tensor | None = None) -> None:
        """The slots start anew from zero states and, where the layout has one, an empty convolution window."""
        self._checks.keys(keys, self._checks.slots("slots", slots, settled=True, distinct=True))
        for buffer in (*self.buffers[: len(STORED)], self.buffers.conv):
            if buffer is not None:
                for one in buffer:
                    ops.eager.scatter(one, slots, one.new_zeros(()).expand(slots.shape[0], *one.shape[1:]))
        self._restart(slots, keys)

    def adopt(self, slots: Tensor, keys: Tensor | None = None) -> None:
        """The slots start anew, with empty rings, from the checkpoints they hold: the engine that owns those has written them.

        A layout with a read copy or a convolution window needs ``load`` or, after this, ``load_layer``.
        """
        self._checks.keys(keys, self._checks.slots("slots", slots, settled=True, distinct=True))
        self._restart(slots, keys)

    def copy(self, src: Tensor, dst: Tensor, checkpoint: bool = True) -> None:
        """Slot dst[i] becomes everything slot src[i] is: checkpoint, ring, convolution window, cursors, key.

        All sources are read before any destination is written, so permutations are fine; a destination named twice is not.
        Pairs with a negative side are skipped. Without ``checkpoint``, all but that: the engine that owns it has moved it.
        """
        B = self._checks.slots("src", src, settled=True)
        if self._checks.slots("dst", dst, settled=True, distinct=True) != B:
            raise ValueError(f"dst: expected {B} slots as in src, got {dst.shape[0]}")
        to = torch.where(src >= 0, dst, -1)
        owned = {} if checkpoint else dict.fromkeys(STORED[: len(Stored._fields)])
        transfer.copy(src, to, self.buffers._replace(**owned), self.cursors)  # type: ignore[arg-type]  # None: stays
        self._settle(to)

    def move(self, src: Tensor, dst: Tensor, checkpoint: bool = True) -> None:
        """``copy``, then ``release`` of the sources that are no destination as well."""
        self.copy(src, dst, checkpoint)
        gone = (src >= 0) & (dst >= 0) & ~torch.isin(src, dst)
        self.release(torch.where(gone, src, -1))

    def release(self, slots: Tensor) -> None:
        """The slots' requests are gone, also in the midst of a step, whose commit then passes them by.

        Rings are empty after it; checkpoints stay until ``load``, ``reset``, ``copy`` or ``import_`` gives the slot to a
        request, which must come after the last layer of a step that was planned with the slot. A slot may be named twice.
        """
        self._checks.slots("slots", slots)
        self._restart(slots, None)

    def export(self, slots: Tensor) -> Export:
        """Everything the slots are and nothing of their former requests, copied to the host; waits for the device."""
        self._checks.slots("slots", slots, settled=True)
        return transfer.export(slots, self.buffers, self.cursors, self.layout)

    def import_(self, slots: Tensor, exported: Export) -> None:
        """The slots become what ``export`` read, in this state or another of as many layers.

        Its layout may differ as far as ``Export.to`` goes. Negative slots skip their request.
        """
        self._checks.slots("slots", slots, settled=True, distinct=True)
        transfer.import_(slots, exported, self.buffers, self.cursors, self.layout)
        self._settle(slots)

    def _restart(self, slots: Tensor, keys: Tensor | None) -> None:
        for one in (self.cursors.start, self.cursors.count, self.cursors.flushes):
            ops.eager.scatter(one, slots, one.new_zeros(slots.shape[0]))
        self._settle(slots)
        if keys is not None:
            ops.eager.scatter(self.cursors.key, slots, keys)

    def _settle(self, slots: Tensor) -> None:
        """Nothing pending. Tickets go on: a late commit for the slot's former request must find another one."""
        pending = self.cursors.pending[slots.long().clamp(min=0)]
        ops.eager.scatter(self.cursors.pending, slots, pending + pending % 2)
