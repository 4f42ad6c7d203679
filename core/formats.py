"""Number formats of the stored state: each owns its host half here; the kernels' half is kernels/formats.py.

A format is a number type, how many values of a row of K share a scale, and how it rounds. Its names:

    fp32, bf16, fp16                        to nearest even
    e4m3, int8, int16, nvfp4                to nearest even, scaled
    fp16+sr, e4m3+sr, int8+sr               stochastically: up as often as the value lies above its lower neighbour
    e4m3:32, int8:row, ...                  that many values a scale, or one scale a row of K, instead of the default

Every scaled value is ``number * scale``, scale an fp32 whose block's largest magnitude is the type's largest number. nvfp4 is
e2m1 with an e4m3 scale per 16 values and an fp32 scale per row above it. A block that holds a NaN or an infinity decodes to no
finite number. Blocks whose largest magnitude is below 2^-100 are rounded as if it were that.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROW = 0
TINY = 2.0**-100  # least magnitude that a scale is made for: its reciprocal stays finite
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCKS = (16, 32, 64, ROW)


class Stored(NamedTuple):
    """The tensors of a stored state; absent ones are None."""

    values: Tensor  # [..., V, K], e2m1 in pairs [..., V, K / 2]
    scale: Tensor | None = None  # [..., V, K / block]
    row_scale: Tensor | None = None  # [..., V]


@dataclass(frozen=True)
class Format:
    """How one [V, K] state is stored.

    Attributes:
        name: as Layout takes it.
        dtype: of the stored values; torch.uint8 holds two e2m1, the first half of a row in the low nibbles.
        mbits, emin, most: the number type: multiples of 2^(max(e, emin) - mbits), 2^e <= |x| < 2^(e + 1), up to `most`.
        block: values along K that share a scale, ROW for a whole row; None without scales.
        stochastic: whether it rounds stochastically.
    """

    name: str
    dtype: torch.dtype
    mbits: int
    emin: int
    most: float
    block: int | None = None
    stochastic: bool = False

    @property
    def packed(self) -> int:
        """Values in one element of the stored tensor."""
        return 2 if self.dtype == torch.uint8 else 1

    def span(self, K: int) -> int:
        """Values that share a scale, in rows of K."""
        return self.block or K

    def check(self, argument: str, K: int) -> None:
        """Raise NotImplementedError, naming the layout's argument, where rows of K cannot be stored so."""
        multiple = self.packed * (self.block or 1)
        if K % multiple:
            why = f"{self.packed} times {self.block} values a scale" if self.packed > 1 else f"{self.block} values a scale"
            raise NotImplementedError(f"{argument} {self.name!r}: expected K a multiple of {multiple} ({why}), got {K}")

    def tensors(self, V: int, K: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Per field of Stored that this format has: shape and dtype for one head."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"values": ((V, K // self.packed), self.dtype)}
        if self.block is not None:
            shapes["scale"] = ((V, K // self.span(K)), E4M3 if self.packed > 1 else torch.float32)
        if self.packed > 1:
            shapes["row_scale"] = ((V,), torch.float32)
        return shapes

    def bytes(self, V: int, K: int) -> int:
        """Bytes of one head's stored state, scales included."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors(V, K).values())

    def encode(self, state: Tensor, draws: Tensor | None = None) -> Stored:
        """fp32 state [..., V, K] -> stored tensors; draws [..., V, K] fp32 in [0, 1) where the format rounds stochastically."""
        if self.stochastic != (draws is not None):
            expected = "numbers in [0, 1) of the state's shape" if self.stochastic else "None"
            raise ValueError(f"draws: expected {expected} for {self.name}, got {None if draws is None else list(draws.shape)}")
        if self.block is None:
            return Stored((rounded(state, self, draws) if self.stochastic else state).to(self.dtype))
        scale, row_scale, inverse = self._scales(state)
        y = state * inverse.repeat_interleave(self.span(state.shape[-1]), -1)
        y = rounded(y.clamp(-self.most, self.most), self, draws)
        return Stored(pack(y) if self.packed > 1 else y.to(self.dtype), scale, row_scale)

    def _scales(self, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(scale, row_scale, 1 / their product), the first and last [..., V, K / block]."""
        largest = state.abs().unflatten(-1, (-1, self.span(state.shape[-1]))).amax(-1)
        if self.packed == 1:
            largest = largest.clamp(min=TINY)
            return quotient(largest, self.most), None, quotient(self.most, largest)
        row = largest.amax(-1).clamp(min=TINY)
        scale = rounded((largest * quotient(E4M3_MAX, row)[..., None]).clamp(max=E4M3_MAX), FORMATS["e4m3"]).to(E4M3)
        row_scale = quotient(row, E4M3_MAX * self.most)
        both = scale.to(torch.float32) * row_scale[..., None]
        return scale, row_scale, torch.where(both > 0, quotient(1.0, torch.where(both > 0, both, 1.0)), 0.0)

    def decode(self, stored: Stored) -> Tensor:
        """Stored tensors -> fp32 state [..., V, K]."""
        values = unpack(stored.values) if self.packed > 1 else stored.values.to(torch.float32)
        if stored.scale is None:
            return values
        scale = stored.scale.to(torch.float32)
        if stored.row_scale is not None:
            scale = scale * stored.row_scale[..., None]
        return values * scale.repeat_interleave(self.span(values.shape[-1]), -1)


def rounded(x: Tensor, number: Format, draws: Tensor | None = None) -> Tensor:
    """fp32 x to the number type's spacing: to nearest even, or up in magnitude where a draw falls below the rest.

    With n = |x| / spacing: P(floor(n) + 1) = n - floor(n), to 2^-24. Every product here is exact.
    """
    exponent = (x.abs().view(torch.int32) >> 23).clamp(min=127 + number.emin)
    n = x.abs() * ((254 + number.mbits - exponent) << 23).view(torch.float32)
    below = n.floor()
    n = n.round() if draws is None else below + (draws < n - below)
    return (n * ((exponent - number.mbits) << 23).view(torch.float32)).copysign(x)


def quotient(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x / y, correctly rounded as in the kernels: with a number on either side torch may multiply by a reciprocal instead."""
    if isinstance(x, Tensor):
        return x / torch.full_like(x, y)  # type: ignore[arg-type]  # a number
    return torch.full_like(y, x) / y  # type: ignore[arg-type]  # a tensor


def pack(y: Tensor) -> Tensor:
    """e2m1 numbers [..., K] in fp32 -> bytes [..., K / 2], number i in the low nibble of byte i, K / 2 + i in its high one."""
    code = (y.abs() * 2.0**-126).view(torch.int32) >> 22 | (y.view(torch.int32) >> 28) & 8
    low, high = code.chunk(2, -1)
    return (low | high << 4).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K / 2] -> e2m1 numbers [..., K] in fp32: sign and the rest in fp32's exponent, times 2^126."""
    byte = packed.to(torch.int32)
    nibble = torch.cat([byte & 15, byte >> 4], -1)
    return ((nibble & 8) << 28 | (nibble & 7) << 22).view(torch.float32) * 2.0**126


# ---- randomness ----------------------------------------------------------------------------------------------------------


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10: four random words for a counter of four and a key of two, all below 2^32 in int64.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    word = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) & word ^ c1 ^ k0, b & word, (a >> 32) & word ^ c3 ^ k1, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def draws(seed: int, layer: int, key: Tensor, flush: Tensor, H: int, V: int, K: int) -> Tensor:
    """Uniform fp32 numbers in [0, 1), multiples of 2^-24: [B, H, V, K] for one fold of B requests.

    They depend on the arguments alone: four columns share one Philox call of key (seed, layer) and counter
    (call number in the layer, flush, request key).

    Args:
        key: [B] int64, the requests' own numbers.
        flush: [B] int, how many folds each request had before; LOADED for the rounding of a loaded state.
    """
    word, B = 0xFFFFFFFF, key.shape[0]
    call = torch.arange(H * V * K // 4, device=key.device).expand(B, -1)
    parts = (flush.long() & word, key & word, (key >> 32) & word)
    words = torch.stack(philox((call, *(x[:, None].expand_as(call) for x in parts)), (seed, layer)), -1)  # type: ignore[arg-type]
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(B, H, V, K)


LOADED = -1  # flush number of a load: folds count from 0

# ---- names ---------------------------------------------------------------------------------------------------------------

FORMATS = {
    f.name: f
    for f in (
        Format("fp32", torch.float32, 23, -126, torch.finfo(torch.float32).max),
        Format("bf16", torch.bfloat16, 7, -126, torch.finfo(torch.bfloat16).max),
        Format("fp16", torch.float16, 10, -14, torch.finfo(torch.float16).max),
        Format("e4m3", E4M3, 3, -6, E4M3_MAX, block=16),
        Format("int8", torch.int8, 7, 7, 127.0, block=16),
        Format("int16", torch.int16, 15, 15, 32767.0, block=16),
        Format("nvfp4", torch.uint8, 1, 0, 6.0, block=16),
    )
}
STOCHASTIC = ("fp16", "e4m3", "int8")
READ = ("e4m3", "int8", "nvfp4")
BLOCKED = ("e4m3", "int8", "int16")


def plain(dtype: torch.dtype) -> Format:
    """The unscaled format of a caller's states."""
    return next(f for f in FORMATS.values() if f.dtype == dtype and f.block is None)


def base(name: str) -> str:
    """The number type of a format's name, without rounding and values a scale."""
    return name.partition(":")[0].partition("+")[0]


def named(name: str, argument: str = "state") -> Format:
    """The format of that name; NotImplementedError, naming the layout's argument, says what is supported."""
    rest, _, block = name.partition(":")
    base, _, rounding = rest.partition("+")
    known = READ if argument == "read" else (*FORMATS, *(f"{one}+sr" for one in STOCHASTIC))
    if base not in FORMATS or rounding not in ("", "sr"):
        raise NotImplementedError(f"{argument} format: expected one of {list(known)}, got {name!r}")
    if rounding and base not in STOCHASTIC:
        raise NotImplementedError(f"{argument} format: stochastic rounding is supported for {list(STOCHASTIC)}, got {name!r}")
    if rest not in known:
        why = "; a read copy rounds to nearest: its error does not accumulate" if rounding else ""
        raise NotImplementedError(f"{argument} format: expected one of {list(known)}, got {name!r}{why}")
    found = dataclasses.replace(FORMATS[base], name=name, stochastic=bool(rounding))
    if not block:
        return found
    blocks = {str(size) if size else "row": size for size in BLOCKS}
    if base not in BLOCKED or block not in blocks:
        raise NotImplementedError(
            f"{argument} format: values per scale can be chosen for {list(BLOCKED)} among {list(blocks)}, got {name!r}"
        )
    return dataclasses.replace(found, block=blocks[block])
