"""What kernels receive: named tuples of pointers, strides and sizes, built once on the host.

Strides are in elements. The innermost dimension is contiguous everywhere and has none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from ..layout import Buffers, Inputs, Layout, Weights
from ..recurrence import L2_EPS


class Rows(NamedTuple):
    """A per-slot tensor [L, S, heads, rows, dim]."""

    ptr: Tensor
    layer: int
    slot: int
    head: int
    row: int


class Tokens(NamedTuple):
    """A packed per-token tensor [N, heads, dim]."""

    ptr: Tensor
    token: int
    head: int


class Coding(NamedTuple):
    """A state format's compile-time half: number type, values a scale, whether it rounds stochastically."""

    MBITS: tl.constexpr
    EMIN: tl.constexpr
    MOST: tl.constexpr
    BLOCK: tl.constexpr
    STOCHASTIC: tl.constexpr


class Dims(NamedTuple):
    """Compile-time sizes and the recurrence's row."""

    H: tl.constexpr
    G: tl.constexpr
    V: tl.constexpr
    K: tl.constexpr
    R: tl.constexpr
    BLOCK_K: tl.constexpr
    W_PAD: tl.constexpr
    DELTA: tl.constexpr
    PER_CHANNEL: tl.constexpr
    STORES_G: tl.constexpr
    NORMALIZE: tl.constexpr
    BETA: tl.constexpr
    DECAY: tl.constexpr
    LOWER_BOUND: tl.constexpr
    SCALE: tl.constexpr
    EPS: tl.constexpr
    SEED: tl.constexpr
    STATE: Coding
    READ: Coding | None


@lru_cache(maxsize=256)
def dims(layout: Layout, BLOCK_K: int, least_W: int = 1) -> Dims:
    """The compile-time half of a layout, with the width of a launch's chunks of K and the least padded window it can take."""
    row = layout.recurrence
    sizes = (layout.H, layout.G, layout.V, layout.K, layout.R, BLOCK_K, max(least_W, triton.next_power_of_2(layout.W)))
    parts = (row.delta, row.per_channel, row.stores_g, row.normalize, row.beta, row.decay)
    values = (*sizes, *parts, row.lower_bound, row.q_scale(layout.K), L2_EPS, layout.seed)
    return Dims(*(tl.constexpr(x) for x in values), coding(layout.format, layout.K), coding(layout.read_format, layout.K))


def coding(one: Format | None, K: int) -> Coding | None:
    """The compile-time half of a format for rows of K."""
    if one is None:
        return None
    return Coding(*(tl.constexpr(x) for x in (one.mbits, one.emin, one.most, one.span(K), one.stochastic)))


def rows(tensor: Tensor | None) -> Rows | None:
    """Rows of a buffer [L, S, heads, rows, ...]."""
    return None if tensor is None else Rows(tensor, *tensor.stride()[:4])


def pool(buffers: Buffers) -> Buffers:
    """Buffers whose tensors are replaced by their Rows, without the convolution's, which has kernels of its own."""
    return Buffers(*(rows(tensor) for tensor in buffers))._replace(conv=None)


def tokens(tensor: Tensor | None) -> Tokens | None:
    """Tokens of a packed tensor [N, heads, ...]."""
    return None if tensor is None else Tokens(tensor, tensor.stride(0), tensor.stride(1))


def named(*arguments: Any) -> tuple[Any, ...]:
    """A step's arguments as its kernel knows them; the last three are x, w and out, in plain tuples."""
    *first, x, w, out = arguments
    return *first, Inputs(*(one and Tokens(*one) for one in x)), Weights(*w), Tokens(*out)


def on_device(tensor: Tensor) -> torch.cuda.device:
    """Context that makes the tensor's GPU the current one, which Triton launches on; nothing on a CPU."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)
