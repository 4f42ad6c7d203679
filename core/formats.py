"""Number formats of the stored state: each owns its host half here; the kernels' half is kernels/formats.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """How one [V, K] state is stored.

    Attributes:
        name: "fp32", "bf16" or "fp16".
        dtype: element type of the stored tensor; rounding is to nearest even.
    """

    name: str
    dtype: torch.dtype

    def encode(self, state: Tensor) -> Tensor:
        """fp32 state [..., V, K] -> stored tensor of the same shape."""
        return state.to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        """Stored tensor [..., V, K] -> fp32 state."""
        return stored.to(torch.float32)

    def bytes(self, V: int, K: int) -> int:
        """Bytes of one head's stored state."""
        return V * K * self.dtype.itemsize


FORMATS = {f.name: f for f in (Format("fp32", torch.float32), Format("bf16", torch.bfloat16), Format("fp16", torch.float16))}


def named(name: str) -> Format:
    """The format of that name; NotImplementedError names the supported ones."""
    if name not in FORMATS:
        raise NotImplementedError(f"state format: expected one of {sorted(FORMATS)}, got {name!r}")
    return FORMATS[name]
