"""A plugin's kernel, compiled ahead of time: the launch that its op would make, with TensorRT's parameters.

TensorRT calls a kernel with the inputs' pointers, then 32-bit integers, then the outputs' pointers. Which arguments our kernel
has is read off the launch: pointers are known by their tensors; the rows of the batch and the layer stay parameters; every
other number is compiled in.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from tensorrt.plugin import KernelLaunchParams, SymInt32, SymIntExprs, TensorDesc
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from replayssm import ahead
from replayssm.checks import Wanted
from replayssm.ops import IMPLEMENTATIONS

from .signature import PLUGINS, Signature
from .tensors import dtype_of

# An integer that Triton compiles no property of into a kernel: neither 1 nor a multiple of 16.
ANY = 2
ENTRY = re.compile(r"\.visible \.entry (\w+)\(\n(.*?)\n\)", re.DOTALL)


class Number(int):
    """An integer of a launch that the engine computes: a value to choose compile-time sizes by, and its expression."""

    expression: Callable[[], SymInt32]  # called where TensorRT can make expressions

    def __new__(cls, value: int, expression: Callable[[], SymInt32]) -> Number:
        self = super().__new__(cls, value)
        self.expression = expression
        return self

    def _then(self, operation: Callable[[Any, Any], Any], other: int) -> Number:
        return Number(operation(int(self), int(other)), lambda: operation(self.expression(), int(other)))

    def __mul__(self, other: int) -> Number:
        return self._then(operator.mul, other)

    __rmul__ = __mul__  # else int's own would forget the expression

    def __add__(self, other: int) -> Number:
        return self._then(operator.add, other)

    __radd__ = __add__

    def __sub__(self, other: int) -> Number:
        return self._then(operator.sub, other)

    def __floordiv__(self, other: int) -> Number:
        return self._then(operator.floordiv, other)


class Operand(torch.Tensor):
    """A tensor without memory, known by its name, whose free sizes are Numbers, on the GPU at hand if there is one."""

    called: str
    sizes: tuple[int, ...]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("meta")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.sizes


def operand(name: str, desc: TensorDesc, wanted: Wanted, rows: int) -> Operand:
    """The operand for a descriptor. Its rows and tokens count as ``rows``; its other sizes must be build-time constants."""
    shape: list[int] = []
    for letter, size, expression in zip(wanted.shape, desc.shape, desc.shape_expr, strict=True):
        if letter in ("L", "S") and size < 0:
            raise ValueError(f"{name}: expected {letter} known when the engine is built, got shape {list(desc.shape)}")
        free = isinstance(letter, str) and letter not in ("L", "S")
        shape.append(Number(rows, lambda size=expression: size) if free else int(size))
    one = torch.empty([int(size) for size in shape], dtype=dtype_of(name, desc, wanted), device="meta").as_subclass(Operand)
    one.called, one.sizes = name, tuple(shape)
    return one


def most_rows(signature: Signature, inputs: Sequence[TensorDesc]) -> int:
    """The most rows of a batch that the optimization profiles allow."""
    desc = next(desc for name, desc in zip(signature.inputs, inputs, strict=True) if signature.wanted[name].shape[0] == "B")
    return int(desc.shape.max[0]) if desc.shape[0] < 0 else int(desc.shape[0])


def launch(
    signature: Signature,
    attributes: Mapping[str, Any],
    inputs: Sequence[TensorDesc],
    outputs: Sequence[TensorDesc],
    rows: int,
) -> ahead.Launch:
    """The one launch that the plugin's op makes for a batch of that many rows."""
    named = zip((*signature.inputs, *signature.outputs), (*inputs, *outputs), strict=True)
    operands = {name: operand(name, desc, signature.wanted[name], rows) for name, desc in named}
    numbers = {
        name: Number(value, lambda value=value: SymInt32(value)) if name == "layer" else value
        for name, value in attributes.items()
    }
    op = PLUGINS[signature.plugin].op
    made = ahead.launches(lambda: IMPLEMENTATIONS[op](*signature.bind(operands, numbers)))
    if len(made) != 1:
        names = [one.kernel.__name__ for one in made]
        raise NotImplementedError(f"{signature.plugin}: ahead of time, supported are ops of one launch, got {names}")
    return made[0]


def tactics(launched: Callable[[int], ahead.Launch]) -> list[int]:
    """Numbers of rows that launches differ for in their compile-time choices: what TensorRT may time."""
    chosen: dict[str, int] = {}
    for rows in (1 << i for i in range(9)):
        chosen.setdefault(str(launched(rows).keywords), rows)
    return list(chosen.values())


def leaves(x: Any) -> Iterator[Operand | Number]:
    """The parts of a launch's argument that are parameters of the compiled kernel."""
    if isinstance(x, Operand | Number):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from leaves(part)


def fixed(x: Any) -> Any:
    """A launch's argument with its known integers turned into compile-time constants."""
    if isinstance(x, Number):
        return ANY
    if isinstance(x, tuple):
        parts = [fixed(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return tl.constexpr(x) if type(x) is int else x


def renumbered(ptx: str, places: Sequence[int], parameters: int) -> str:
    """The PTX of a kernel of that many parameters, whose i-th was ``places[i]``-th; those that nothing is said of are unused.

    Raises:
        NotImplementedError: it uses parameters beyond ``places``: memory that only Triton's own launcher provides.
    """
    entry = ENTRY.search(ptx)
    assert entry is not None, "Triton's PTX has an entry"
    name, declared, body = entry[1], entry[2].split(",\n"), ptx[entry.end() :]
    hidden = [i for i in range(len(places), len(declared)) if re.search(rf"\b{name}_param_{i}\b", body)]
    if hidden:
        raise NotImplementedError(f"{name}: supported are kernels without scratch memory, got parameters {hidden} for it")

    def renamed(text: str) -> str:
        return re.sub(rf"\b{name}_param_(\d+)\b", lambda match: f"{name}_argument_{places[int(match[1])]}", text)

    listed = [f"\t.param .u64 {name}_argument_{place}" for place in range(parameters)]
    for line, place in zip(declared, places, strict=False):
        listed[place] = renamed(line)
    return ptx[: entry.start(2)] + ",\n".join(listed) + "\n)" + renamed(body)


def built(
    signature: Signature, launched: ahead.Launch, target: GPUTarget | None
) -> tuple[str, str, KernelLaunchParams, SymIntExprs]:
    """What TensorRT's aot_impl returns: the kernel's name, its PTX, its launch and the integers it takes.

    Args:
        target: the GPU to compile for; None for the current one.
    """
    if baked := [name for name, value in launched.keywords.items() if isinstance(value, Number)]:
        raise NotImplementedError(f"{signature.plugin}: supported are compile-time sizes that no batch changes, got {baked}")
    bound = dict(zip(launched.kernel.arg_names, launched.arguments, strict=False)) | launched.keywords
    parameters = [leaf for name in launched.kernel.arg_names for leaf in leaves(bound[name])]
    numbers = [leaf for leaf in parameters if isinstance(leaf, Number)]
    constants = dataclasses.replace(launched, arguments=fixed(launched.arguments))
    compiled = ahead.compiled(constants, target or driver.active.get_current_target())

    taken, places = len(signature.inputs), []
    for leaf in parameters:
        if isinstance(leaf, Number):
            places.append(taken + next(i for i, number in enumerate(numbers) if number is leaf))
        elif leaf.called in signature.outputs:  # what is written is named by the output, read before or not
            places.append(taken + len(numbers) + signature.outputs.index(leaf.called))
        else:
            places.append(signature.inputs.index(leaf.called))
    ptx = renumbered(compiled.asm["ptx"], places, taken + len(numbers) + len(signature.outputs))

    extra = SymIntExprs(len(numbers))
    for i, number in enumerate(numbers):
        extra[i] = SymInt32(number.expression())
    grid = [size.expression() if isinstance(size, Number) else size for size in (*launched.grid, 1, 1)[:3]]
    params = KernelLaunchParams(*grid, block_x=compiled.metadata.num_warps * 32, shared_mem=compiled.metadata.shared)
    return compiled.metadata.name, ptx, params, extra
