"""Kernels compiled ahead of time: the launches that an operation would make, for a GPU that need not be there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime.jit import JITFunction, create_function_from_signature

from .kernels.prepared import recording


@dataclass(frozen=True)
class Launch:
    """A kernel launch, not made.

    Attributes:
        arguments, keywords: of the kernel, as its launcher gave them; keywords hold compile-time sizes and Triton's options.
    """

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def launches(operation: Callable[[], object]) -> list[Launch]:
    """What the operation would launch, in order; its tensors may be on any device, "meta" included. Nothing runs.

    Raises:
        RuntimeError: under TRITON_INTERPRET=1, where kernels are no compiler's input.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: expected unset, since the interpreter's kernels cannot be compiled, got 1")
    recorded: list[Launch] = []
    run, here = JITFunction.run, threading.get_ident()

    def record(self, *args, grid, warmup, **keywords):
        if threading.get_ident() != here:  # another thread's launch
            return run(self, *args, grid=grid, warmup=warmup, **keywords)
        recorded.append(Launch(self, grid, args, keywords))
        return None

    with recording:
        JITFunction.run = record
        try:
            operation()
        finally:
            JITFunction.run = run
    return recorded


def compiled(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """The kernel, compiled for the target and for arguments like those of the launch."""
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.keywords)
    options, signature, constexprs, attrs = kernel._pack_args(backend, launch.keywords, bound, specialization, options)
    return triton_compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options.__dict__)
