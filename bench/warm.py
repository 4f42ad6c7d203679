"""Our kernels compiled ahead of a measurement, in several processes: what is measured then finds them in Triton's cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
import triton
from triton.backends.compiler import GPUTarget

from replayssm import Layout, ahead, cursor, ops

from .work import Work


def launches(layout: Layout, B: int) -> list[ahead.Launch]:
    """Every launch of a load and of a decode step of B rows."""
    work = Work(layout, 1, B, device="cpu")
    buffers, cursors = layout.allocate(2, B, "meta"), cursor.allocate(B, "meta")
    slots, rows = work.slots[0], torch.zeros(B, cursor.PLAN_WIDTH, dtype=torch.int32)
    out = torch.empty(B, layout.H, layout.V, dtype=layout.act)
    states = torch.empty(B, layout.H, layout.V, layout.K, device="meta")
    derived = layout.recurrence.decay == "derived"
    A = torch.zeros(2, layout.H) if derived else None
    x = dict.fromkeys("qkvbaz") | work.entry(0)
    w = work.w | ({"A": A[0]} if A is not None else {})

    def every() -> None:
        ops.load(states[None], buffers, cursors.key, slots, 0, layout, "triton")
        ops.plan(slots, None, None, None, cursors, rows, 1, layout, "triton")
        ops.flush(rows, buffers, A, layout, "triton")
        ops.step(rows, 1, x, w, buffers, out, 1, layout, "triton")
        ops.commit(rows, None, cursors, "triton")
        ops.commit(rows, slots, cursors, "triton")

    return ahead.launches(every)


def compiled(layouts: Sequence[Layout], batches: Sequence[int], workers: int) -> Iterator[int]:
    """Compile every layout's launches for this machine's GPU; yields as each is done. Without workers, nothing is.

    Args:
        batches: rows of a step.
        workers: processes.
    """
    if not workers:
        return
    target = triton.runtime.driver.active.get_current_target()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, layout.spec, batches, target) for layout in layouts]):
            yield done.result()


def _compile(spec: str, batches: Sequence[int], target: GPUTarget) -> int:
    """How many kernels a layout took; those that several batches share are found in the cache the second time."""
    torch.set_num_threads(1)
    layout = Layout.parse(spec)
    return len([ahead.compiled(launch, target) for B in batches for launch in launches(layout, B)])
