"""What TensorRT's builder and runtime do with a plugin, up to where an engine would be needed: its calls, in its order.

The plugin objects are those that TensorRT's front end makes of the registered functions. The builder's own parts, which only
TensorRT's libraries have, are stood in for: expressions of sizes, and what receives them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tensorrt as trt
import torch
from tensorrt.plugin import _plugin_class, _tensor

from replayssm import Layout
from replayssm.checks import Wanted
from replayssm.integrations.trtllm import plugin
from replayssm.integrations.trtllm.plugin.signature import Signature, signature
from replayssm.integrations.trtllm.plugin.tensors import DTYPES

OPERATIONS = {
    trt.DimensionOperation.SUM: operator.add,
    trt.DimensionOperation.SUB: operator.sub,
    trt.DimensionOperation.PROD: operator.mul,
    trt.DimensionOperation.FLOOR_DIV: operator.floordiv,
}


class Expression(trt.IDimensionExpr):
    """An integer of the network: constant, or a function of the batch's rows."""

    at: Callable[[int], int]
    value: int | None

    @staticmethod
    def of(at: Callable[[int], int], value: int | None = None) -> Expression:
        self = Expression.__new__(Expression)  # TensorRT's class has no constructor
        self.at, self.value = at, value
        return self

    def is_constant(self) -> bool:
        return self.value is not None

    def get_constant_value(self) -> int:
        return self.value


class Expressions:
    """TensorRT's IExprBuilder."""

    def constant(self, value: int) -> Expression:
        return Expression.of(lambda rows: value, value)

    def operation(self, kind: trt.DimensionOperation, a: Expression, b: Expression) -> Expression:
        f = OPERATIONS[kind]
        constant = f(a.value, b.value) if a.is_constant() and b.is_constant() else None
        return Expression.of(lambda rows: f(a.at(rows), b.at(rows)), constant)


class Integers(list):
    """What receives a kernel's integers."""

    def __setitem__(self, index: int, value: Any) -> None:
        self.append(value)


# The two of TensorRT's own classes that take nothing but its library's expressions.
trt.DimsExprs = _plugin_class.trt.DimsExprs = lambda n: [None] * n
_tensor.SymExprImpl = lambda expression: expression


@dataclass
class Network:
    """Plugins for a state of a layout.

    Args:
        rows: fewest, usual and most rows of the batch; equal ones make it a constant.
        tokens: packed tokens of a row.
        dtypes: of tensors that may have several; else the first.
    """

    layout: Layout
    layers: int
    slots: int
    given: tuple[str, ...] = ()
    namespace: str = "replayssm"
    target: Any = None
    rows: tuple[int, int, int] = (1, 8, 64)
    tokens: int = 1
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plugins = plugin.register(self.layout, self.given, self.namespace, self.target)

    def shape(self, one: Wanted) -> list[int | str]:
        """Sizes of a tensor, those that depend on the rows by name."""
        known = {"L": self.layers, "S": self.slots}
        return [known.get(size, size) for size in one.shape]

    def size(self, size: int | str, rows: int) -> int:
        """A size for a number of rows."""
        return {"B": rows, "N": rows * self.tokens, "B + 1": rows + 1}.get(size, size)

    def expression(self, size: int | str) -> Expression:
        """A size as the builder sees it."""
        constant = self.size(size, self.rows[0]) if self.rows[0] == self.rows[2] or isinstance(size, int) else None
        return Expression.of(lambda rows: self.size(size, rows), constant)

    def add(self, name: str, ahead: bool = False, shapes: Mapping[str, list] | None = None, **attributes: Any) -> Node:
        """A plugin's layer in the network, as builder.add_plugin makes it.

        Args:
            ahead: with kernels compiled ahead of time, rather than Python at run time.
            shapes: of inputs that shall have others than the layout's.
        """
        made = self.plugins[name]
        assert tuple(made.input_tensor_names) == signature(name, self.layout, self.given).inputs
        attributes = {key: attributes.get(key, self.layout.spec) for key in made.input_attrs}
        inputs = [trt.ITensor.__new__(trt.ITensor) for _ in made.input_tensor_names]
        kind = trt.QuickPluginCreationRequest
        _, _, instance = made(*inputs, **attributes)(kind.STRICT_AOT if ahead else kind.STRICT_JIT)
        return Node(self, signature(name, self.layout, self.given), instance, shapes or {})


class Node:
    """One plugin in a network, with its outputs described.

    Attributes:
        types, shapes: of the outputs.
        aliases: output number -> the input that it is.
        combinations: (dtype, format) of inputs and outputs, of each combination that the plugin supports.
        tactics: that it offers.
    """

    def __init__(self, network: Network, one: Signature, instance: Any, shapes: Mapping[str, list]) -> None:
        names = one.inputs
        self.network, self.names, self.plugin, self.builder = network, names, instance, Expressions()
        types = [DTYPES[network.dtypes.get(name, one.wanted[name].dtypes[0])] for name in names]
        sizes = [shapes.get(name, network.shape(one.wanted[name])) for name in names]
        self.types = instance.get_output_data_types(types, [len(shape) for shape in sizes])
        self.aliases = {
            i: names[instance.get_aliased_input(i)]
            for i in range(instance.get_num_outputs())
            if instance.get_aliased_input(i) >= 0
        }
        self.inputs = [[network.expression(size) for size in shape] for shape in sizes]
        self.shapes = instance.get_output_shapes(self.inputs, [], self.builder)
        self.descs = [self._desc(*one) for one in zip(types + self.types, self.inputs + self.shapes, strict=True)]
        found = instance.get_supported_format_combinations(self.descs, len(names))
        both = [(one.type, one.format) for one in found]
        self.combinations = [both[i : i + len(self.descs)] for i in range(0, len(both), len(self.descs))]
        instance.configure_plugin(self.descs[: len(names)], self.descs[len(names) :])
        self.tactics = sorted(instance.get_valid_tactics())

    def _desc(self, dtype: trt.DataType, shape: list[Expression]) -> trt.DynamicPluginTensorDesc:
        desc = trt.DynamicPluginTensorDesc()
        desc.desc.type, desc.desc.format = dtype, trt.TensorFormat.LINEAR
        desc.desc.dims = [size.value if size.is_constant() else -1 for size in shape]
        desc.min, desc.opt, desc.max = ([size.at(rows) for size in shape] for rows in self.network.rows)
        return desc

    def launch(self, tactic: int = 0) -> SimpleNamespace:
        """The kernel compiled ahead of time: name, ptx; grid, block, shared and integers as functions of the rows."""
        params, integers = SimpleNamespace(), Integers()
        self.plugin.set_tactic(tactic)
        self.plugin.get_launch_params(self.inputs, self.descs, len(self.names), params, integers, self.builder)
        descs = [one.desc for one in self.descs]
        name, ptx = self.plugin.get_kernel(descs[: len(self.names)], descs[len(self.names) :])
        return SimpleNamespace(
            name=name,
            ptx=ptx.decode(),
            grid=lambda rows: tuple(getattr(params, f"grid_{axis}")._expr.at(rows) for axis in "xyz"),
            block=tuple(getattr(params, f"block_{axis}")._expr.value for axis in "xyz"),
            shared=params.shared_mem._expr.value,
            integers=lambda rows: [one._expr.at(rows) for one in integers],
        )

    def memory(self, bound: Mapping[str, torch.Tensor], rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs' tensors and the outputs', which are made, full of -7, unless they are aliases."""
        held = [bound[name] for name in self.names]
        ours = {theirs: dtype for dtype, theirs in DTYPES.items()}
        outputs = [
            bound[self.aliases[i]]
            if i in self.aliases
            else torch.full([size.at(rows) for size in shape], -7, dtype=ours[dtype], device=held[0].device)
            for i, (dtype, shape) in enumerate(zip(self.types, self.shapes, strict=True))
        ]
        return held, outputs

    def enqueue(self, bound: Mapping[str, torch.Tensor], rows: int, stream: int = 0) -> list[torch.Tensor]:
        """Runs the plugin in Python on these tensors' memory; returns the outputs."""
        held, outputs = self.memory(bound, rows)
        descs = [self._held(desc, x) for desc, x in zip(self.descs, (*held, *outputs), strict=True)]
        pointers = [x.data_ptr() for x in (*held, *outputs)]
        strides = [x.stride() for x in (*held, *outputs)]
        n = len(held)
        self.plugin.enqueue(descs[:n], descs[n:], pointers[:n], pointers[n:], strides[:n], strides[n:], stream)
        return outputs

    @staticmethod
    def _held(desc: trt.DynamicPluginTensorDesc, x: torch.Tensor) -> trt.PluginTensorDesc:
        assert DTYPES[x.dtype] == desc.desc.type, "memory of another dtype than the network's"
        one = trt.PluginTensorDesc()
        one.type, one.format, one.dims = desc.desc.type, desc.desc.format, list(x.shape)
        return one
