"""Launches that are made again and again, without Triton's look at every argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface


class Prepared:
    """A kernel with its grid, its compile-time constants and the last of its arguments settled: called with the first ones.

    The first call launches as Triton does, which finds or compiles what fits the arguments' dtypes, alignment and integers.
    Later calls launch that very binary, so they must have the same form: who keeps one of these keeps it by ``form``.

    Args:
        device: of all tensors, made the current one.
        settled: the kernel's arguments before its constants; their tensors must outlive this.
        constants: the rest, and Triton's options.
    """

    def __init__(
        self, kernel: KernelInterface[Any], device: torch.device, grid: tuple[int], settled: tuple[Any, ...], **constants: Any
    ) -> None:
        self.kernel, self.grid, self.settled, self.constants = kernel, grid, settled, constants
        self.index = device.index if device.type == "cuda" else None
        self._again: Any = None

    def __call__(self, *args: Any) -> None:
        if self.index is None or self.index == torch.cuda.current_device():
            self._launch(args)
        else:
            with torch.cuda.device(self.index):
                self._launch(args)

    def _launch(self, args: tuple[Any, ...]) -> None:
        if self._again is not None:
            self._again(*args, *self.settled)
            return
        compiled = self.kernel[self.grid](*args, *self.settled, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            self._again = compiled[(*self.grid, 1, 1)]
            names = self.kernel.arg_names[len(args) + len(self.settled) :]
            self.settled = (*addresses(self.settled), *(self.constants[name] for name in names))


def addresses(x: Any) -> Any:
    """The same arguments with tensors as the integers that the launcher would ask them for."""
    if isinstance(x, tuple):
        return tuple(addresses(part) for part in x)
    return x.data_ptr() if isinstance(x, Tensor) else x
