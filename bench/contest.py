"""Contestants, ours and the peers': how one is driven over a Work's steps, checked against the oracle, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from replayssm import Layout, ReplayState, reference
from replayssm.cursor import committed, flush_rule
from replayssm.layout import STORED

from .timing import graph_us
from .work import Work


class Absent(Exception):
    """This contestant cannot run here; the message says why."""


class Contestant:
    """One way to decode a Work's tokens. It owns its state and prepares its inputs, before any clock runs.

    Attributes:
        name: how results call it; "replay" or "checkpointing" in it marks one that does not write the state every step.
        candidates: launch settings to choose from by measurement; None is the contestant's own choice.
    """

    name: str
    candidates: tuple = (None,)

    def __init__(self, work: Work, candidate=None) -> None:
        self.work, self.candidate = work, candidate

    def begin(self, i: int, g: int) -> None:
        """What precedes the layers of step i for the requests of group g."""

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        """Outputs [B T, H, V] of one layer for token set e; valid until the next call."""
        raise NotImplementedError

    def end(self, i: int, g: int) -> None:
        """What follows the layers."""

    def settle(self, i: int, g: int) -> None:
        """What other code than these kernels does to keep the accepted tokens; done in checks, not charged in timings."""

    def held(self, steps: int) -> tuple[Tensor, Tensor | int]:
        """After that many steps: the first layer's states [groups B, H, V, K], and how many kept tokens of each they lack."""
        return self.state[0], 0  # type: ignore[attr-defined]  # peers keep [layers, groups B, H, V, K] under this name

    @classmethod
    def states(cls, T: int) -> int:
        """States that it holds of each request and layer when T tokens are verified."""
        return 1


class Ours(Contestant):
    """This project's step, its plan and its commit.

    Attributes:
        backend: as ReplayState takes it.
    """

    name = "replayssm"
    backend: str | None = None

    def __init__(self, work: Work, candidate=None) -> None:
        super().__init__(work, candidate)
        layout, A = work.layout, work.w["A"]
        derived = layout.recurrence.decay == "derived"
        stacked = A.expand(work.layers, -1).contiguous() if derived and A is not None else None
        self.state = ReplayState(layout, work.layers, work.slots.numel(), work.device, self.backend, A=stacked)
        self.w = work.w | {"A": None if derived else A}
        for layer in range(work.layers):
            self.state.load_layer(layer, work.slots.flatten(), work.states_of(layer))
        self.state.cursors.flushes.fill_(1)  # whole windows: the work says where in theirs requests are
        if work.staggered:
            self._stagger()
        self.x = [work.entry(e) for e in range(work.entries)]
        self.out = torch.empty(work.B * work.T, layout.H, layout.V, dtype=layout.act, device=work.device)

    def _stagger(self) -> None:
        """Requests at every phase of their window, over finite ring contents."""
        for name, x in self.state.buffers._asdict().items():
            if x is not None and name not in STORED:
                x.normal_()
                if name in ("g", "gsum"):
                    x.abs_().neg_()
        self.state.cursors.count.copy_(self.work.phases.flatten() % self.work.layout.W + 1)

    def begin(self, i: int, g: int) -> None:
        self.plan = self.state.plan(self.work.slots[g], self.work.T)

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        return self.state.step(layer, self.plan, **self.x[e], **self.w, out=self.out)

    def end(self, i: int, g: int) -> None:
        self.state.commit(self.plan, None if self.work.T == 1 else self.work.accepted[i, g])


class Plain(Ours):
    """The same without kernels, in vectorised torch: what a number format alone makes of the outputs."""

    name = "replayssm, torch"
    backend = "torch"


class Unflushed(Ours):
    """Steps of which none flushes, at every other phase of the window: each is dropped, so that the next one finds the same."""

    name = "replayssm, no flush"

    def _stagger(self) -> None:
        super()._stagger()
        self.state.cursors.count.sub_(1)
        self.none = torch.zeros(self.work.B, dtype=torch.int32, device=self.work.device)

    def end(self, i: int, g: int) -> None:
        self.state.commit(self.plan, self.none)


def schedule(work: Work, window: int, R: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(start, count, flush) of every slot before each of the work's steps, for peers whose host keeps ring cursors."""
    accepted = work.accepted.flatten(1).long()
    count = work.phases.flatten() % window + 1 if work.staggered else work.phases.flatten()
    start = torch.zeros_like(count)
    rounds = 4 if work.staggered and work.T > 1 else 1  # all but the last let the phases settle
    for i in range(rounds * work.steps):
        flush = flush_rule(0 * count, count, work.T, window, 0).long()
        if i >= (rounds - 1) * work.steps:
            yield start.int(), count.int(), flush.int()
        start, count = committed(start, count, flush, accepted[i % work.steps], R)


def drive(contestant: Contestant, entry: Callable[[int, int], int], settle: bool) -> Iterator[Tensor]:
    """Run the work's steps; yields each layer's outputs. ``entry(i, layer)`` is the token set that step i feeds a layer."""
    work = contestant.work
    for i in range(work.steps):
        for g in range(work.groups):
            contestant.begin(i, g)
            for layer in range(work.layers):
                yield contestant.step(layer, g, entry(i, layer), i)
            contestant.end(i, g)
            if settle:
                contestant.settle(i, g)


def error(kind: type[Contestant], layout: Layout, T: int = 1, B: int = 3, device: str = "cuda", candidate=None) -> float:
    """Relative error of a contestant's outputs against the fp64 oracle, from fresh states over more than one window."""
    work = Work(layout, 1, B, T, steps=layout.W + 3 if T == 1 else layout.W // 2 + 3,
                entries=layout.W + 3, staggered=False, device=device)  # fmt: skip
    outputs = [o.clone() for o in drive(kind(work, candidate), lambda i, layer: i, settle=True)]
    truth, _ = oracle(work)
    return float((torch.stack(outputs).double() - truth).norm() / truth.norm())


def oracle(work: Work) -> tuple[Tensor, Tensor]:
    """fp64 outputs [steps, B T, H, V] and final states [B, H, V, K] of a one-layer work that starts from fresh states.

    Rejected tokens leave no trace.
    """
    states, w = work.states_of(0).double(), {name: x if x is None else x.double() for name, x in work.w.items()}
    o = torch.empty(work.steps, work.B, work.T, work.layout.H, work.layout.V, dtype=torch.float64, device=work.device)
    for b in range(work.B):
        for i in range(work.steps):
            x = {name: one.unflatten(0, (work.B, work.T))[b] for name, one in work.entry(i).items()}
            o[i, b], _ = reference.decode(work.layout.recurrence, states[b], **x, **w)
            kept = {name: one[: work.accepted[i, 0, b]] for name, one in x.items()}
            _, states[b] = reference.decode(work.layout.recurrence, states[b], **kept, **w)
    return o.flatten(1, 2), states


def timed(kind: type[Contestant], work: Work, replays: int = 10, candidate=None) -> tuple[float, float]:
    """(median, spread) microseconds per layer and step: the work's steps with begin and end in one CUDA graph, replayed."""
    contestant = kind(work, candidate)

    def run() -> None:
        for _ in drive(contestant, lambda i, layer: layer, settle=False):
            pass

    us, spread = graph_us(run, replays)
    n = work.steps * work.groups * work.layers
    return us / n, spread / n


def best_candidate(kind: type[Contestant], work: Work):
    """The fastest of the contestant's launch settings for this work."""
    times = {}
    for candidate in kind.candidates:
        try:
            times[candidate] = timed(kind, work, 5, candidate)[0]
        except Exception as failed:  # a setting that does not compile for these sizes is none
            times[candidate] = float("inf")
            reason = failed
    if min(times.values()) == float("inf"):
        raise reason
    return min(times, key=lambda candidate: times[candidate])
