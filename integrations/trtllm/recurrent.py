"""The recurrent state behind one cache manager: core's ReplayState over the manager's own pool, and the life of its slots."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import Buffers, Layout, Plan, ReplayState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """One step as the engine sees it.

    Attributes:
        slots: [requests] int32, prompts first.
        contexts: how many prompts.
        tokens: of each request after them; 0 where there is none.
    """

    slots: Tensor
    contexts: int
    tokens: int

    @staticmethod
    def of(attn_metadata, mamba_metadata) -> Batch:
        """From TensorRT-LLM's metadata of a forward."""
        requests, contexts = attn_metadata.seq_lens.shape[0], attn_metadata.num_contexts
        rows, tokens = requests - contexts, attn_metadata.num_tokens - attn_metadata.num_ctx_tokens
        if rows and tokens % rows:
            raise NotImplementedError(
                f"generation batch: expected as many tokens in every request, got {tokens} tokens of {rows} requests"
            )
        return Batch(mamba_metadata.state_indices[:requests], contexts, tokens // rows if rows else 0)


class Recurrent:
    """State, steps and slots of the local recurrent layers of one manager.

    The checkpoints are the engine's pool itself: its prefill writes them, ours only folds into them. Rings, cursors and read
    copy are ours. A step is ``begin`` once, ``step`` per layer, ``finish`` once; steps of several tokens wait for ``accept``.

    Args:
        layout: of one layer; its state is the pool's dtype.
        pool: [L, S, H, V, K], the engine's, read and written.
        conv_pool: L tensors [S, C, width - 1], the engine's, where the layout keeps the convolution; else None.
        rows: most requests of a batch, padding included.
        history: tensors [L, S, ...] of the engine that rings shall live in, by the names of Buffers.
        backend, debug: as ReplayState takes them.
    """

    def __init__(
        self,
        layout: Layout,
        pool: Tensor,
        conv_pool: list[Tensor] | None,
        rows: int,
        history: dict[str, Tensor] | None = None,
        backend: str | None = None,
        debug: bool = False,
    ) -> None:
        L, S = pool.shape[:2]
        derived = layout.recurrence.decay == "derived"
        self.A = torch.zeros(L, layout.H, device=pool.device) if derived else None
        self.state = ReplayState(
            layout,
            L,
            S,
            backend=backend,
            A=self.A,
            buffers=_buffers(layout, pool, history or {}),
            max_rows=rows,
            debug=debug,
        )
        self.layout, self.pool, self.conv_pool = layout, pool, conv_pool
        self.dummy = torch.zeros(rows, dtype=torch.bool, device=pool.device)
        self.plan: Plan | None = None
        self._plans: dict[int, Plan] = {}  # views of the state's fixed plan rows, by their number
        self._written = self.dummy.new_empty(0, dtype=torch.int32)  # slots whose pool rows the engine writes in this forward
        self._requests = 0  # seen so far: a request's key for stochastic rounding

    # ---- a step --------------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, engine_decodes: bool = False) -> None:
        """Plan the step of the batch's rows after its prompts, or hand their exact states to the engine that decodes them."""
        slots = batch.slots.masked_fill(self.dummy[: batch.slots.shape[0]], -1)
        rows = slots[batch.contexts :]
        self.plan = None
        self._written = slots if engine_decodes else slots[: batch.contexts]
        if not rows.shape[0]:
            return
        if engine_decodes:
            self.state.fold(rows)
            return
        if batch.tokens > self.layout.T_max:
            raise ValueError(f"draft length: expected at most {self.layout.T_max - 1} drafts a row, got {batch.tokens - 1}")
        self.plan = self._plans[rows.shape[0]] = self.state.plan(rows, batch.tokens)

    def step(self, layer: int, **inputs: Tensor | None) -> Tensor:
        """One layer's outputs for the planned tokens: see ``ReplayState.step``."""
        assert self.plan is not None
        return self.state.step(layer, self.plan, **inputs)

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """One layer's convolution of the planned tokens, x [N, C]."""
        assert self.plan is not None
        return self.state.conv(layer, self.plan, x, weight)

    def finish(self, layer: int) -> None:
        """A layer's forward is over: take in what the engine wrote; after the last, keep steps of a single token."""
        if self._loads and self._written.shape[0]:
            self._load(layer, self._written)
        if layer == self.state.layers - 1 and self.plan is not None and self.plan.T == 1:
            self.state.commit(self.plan)

    def accept(self, accepted: Tensor) -> None:
        """Keep ``accepted`` [rows] tokens of each row of the step just run, the first included. Again changes nothing.

        The engine may have replayed a CUDA graph: the plan is the one of that many rows, whichever was planned last here.
        """
        plan = self._plans.get(accepted.shape[0])
        if plan is not None:
            self.state.commit(plan, accepted.to(torch.int32))

    # ---- slots ---------------------------------------------------------------------------------------------------------

    def dummies(self, is_dummy: list[bool]) -> None:
        """Rows of the coming batch that stand for no request: nothing of theirs is read or written."""
        if len(is_dummy) > self.dummy.shape[0]:
            raise ValueError(f"requests: expected at most {self.dummy.shape[0]}, got {len(is_dummy)}")
        mask = torch.zeros(self.dummy.shape[0], dtype=torch.bool, pin_memory=self.dummy.is_cuda)
        mask[: len(is_dummy)] = torch.tensor(is_dummy, dtype=torch.bool)
        self.dummy.copy_(mask, non_blocking=True)

    def restart(self, slots: list[int], brought: bool) -> None:
        """The slots begin anew: with a prompt about to be read, or with the state that the engine brought into the pool."""
        slots = list(dict.fromkeys(slots))  # requests that stand for none may share one
        if not slots:
            return
        keys = range(self._requests, self._requests + len(slots))
        self._requests += len(slots)
        at = self._ints(slots)
        self.state.adopt(at, torch.tensor(keys, device=at.device))
        if brought and self._loads:
            for layer in range(self.state.layers):
                self._load(layer, at)

    def relocate(self, old: list[int], new: list[int]) -> None:
        """The engine moved live requests' checkpoints to other slots; a slot below 0 was none."""
        moved = [(a, b) for a, b in zip(old, new, strict=True) if a >= 0 and a != b]
        if moved:
            self.state.move(*(self._ints(side) for side in zip(*moved, strict=True)), checkpoint=False)

    def settle(self, slots: list[int]) -> None:
        """The engine is about to read the slots' states: make the pool hold them, after every kept token."""
        if not slots:
            return
        at = self._ints(slots)
        self.state.fold(at)
        if self.conv_pool is not None:
            for pool, window in zip(self.conv_pool, self.state.conv_window(at), strict=True):
                pool[at.long()] = window.transpose(1, 2).to(pool.dtype)

    @property
    def _loads(self) -> bool:
        """Whether a state that the engine wrote into the pool has more to it than the pool."""
        return self.layout.read is not None or self.layout.conv is not None

    def _load(self, layer: int, slots: Tensor) -> None:
        at = slots.long().clamp(min=0)
        conv = None if self.conv_pool is None else self.conv_pool[layer][at].transpose(1, 2)
        self.state.load_layer(layer, slots, self.pool[layer][at], conv)

    def _ints(self, values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.pool.device)


def _buffers(layout: Layout, pool: Tensor, history: dict[str, Tensor]) -> Buffers:
    """Checkpoints in the engine's pool, rings in its history where given, all else ours, token-major as the engine's are."""
    shapes = layout.allocate(pool.shape[0], pool.shape[1], "meta")
    given = {"state": pool} | history
    return Buffers(*(
        given[name] if name in given else one if one is None
        else torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=pool.device).zero_()
        for name, one in shapes._asdict().items()
    ))  # fmt: skip
