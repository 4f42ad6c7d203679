"""What a decode step takes: by the clock, and how long of that the GPU was busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """The length covered by (start, length) intervals, which may overlap."""
    covered, end = 0, 0
    for start, length in sorted(intervals):
        covered += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return covered


class Meter:
    """Watches a scheduler's iterations while a full batch decodes: first by the clock, then under the profiler.

    Args:
        batch: requests that decode together; iterations with fewer do not count.
        settle: iterations left out at first.
        steps: iterations taken by the clock.
        profiled: iterations under the profiler: whole windows of whatever folds every so many steps.
        generated: how many tokens there are of all requests so far.
        device: whose work is waited for and profiled.

    Attributes:
        wall_ms, busy_ms: per step; busy_ms is None where there is no GPU.
        collectives_ms: of busy_ms, in operations with other GPUs, waiting for them included.
        tokens_per_s: by the clock.
    """

    def __init__(
        self, batch: int, settle: int, steps: int, profiled: int, generated: Callable[[], int], device: str = "cuda"
    ) -> None:
        self.batch, self.settle, self.steps, self.profiled = batch, settle, steps, profiled
        self._generated, self._cuda, self._full = generated, device == "cuda", -1
        self.wall_ms: float | None = None
        self.busy_ms: float | None = None
        self.collectives_ms: float | None = None
        self.tokens_per_s: float | None = None

    @property
    def iterations(self) -> int:
        """How many with a full batch it takes."""
        return self.settle + self.steps + self.profiled + 1

    def __call__(self, iteration: int, decoding: int) -> None:
        """Before each iteration of the scheduler."""
        if decoding < self.batch:
            return
        self._full += 1
        if self._full == self.settle:
            self._begin = self._now(), self._generated()
        elif self._full == self.settle + self.steps:
            seconds = self._now() - self._begin[0]
            self.wall_ms = seconds / self.steps * 1e3
            self.tokens_per_s = (self._generated() - self._begin[1]) / seconds
            if self._cuda:
                self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profile.start()
        elif self._full == self.settle + self.steps + self.profiled and self._cuda:
            self._now()
            self._profile.stop()
            self.busy_ms, self.collectives_ms = (
                union(_kernels(self._profile, name)) / self.profiled / 1e6 for name in ("", "nccl")
            )

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _kernels(profile: Any, name: str) -> Iterable[tuple[int, int]]:
    """(start, length) in nanoseconds of all that ran on the device and has this in its name."""
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and name in event.name():
            yield event.start_ns(), event.duration_ns()
