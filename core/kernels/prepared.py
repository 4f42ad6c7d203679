"""Launches that are made again and again, without Triton's look at every argument."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import KernelInterface

# Where `compiled[grid](*arguments)` takes all that the kernel does, constants included, and addresses for tensors.
KNOWN = ("3.5", "3.6", "3.7", "3.8")
recording = threading.Lock()  # held while `ahead` looks on, which sees no launch but Triton's own
logger = logging.getLogger(__name__)


class Prepared:
    """A kernel with its grid, its compile-time constants and the last of its arguments settled: called with the first ones.

    The first call launches as Triton does, which finds or compiles what fits the arguments' dtypes, alignment and integers.
    Later calls launch that very binary, so they must have the same form: who keeps one of these keeps it by ``form``. With
    a Triton of which that is not known, all calls are as the first one.

    Args:
        device: of all tensors, made the current one; its current stream is launched on.
        settled: the kernel's arguments before its constants.
        named: makes of the first arguments, whose tuples are plain, those with the names that the kernel knows parts by.
        constants: the rest, and Triton's options.
    """

    def __init__(
        self,
        kernel: KernelInterface[Any],
        device: torch.device,
        grid: tuple[int],
        settled: tuple[Any, ...],
        named: Callable[..., tuple[Any, ...]] | None = None,
        **constants: Any,
    ) -> None:
        self.kernel, self.grid, self.settled, self.named, self.constants = kernel, grid, settled, named, constants
        self.index = device.index if device.type == "cuda" else None
        self._again: tuple[Any, tuple[Any, ...]] | None = None  # the binary over its grid, and what follows the first arguments

    def __call__(self, *args: Any) -> None:
        if self.index is None or self.index == torch.cuda.current_device():
            self._launch(args)
        else:
            with torch.cuda.device(self.index):
                self._launch(args)

    def _launch(self, args: tuple[Any, ...]) -> None:
        if self._again is not None and not recording.locked():
            binary, rest = self._again
            binary(*args, *rest)
            return
        named = args if self.named is None else self.named(*args)
        compiled = self.kernel[self.grid](*named, *self.settled, **self.constants)
        if compiled is not None and known(triton.__version__):  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(args) + len(self.settled) :]
            rest = *addresses(self.settled), *(self.constants[name] for name in names)
            self._again = compiled[(*self.grid, 1, 1)], rest


def addresses(x: Any) -> Any:
    """The same arguments with tensors as the integers that the launcher would ask them for."""
    if isinstance(x, tuple):
        return tuple(addresses(part) for part in x)
    return x.data_ptr() if isinstance(x, Tensor) else x


@lru_cache(maxsize=1)
def known(version: str) -> bool:
    """Whether this Triton's binaries can be launched directly; says so once where not."""
    found = version.startswith(tuple(f"{one}." for one in KNOWN)) and torch.version.hip is None
    if not found:
        which = f"Triton {version}{'' if torch.version.hip is None else ' on ROCm'}"
        logger.warning("%s: not among %s for CUDA, so every launch takes Triton's own, longer way", which, ", ".join(KNOWN))
    return found
