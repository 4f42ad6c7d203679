"""Registers the plugins with TensorRT: descriptors, implementations, tactics and kernels compiled ahead of time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorrt.plugin as trtp
import torch
from triton.backends.compiler import GPUTarget

from replayssm import Layout

from . import kernel
from .signature import OUT, PLUGINS, Signature, signature
from .tensors import DTYPES, constant, dtype_of, on_stream, sizes, view

AOT = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]
_registered: dict[str, tuple[list[Signature], GPUTarget | None]] = {}


def register(
    layout: Layout, given: Collection[str] = (), namespace: str = "replayssm", target: GPUTarget | None = None
) -> dict[str, Any]:
    """Registers ``plan``, ``flush``, ``decode``, ``verify`` and ``commit`` as TensorRT plugins; again changes nothing.

    Each stands for the op of torch.ops.replayssm that ReplayState calls, with its tensors in the op's order; those of the state
    are of all layers and slots, [L, S, ...]. What a plugin takes of the state it gives back, as aliases, after the op's own
    output; the next plugin takes the aliases. Attributes are ``layout``, which is ``Layout.spec``, and the op's numbers:
    ``layer``, ``T``.

    Args:
        layout: which tensors there are follows from it. Layers of one namespace may differ in anything else.
        given: names of the tensors that there are besides: some of t, force, cu_seqlens, accepted, z, dt_bias, D.
        namespace: of the plugins; each set of tensors needs its own.
        target: the GPU that kernels are compiled for ahead of time; None takes the current one.

    Returns:
        The plugins by name: ``tensorrt.plugin.op.<namespace>``'s.

    Raises:
        ValueError: the namespace has plugins of other tensors, or ``given`` names one that the layout cannot have.
    """
    given = tuple(given)
    signatures = [signature(name, layout, given) for name in PLUGINS]
    if namespace not in _registered:
        for one in signatures:
            Functions(f"{namespace}::{one.plugin}", one, given, target).register()
        _registered[namespace] = signatures, target
    if _registered[namespace] != (signatures, target):
        raise ValueError(
            f"namespace: expected one of its own for these tensors or this target, got {namespace!r}, which has "
            f"{_registered[namespace][0][1].inputs} for {_registered[namespace][1]}"
        )
    ops = getattr(trtp.op, namespace)
    return {name: getattr(ops, name) for name in PLUGINS}


@dataclass(frozen=True)
class Functions:
    """What TensorRT calls of one plugin; arguments are the inputs, the attributes, then the outputs."""

    plugin_id: str
    signature: Signature
    given: tuple[str, ...]
    target: GPUTarget | None

    def register(self) -> None:
        """Gives them to TensorRT, each with the signature that it reads."""
        one, n = self.signature, len(self.signature.outputs)
        attributes, results = dict(one.attributes), tuple[(trtp.TensorDesc,) * n]
        described, held = (dict.fromkeys(one.inputs, kind) | attributes for kind in (trtp.TensorDesc, trtp.Tensor))
        written = {"outputs": tuple[(trtp.Tensor,) * n], "stream": int}
        trtp.register(self.plugin_id)(_signed(self.describe, described, results))
        trtp.impl(self.plugin_id)(_signed(self.run, held | written, None))
        described |= {"outputs": results}
        trtp.autotune(self.plugin_id)(_signed(self.combine, described, list[trtp.AutoTuneCombination]))
        trtp.aot_impl(self.plugin_id)(_signed(self.compile, described | {"tactic": int}, AOT))

    def describe(self, *descs: trtp.TensorDesc, **attributes: Any) -> tuple[trtp.TensorDesc, ...]:
        """The outputs' descriptors: the op's own, then aliases.

        Raises:
            ValueError: an attribute, or an input's rank, dtype or known size, is not what the layout says.
        """
        one = self._of(attributes)
        found = sizes(one.inputs, descs, one.wanted)
        self._check(attributes, None if "L" not in found else constant(found["L"]))
        inputs = dict(zip(one.inputs, descs, strict=True))
        return tuple(
            trtp.from_shape_expr(
                tuple(found[size] if isinstance(size, str) else size for size in one.wanted[OUT].shape),
                DTYPES[one.wanted[OUT].dtypes[0]],
            )
            if name == OUT
            else inputs[name].aliased()
            for name in one.outputs
        )

    def run(self, *arguments: Any, stream: int) -> None:
        """The op itself on TensorRT's memory and stream, by Triton's own launcher."""
        inputs, attributes, outputs = self._split(arguments)
        one, names = self._of(attributes), (*self.signature.inputs, *self.signature.outputs)
        memory = {
            name: view(tensor, dtype_of(name, tensor, one.wanted[name]))
            for name, tensor in zip(names, (*inputs, *outputs), strict=True)
        }
        op = getattr(torch.ops.replayssm, PLUGINS[one.plugin].op)
        with on_stream(stream):
            op(*one.bind(memory, attributes))

    def combine(self, *arguments: Any) -> list[trtp.AutoTuneCombination]:
        """The tensors' dtypes as the network has them, linear; tactics are the numbers of rows that launches are chosen by."""
        inputs, attributes, outputs = self._split(arguments)
        types = ", ".join(desc.dtype.name for desc in (*inputs, *outputs))
        tactics, one = None, self._of(attributes)
        if PLUGINS[one.plugin].tuned:
            tactics = kernel.tactics(lambda rows: kernel.launch(one, attributes, inputs, outputs, rows))
        return [trtp.AutoTuneCombination(types, "LINEAR", tactics)]

    def compile(self, *arguments: Any) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]:
        """The kernel of the op's launch and how TensorRT launches it."""
        *arguments, tactic = arguments
        inputs, attributes, outputs = self._split(arguments)
        one = self._of(attributes)
        launched = kernel.launch(one, attributes, inputs, outputs, tactic or kernel.most_rows(one, inputs))
        return kernel.built(one, launched, self.target)

    def _split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any], Sequence[Any]]:
        """TensorRT's positional arguments: inputs, attributes by name, outputs."""
        n, names = len(self.signature.inputs), [name for name, _ in self.signature.attributes]
        return arguments[:n], dict(zip(names, arguments[n:-1], strict=True)), arguments[-1]

    def _of(self, attributes: Mapping[str, Any]) -> Signature:
        """The signature with what its tensors have to be for the layout among the attributes."""
        found = signature(self.signature.plugin, Layout.parse(attributes["layout"]), self.given)
        if found != self.signature:
            raise ValueError(
                f"layout: expected one with the tensors that {self.plugin_id} has, {list(self.signature.inputs)}, "
                f"got {list(found.inputs)}"
            )
        return found

    def _check(self, attributes: Mapping[str, Any], layers: int | None) -> None:
        """The op's numbers are in range."""
        T_max = Layout.parse(attributes["layout"]).T_max
        for name, least, most in (("T", 1, T_max), ("layer", 0, None if layers is None else layers - 1)):
            value = attributes.get(name, least)
            if value < least or (most is not None and value > most):
                raise ValueError(f"{name}: expected {least} ... {'L - 1' if most is None else most}, got {value}")


def _signed(function: Callable[..., Any], parameters: dict[str, Any], returns: Any) -> Callable[..., Any]:
    """The function, with a signature for TensorRT to read."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    called = partial(function)
    called.__signature__ = inspect.Signature(listed, return_annotation=returns)  # type: ignore[attr-defined]
    return called
