"""How kernels are launched: block sizes, warps, stages and splits per operation and layer.

By rules, with the device they were measured on; decode and verify by the user's own records first (``records``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from . import records
from .layout import Layout
from .records import Launch

MEASURED_ON = ("NVIDIA H200",)
_trial: dict[str, Launch] = {}


@contextmanager
def trial(op: str, launch: Launch) -> Iterator[None]:
    """Within, every launch of the operation is this one: how `replayssm tune` measures a candidate."""
    _trial[op] = launch
    try:
        yield
    finally:
        del _trial[op]


def decode(layout: Layout, B: int) -> Launch:
    """The launch of a decode step of B rows: the user's record, or the rule."""
    return _trial.get("decode") or _recorded("decode", layout, B) or decode_rule(layout, B)


def verify(layout: Layout, B: int) -> Launch:
    """The launch of a step of more than one token per row: the user's record, or the rule."""
    return _trial.get("verify") or _recorded("verify", layout, B) or verify_rule(layout, B)


def forget() -> None:
    """Records are read again when a launch is next asked for."""
    records.forget()
    _recorded.cache_clear()


@lru_cache(maxsize=1024)
def _recorded(op: str, layout: Layout, B: int) -> Launch | None:
    return records.find(op, layout, B)


def dot_precision() -> str:
    """How fp32 products reach fp32's accuracy: three tf32 products on NVIDIA's tensor cores, plain fp32 on AMD."""
    return "ieee" if torch.version.hip else "tf32x3"


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides n, at most `most`."""
    return min(n & -n, most)


def _chunk(layout: Layout, most: int) -> int:
    """The chunk of K where sums over K reach the state: the same for every number format, packed ones included, whose bits else
    would depend on it."""
    return _divisor(layout.K // 2 if layout.K % 32 == 0 else layout.K, most)


def _split(tiles: int, heads: int) -> int:
    """Programs that share a head so that a small batch has about 1,000 of them."""
    return _divisor(tiles, 1 << max(0, (1024 // max(heads, 1)).bit_length() - 1))


@lru_cache(maxsize=1024)
def decode_rule(layout: Layout, B: int) -> Launch:
    """A decode step of B rows.

    Measured on one H200 (bench/results/h200/decode.json); other devices and batches follow the rule unmeasured. Chunks of K
    of 32 leave a row's sums to 8 threads: a third of the shuffles of 128. Tried there and not faster at batch 256: tiles of
    32 rows with two warps; a whole head with 4 or 8 warps; stages of 1, 2 and 4; prefetching the head into the L2; a flush as
    a branch of this kernel, whose rows then are its tail (tried.json).
    """
    chunk = _chunk(layout, 32) if layout.recurrence.delta else _divisor(layout.K // layout.packed, 128)
    tile = _divisor(layout.V, 16 if layout.recurrence.delta and B * layout.H >= 256 else 8)
    return Launch(tile, chunk, SPLIT=_split(layout.V // tile, B * layout.H))


@lru_cache(maxsize=1024)
def materialize(layout: Layout) -> Launch:
    """The launch of flush, materialize and load: a head a program.

    Measured on one H200, 16 rows flushing, microseconds a layer (tried.json, GDN): tiles of 16 rows 26, split over 2
    programs 28, over 8 58; of 32 rows 38; tiles of 64 rows with 4 warps 47, a whole head with 8 warps 70, whose solve waits for
    barriers; 26 with stages of 2 or 3, 33 without.
    """
    return Launch(_divisor(layout.V, 16), _chunk(layout, 32 if layout.recurrence.delta else 64))


@lru_cache(maxsize=16)
def resident(device: torch.device) -> int:
    """Programs of one warp that a device runs at once, 16 on each of its processors; a few on a CPU."""
    return 16 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@lru_cache(maxsize=1024)
def conventional(layout: Layout) -> Launch:
    """The launch of the conventional step; unmeasured, it follows the decode step's."""
    return Launch(_divisor(layout.V, 8), _chunk(layout, 32))


@lru_cache(maxsize=1024)
def verify_rule(layout: Layout, B: int) -> Launch:
    """A step of more than one token per row; measured on one H200, batch 256 (bench/results/h200/verify.json)."""
    row = layout.recurrence
    if row.per_channel and layout.V % 32 == 0:
        return Launch(32, _chunk(layout, 32), warps=2, SPLIT=_split(layout.V // 32, B * layout.H))
    tile, chunk = _divisor(layout.V, 16), _chunk(layout, 32 if row.delta else 64)
    return Launch(tile, chunk, SPLIT=_split(layout.V // tile, B * layout.H))
