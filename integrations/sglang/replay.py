"""One pool's ReplayState behind SGLang's calls: its slots, its layers, its steps and its snapshots in the core's words."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from ... import Buffers, Layout, Plan, ReplayState
from ...metrics import Counted, Meter
from .layers import Layers

# Rows of a step, padding included, may be more than slots: batches are padded to captured sizes.
MOST_ROWS = 4096


def live(slots: Tensor) -> Tensor:
    """SGLang pads a batch with slot 0 or -1; the core with negative slots."""
    return torch.where(slots > 0, slots, -1)


class Replay:
    """The state of all recurrent layers of a model, and the step under way.

    A step begins when its first layer runs: eagerly or in a CUDA graph, the plan is launched there and reads the slots that
    SGLang's metadata holds. A decode step ends with its last layer, a verify step when SGLang knows what was accepted.

    Args:
        layout: of every layer.
        buffers: SGLang's states and our rings.
        layers: of the model.
        counted: whether what the state does is counted.

    Attributes:
        state: the ReplayState.
        meter: its counts, or None.
        layer: the layer that runs, counted in the pool's order; SGLang's kernels are not told.
        assigned: slots that SGLang gave to requests or to its prefix cache since the last batch began. Whatever fills them, a
            prefill, a copy, a transfer from another server or from the host, finds or leaves no record in their rings.
        received: slots whose states came from another server since the last batch began, and have no read copy yet.
        accepted: how many drafts of the step being committed stay, and their numbers, where SGLang's commit is told more than
            the last one's number.
    """

    def __init__(self, layout: Layout, buffers: Buffers, layers: Layers, counted: bool = False) -> None:
        count, slots = buffers.state.shape[:2]
        self.layout, self.layers, self.last = layout, layers, count - 1
        self._A = torch.empty(count, layout.H, dtype=torch.float32, device=buffers.state.device)
        derived = layout.recurrence.decay == "derived"
        kind = Counted if counted else ReplayState
        self.state = kind(layout, count, slots, buffers=buffers, A=self._A if derived else None, max_rows=max(slots, MOST_ROWS))
        self.meter: Meter | None = self.state.meter if isinstance(self.state, Counted) else None
        self._A_of = [None if derived else one for one in self._A.unbind()]
        self._verified: dict[int, Plan] = {}
        self._parts: dict[tuple[Plan, int], Plan] = {}
        self.layer = 0
        self.assigned: list[Tensor] = []
        self.received: list[Tensor] = []
        self.accepted: tuple[Tensor, Tensor] | None = None
        self.weights_changed()
        if layout.format.stochastic:  # what a slot draws shall not be what its neighbour draws
            every = torch.arange(slots, device=self.state.device)
            self.state.reset(every, keys=every)

    def weights_changed(self) -> None:
        """Read the model's A again; called with every prefill, the first thing that follows an update of weights."""
        self.layers.A(self._A)

    def begin(self) -> None:
        """A batch begins. Only here, on the stream that steps run on, are slots taken from their former requests: a step that
        was launched before may still hold them when SGLang assigns them anew."""
        for one in (*self.assigned, *self.received):
            if one.is_cuda:
                one.record_stream(torch.cuda.current_stream(one.device))
        if self.assigned:
            self.state.release(live(torch.cat([one.reshape(-1) for one in self.assigned])))
        for one in self.received:
            self.loaded(one)
        self.assigned.clear()
        self.received.clear()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def decode(self, slots: Tensor, **inputs: Tensor | None) -> Tensor:
        """This layer's outputs [B, H, V] for one token of each slot."""
        if self.layer == 0:
            self._plan = self.state.plan(live(slots))
        o = self._step(inputs)
        if self.layer == self.last:
            self.state.commit(self._plan)
        return o

    def verify(self, slots: Tensor, t: int, parents: Tensor | None, **inputs: Tensor | None) -> Tensor:
        """This layer's outputs [B t, H, V] for t draft tokens of each slot, which stay uncommitted.

        Args:
            parents: [B, t] the draft that each draft of a tree follows; the first one's entry means nothing. None: a chain.
        """
        if self.layer == 0:
            if parents is not None:
                parents = functional.pad(parents, (0, self.layout.T_max - t), value=-1)
                parents[:, 0] = -1
            self._plan = self.state.plan(live(slots), t, parents=parents)
            self._verified[slots.shape[0]] = self._plan
        return self._step(inputs)

    def _step(self, inputs: dict[str, Tensor | None]) -> Tensor:
        return self.state.step(self.layer, self._plan, A=self._A_of[self.layer], **inputs)

    def commit(self, rows: int, accepted: Tensor, path: Tensor | None) -> None:
        """Keep what SGLang accepted of the newest verify step of that many rows, padding included.

        Args:
            accepted: [B] drafts that stay in each of the first B rows, the first one included.
            path: [B, T] their numbers, for a tree.
        """
        plan = self._verified[rows]
        B = accepted.shape[0]
        if plan.tree is None:
            path = None
        elif path is not None:
            path = functional.pad(path, (0, self.layout.T_max - path.shape[1])).contiguous()
        self.state.commit(self._first(plan, B), accepted, path)

    def _first(self, plan: Plan, B: int) -> Plan:
        """The plan of its first B rows, one object each, by which the state finds what it keeps ready."""
        if B == plan.rows.shape[0]:
            return plan
        if (plan, B) not in self._parts:
            tree = None if plan.tree is None else plan.tree[:B]
            self._parts[plan, B] = dataclasses.replace(plan, rows=plan.rows[:B], tree=tree)
        return self._parts[plan, B]

    # ---- between steps ---------------------------------------------------------------------------------------------

    def settle(self, slots: Tensor) -> None:
        """Whatever reads SGLang's states of these slots next finds them exact."""
        slots = live(slots)
        held = self.state.cursors.count[slots.long().clamp(min=0)] > 0
        self.state.fold(torch.where(held, slots, -1))

    def prefilled(self, slots: Tensor) -> None:
        """SGLang's prefill wrote this layer's states of these slots: where there is a read copy, it follows."""
        if self.layout.read is not None:
            states = self.state.buffers.state[self.layer, slots.long()]
            self.state.load_layer(self.layer, live(slots), states)

    def loaded(self, slots: Tensor) -> None:
        """States of all layers were put into these slots from elsewhere."""
        self.state.load(live(slots), self.state.buffers.state[:, slots.long()])

    def snapshot(self, slots: Tensor, where: Tensor, to: Tensor, dropped: Tensor | None = None) -> None:
        """Write the exact states of slots[i], where where[i], into SGLang's states of slots to[i].

        Args:
            dropped: [B] how many of the newest records the snapshot leaves out.
        """
        slots = torch.where(where, live(slots), -1)
        n = None
        if dropped is not None:
            n = (self.state.cursors.count[slots.long().clamp(min=0)] - dropped).to(torch.int32)
        self.state.materialize(slots, n, target=self.state.buffers.state, to_slots=to)
