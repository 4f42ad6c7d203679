"""Launch records: block sizes, warps, stages and splits per operation and layer, with the device they were measured on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .layout import Layout


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched.

    Attributes:
        BLOCK_V, BLOCK_K: the state tile a program holds at once; BLOCK_K is the chunk of K.
        warps, stages: Triton's num_warps and software pipeline depth.
        SPLIT: programs that share one head's V.
    """

    BLOCK_V: int
    BLOCK_K: int
    warps: int = 1
    stages: int = 3
    SPLIT: int = 1


def dot_precision() -> str:
    """How fp32 products reach fp32's accuracy: three tf32 products on NVIDIA's tensor cores, plain fp32 on AMD."""
    return "ieee" if torch.version.hip else "tf32x3"


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides n, at most `most`."""
    return min(n & -n, most)


def _chunk(layout: Layout) -> int:
    """The chunk of K where sums over K reach the state: the same for every number format, packed ones included, whose bits else
    would depend on it."""
    return _divisor(layout.K // 2 if layout.K % 32 == 0 else layout.K, 64)


@lru_cache(maxsize=1024)
def decode(layout: Layout, B: int) -> Launch:
    """The launch of a decode step of B rows.

    Measured on one H200 at batch 256 (bench/results/h200/decode.json); other devices and batches follow the rule unmeasured.
    Tried there and not faster: tiles of 32 rows with two warps; a flush shared by 4 or 8 programs; folding 2, 4 or 8 tokens
    at once; chunks of 32 for the delta rule.
    """
    if layout.recurrence.delta:
        return Launch(_divisor(layout.V, 16), _chunk(layout))
    return Launch(_divisor(layout.V, 8), _divisor(layout.K // layout.packed, 128))


@lru_cache(maxsize=1024)
def materialize(layout: Layout) -> Launch:
    """The launch of fold, materialize and load."""
    return Launch(_divisor(layout.V, 16), _chunk(layout))


@lru_cache(maxsize=1024)
def verify(layout: Layout, B: int) -> Launch:
    """The launch of a step of more than one token per row; not measured yet."""
    return Launch(_divisor(layout.V, 16), _chunk(layout), warps=4)
