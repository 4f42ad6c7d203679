"""Step by step: what a decode step costs while requests that were admitted together walk through their windows."""

from __future__ import annotations

import torch

from replayssm import Layout

from .contest import Ours
from .decode import layers
from .work import MODELS, Work


def steps(name: str, B: int, W: int, cycles: int = 3) -> dict:
    """Microseconds per layer of every step, from the admission of B requests on one step: one graph of a step, replayed."""
    of: Layout = MODELS[name].layout(W=W)
    work = Work(of, layers(MODELS[name], of, B), B, staggered=False)
    ours, slots = Ours(work), work.slots[0]

    def step() -> None:
        ours.begin(0, 0)
        for layer in range(work.layers):
            ours.step(layer, 0, layer, 0)
        ours.end(0, 0)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ours.state.reset(slots)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(cycles * W + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    us = [1e3 * begin.elapsed_time(end) / work.layers for begin, end in zip(marks, marks[1:], strict=False)]
    # The first step waits for the reset; a whole cycle from the second window on is what repeats.
    cycle = us[W : 2 * W]
    return {
        "layer": name,
        "batch": B,
        "W": W,
        "us": us,
        "slowest_over_mean": max(cycle) * len(cycle) / sum(cycle),
        "flushes": int(ours.state.cursors.flushes.sum()),
        "steps": len(us),
        "layers": work.layers,
    }
