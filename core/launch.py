"""Launch records: block sizes, warps, pipeline stages and splits per operation and layer, with the device they were measured on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .layout import Layout


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched.

    Attributes:
        BLOCK_V, BLOCK_K: the state tile a program holds at once; divisors of V and K.
        warps, stages: Triton's num_warps and software pipeline depth.
        SPLIT: programs that share one head's V.
    """

    BLOCK_V: int
    BLOCK_K: int
    warps: int = 1
    stages: int = 3
    SPLIT: int = 1


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides n, at most `most`."""
    return min(n & -n, most)


@lru_cache(maxsize=1024)
def decode(layout: Layout, B: int) -> Launch:
    """The launch of a decode step of B rows."""
    return Launch(_divisor(layout.V, 16 if layout.recurrence.delta else 8), _divisor(layout.K, 64))


@lru_cache(maxsize=1024)
def materialize(layout: Layout) -> Launch:
    """The launch of fold, materialize and load: a tile of rows of V, all of K."""
    return Launch(_divisor(layout.V, 16), layout.K)
