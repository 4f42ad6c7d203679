"""Our kernels compiled ahead of a measurement, in several processes: what is measured then finds them in Triton's cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
import triton
from triton.backends.compiler import GPUTarget

from replayssm import Layout, ahead, cursor, ops
from replayssm.layout import Inputs, Weights

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
    entry = work.entry(0)
    x, w = Inputs(*(entry.get(name) for name in Inputs._fields)), Weights(**work.w)  # type: ignore[arg-type]  # q, k, v always are
    if A is not None:
        w = w._replace(A=A[0])

    def every() -> None:
        ops.load(states[None], buffers, cursors.key, slots, 0, layout, "triton")
        ops.plan(B, 1, False, cursors, layout, "triton")(slots, None, None, None, None, rows, None)
        ops.flush(B, buffers, A, layout, "triton")(rows)
        ops.step(B, 1, x, out, buffers, layout, "triton")(rows, None, 0, x, w, out)
        for accepted in (None, slots):
            ops.commit(B, cursors, "triton")(rows, accepted)

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
