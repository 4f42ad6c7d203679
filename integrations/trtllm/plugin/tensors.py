"""TensorRT's descriptors and memory in the terms of this package: sizes, dtypes, torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorrt as trt
import tensorrt.plugin as trtp
import torch

from replayssm.checks import Wanted

DTYPES = {
    torch.float32: trt.float32,
    torch.float16: trt.float16,
    torch.bfloat16: trt.bfloat16,
    torch.float8_e4m3fn: trt.fp8,
    torch.int8: trt.int8,
    torch.uint8: trt.int8,  # bytes of packed numbers: TensorRT's own uint8 is no type of a plugin's tensors
    torch.int32: trt.int32,
    torch.int64: trt.int64,
}
BYTES = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def dtype_of(name: str, desc: trtp.TensorDesc, wanted: Wanted) -> torch.dtype:
    """The one of a tensor's dtypes that the descriptor has."""
    for dtype in wanted.dtypes:
        if DTYPES[dtype] == desc.dtype:
            return dtype
    raise ValueError(f"{name}: expected {' or '.join(map(str, wanted.dtypes))}, got {desc.dtype}")


def constant(size: trtp.ShapeExpr) -> int | None:
    """A size that is known when the engine is built."""
    return size.constant_value() if not size.is_fake and size.is_constant else None


def sizes(names: Sequence[str], descs: Sequence[trtp.TensorDesc], wanted: Mapping[str, Wanted]) -> dict[str, trtp.ShapeExpr]:
    """The tensors' free sizes by their letters.

    Raises:
        ValueError: a tensor's rank, dtype, or size as far as it is known, is not what ``wanted`` says.
    """
    found: dict[str, trtp.ShapeExpr] = {}
    for name, desc in zip(names, descs, strict=True):
        one, shape = wanted[name], list(desc.shape_expr)
        dtype_of(name, desc, one)
        known = [None] * len(shape) if any(size.is_fake for size in shape) else [constant(size) for size in shape]
        free = {letter: constant(size) for letter, size in found.items()}
        want = [free.get(size) if isinstance(size, str) else size for size in one.shape]
        if len(shape) != len(want) or any(None not in pair and pair[0] != pair[1] for pair in zip(known, want, strict=True)):
            got = [size if size is not None else "?" for size in known]
            raise ValueError(f"{name}: expected {list(one.shape)}{_where(free, one)}, got {got}")
        found |= {letter: size for letter, size in zip(one.shape, shape, strict=True) if isinstance(letter, str)} | found
    return found


def _where(free: Mapping[str, int | None], one: Wanted) -> str:
    """The values of the letters in a shape, as far as they are known."""
    values = [f"{size} = {free[size]}" for size in one.shape if isinstance(size, str) and free.get(size) is not None]
    return f" with {', '.join(values)}" if values else ""


class _Memory:
    """A TensorRT tensor's memory for torch.as_tensor, as integers of its elements' width: bf16 has no name there."""

    def __init__(self, tensor: trtp.Tensor, itemsize: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": BYTES[itemsize],
            "data": (tensor.data_ptr, False),
            "version": 3,
        }


def view(tensor: trtp.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a linear TensorRT tensor on the current GPU as a torch tensor."""
    return torch.as_tensor(_Memory(tensor, dtype.itemsize), device="cuda").view(dtype)


def on_stream(stream: int) -> torch.cuda.StreamContext:
    """Context in which torch and Triton launch on TensorRT's stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))
