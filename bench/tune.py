"""Launches of decode and verify steps chosen by measurement, for a GPU or a layer that the rules were not measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date

import torch
import triton
from torch import Tensor

from replayssm import Layout, launch
from replayssm.models import Model
from replayssm.records import Launch, Record, sizes

from .check import ROWS, bound
from .contest import Ours, error, timed
from .decode import layers
from .work import Work, cold_groups

LAYERS = 4  # what a launch is worth does not depend on how many share a plan
GAIN = 0.02  # of the rule's time, which another launch must save to be recorded


class Trial(Ours):
    """Our steps by one candidate."""

    name = "replayssm, a candidate"

    def step(self, layer: int, g: int, e: int, i: int) -> Tensor:
        with launch.trial(operation(self.work.T), self.candidate):
            return super().step(layer, g, e, i)


def operation(T: int) -> str:
    """The operation of a step of T tokens a request."""
    return "decode" if T == 1 else "verify"


def settings(layout: Layout, at: Launch, T: int) -> Iterator[tuple[Launch, ...]]:
    """Launches that differ from one in one setting, setting by setting.

    Chunks of K stay: with the delta rule their order of summing is the same in every kernel.
    """

    def powers(most: int, least: int = 1) -> list[int]:
        return [1 << n for n in range(9) if least <= 1 << n <= most]

    def tiled(BLOCK_V: int) -> Launch:
        tiles = layout.V // BLOCK_V
        return replace(at, BLOCK_V=BLOCK_V, SPLIT=min(at.SPLIT, tiles & -tiles))

    tiles = layout.V // at.BLOCK_V
    # A matrix product, which verification has, is of 16 rows at least.
    yield tuple(tiled(size) for size in powers(64, 8 if T == 1 else 16) if layout.V % size == 0)
    yield tuple(replace(at, SPLIT=split) for split in powers(tiles & -tiles))
    yield tuple(replace(at, warps=warps) for warps in powers(4))
    yield tuple(replace(at, stages=stages) for stages in (1, 2, 3, 4))


def search(time: Callable[[Launch], float], layout: Layout, start: Launch, T: int) -> dict[Launch, float]:
    """Every launch tried and its time, the start first: the best of one setting is where the next one is varied."""
    tried = {start: time(start)}
    best = start
    for i in range(len(list(settings(layout, best, T)))):
        for one in list(settings(layout, best, T))[i]:
            if one not in tried:
                tried[one] = time(one)
        best = min(tried, key=tried.__getitem__)
    return tried


def microseconds(model: Model, layout: Layout, B: int, T: int, replays: int = 5) -> Callable[[Launch], float]:
    """The clock: a candidate's microseconds of a layer's step, infinite where it does not compile or computes otherwise."""
    n = min(LAYERS, layers(model, layout, B))

    def time(one: Launch) -> float:
        try:
            work = Work(layout, n, B, T, groups=cold_groups(layout, n, B), steps=layout.W)
            return timed(Trial, work, replays, one)[0]
        except (RuntimeError, triton.TritonError):  # too many registers, too much shared memory, a pass that fails
            return float("inf")
        finally:
            torch.cuda.empty_cache()

    return time


def tune(
    model: Model, layout: Layout, batches: Sequence[int], T: int, device: str, clock: Callable = microseconds
) -> Iterator[tuple[Record, dict[Launch, float]]]:
    """Per batch the record of the fastest launch whose outputs are right, or of the rule's, and every launch tried."""
    op = operation(T)
    rule, most = {"decode": launch.decode_rule, "verify": launch.verify_rule}[op], bound(layout, T)
    about = f"{date.today().isoformat()}, Triton {triton.__version__}, {T} tokens, window {layout.W}"
    for B in batches:
        start = rule(layout, B)
        tried = search(clock(model, layout, B, T), layout, start, T)
        if tried[start] == float("inf"):
            raise RuntimeError(f"{op} of {sizes(layout)}, {B} requests: the rule's own launch does not run, {start}")
        worth = [one for one in sorted(tried, key=tried.__getitem__) if tried[one] <= (1 - GAIN) * tried[start]]
        best = next((one for one in worth if error(Trial, layout, T, B=ROWS, candidate=one) < most), start)
        yield Record(device, op, sizes(layout), B, best, tried[best], tried[start], about), tried
