"""Host time of an eager step's calls, none of which waits: what a loop without CUDA graphs pays for each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from time import perf_counter_ns

import torch
from torch import Tensor

from .contest import Ours
from .work import MODELS, Work

BATCHES = (1, 64)
STEPS = 32  # launched before the device is waited for: fewer than its queue holds
KINDS = {"decode": 1, "verify": 4, "tree": 4}  # tokens of a request and step
CALLS = ("plan", "step", "commit")


class Timed(Ours):
    """A step of one layer, each call's nanoseconds noted."""

    def __init__(self, work: Work, tree: bool) -> None:
        super().__init__(work)
        shape = work.B, work.layout.T_max
        chain = torch.arange(work.layout.T_max, dtype=torch.int32, device=work.device)
        self.path = chain.expand(shape).contiguous() if tree else None
        self.parents: Tensor | None = None if self.path is None else self.path - 1
        self.slots, self.accepted = work.slots[0], None if work.T == 1 else work.accepted[0, 0]
        self.ns: dict[str, list[int]] = {call: [] for call in CALLS}

    def run(self) -> None:
        times = [perf_counter_ns()]
        plan = self.state.plan(self.slots, self.work.T, parents=self.parents)
        times.append(perf_counter_ns())
        self.state.step(0, plan, **self.x[0], **self.w, out=self.out)
        times.append(perf_counter_ns())
        self.state.commit(plan, self.accepted, self.path)
        times.append(perf_counter_ns())
        for call, (begin, end) in zip(CALLS, pairwise(times), strict=True):
            self.ns[call].append(end - begin)


def measure(name: str, B: int, kind: str, rounds: int, device: str = "cuda") -> Iterator[dict]:
    """Rows of a layer's calls: median and 90th percentile of their microseconds, and a step's allocations on the device."""
    T = KINDS[kind]
    layout = MODELS[name].layout(W=16, T_max=T)
    timed = Timed(Work(layout, 1, B, T, device=device), kind == "tree")
    for i in range(rounds + 1):
        if i == 1:  # compiled, and every form seen
            timed.ns = {call: [] for call in CALLS}
            before = _allocations(device)
        for _ in range(STEPS):
            timed.run()
        if device == "cuda":
            torch.cuda.synchronize()
    allocations = (_allocations(device) - before) / (rounds * STEPS)
    for call, ns in timed.ns.items():
        us = {"us": statistics.median(ns) / 1e3, "us_90": statistics.quantiles(ns, n=10)[-1] / 1e3}
        yield {"layer": name, "batch": B, "kind": kind, "T": T, "call": call, **us, "allocations": allocations}


def rows(names: Sequence[str], batches: Sequence[int], rounds: int, device: str = "cuda") -> Iterator[dict]:
    """Rows of every layer, batch, kind of step and call."""
    for name in names:
        for B in batches:
            for kind in KINDS:
                yield from measure(name, B, kind, rounds, device)


def _allocations(device: str) -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"] if device == "cuda" else 0
