"""What each plugin takes and gives: the schema of the op that it stands for, for the tensors that a layout has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from replayssm import Layout, cursor
from replayssm.checks import INTEGERS, Wanted, step_tensors
from replayssm.cursor import PLAN_WIDTH
from replayssm.layout import Buffers

BUFFER = "buffer_"
OUT = "out"  # what an op writes in full: an output that is no input


@dataclass(frozen=True)
class Plugin:
    """One of torch.ops.replayssm as a TensorRT plugin.

    Attributes:
        op: its name there.
        out: the tensor that the op's own output is shaped like, or None where it has none.
        fixed: values of the op's arguments that are no attributes of the plugin.
        tuned: whether its launch has choices that TensorRT may time.
    """

    op: str
    out: str | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    tuned: bool = False


PLUGINS = {
    "plan": Plugin("plan", out="plan"),
    "flush": Plugin("flush"),
    "decode": Plugin("step", out="v", fixed={"T": 1}, tuned=True),
    "verify": Plugin("step", out="v", tuned=True),
    "commit": Plugin("commit"),
}


def schema(plugin: str) -> list[torch.Argument]:
    """The arguments of a plugin's op."""
    return getattr(torch.ops.replayssm, PLUGINS[plugin].op).default._schema.arguments


# The state: what any of the plugins writes. Each gives back all of it that it takes, as aliases, written or not: so a tensor of
# the state passes through the network's plugins in one chain, and whatever reads it does so before the next one writes.
STATE = {a.name for plugin in PLUGINS for a in schema(plugin) if a.alias_info is not None and a.alias_info.is_write} - {OUT}


@dataclass(frozen=True)
class Signature:
    """Names of a plugin's tensors and types of its attributes, in order.

    Attributes:
        arguments: of the op, in its schema's order: names of ``inputs``, ``outputs``, ``attributes``, fixed and absent ones.
        outputs: the op's own, if it has one, then the inputs that are of the state.
        wanted: what each tensor has to be, which differs among layouts of one signature.
    """

    plugin: str
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, type], ...]
    wanted: Mapping[str, Wanted] = field(compare=False)

    def bind(self, tensors: Mapping[str, object], attributes: Mapping[str, object]) -> list[object]:
        """The op's arguments; absent tensors are None."""
        values = {"backend": "triton", **PLUGINS[self.plugin].fixed, **tensors, **attributes}
        return [values.get(name) for name in self.arguments]


def tensors(plugin: str, layout: Layout, given: Collection[str] = ()) -> dict[str, Wanted]:
    """Shape, dtypes and presence of every tensor that an op may name. Sizes: B rows, N packed tokens, L layers, S slots.

    Draft trees are left out: their commit takes one more launch.

    Args:
        given: which of those tensors are there that a caller may leave out.

    Raises:
        ValueError: ``given`` names a tensor that no op lets a caller choose, or that the layout's family does not take.
    """
    absent = Wanted((), (), False)
    every = {
        "parents": absent,
        "tree": absent,
        "slots": Wanted(("B",), INTEGERS, True),
        "t": Wanted(("B",), INTEGERS, None),
        "force": Wanted(("B",), INTEGERS, None),
        "cu_seqlens": Wanted(("B + 1",), INTEGERS, None),
        "accepted": Wanted(("B",), INTEGERS, None),
        "plan": Wanted(("B", PLAN_WIDTH), (torch.int32,), True),
        **step_tensors(layout, "N"),
        **{name: Wanted(("S",), (x.dtype,), True) for name, x in cursor.allocate(1, "meta")._asdict().items()},
    }
    for name in Buffers._fields:
        shape, dtype = layout.tensors.get(name, ((), torch.float32))
        every[BUFFER + name] = Wanted(("L", "S", *shape), (dtype,), name in layout.tensors and name != "conv")
    if plugin == "flush":  # of all layers, and only where folds need it
        every["A"] = Wanted(("L", layout.H), (torch.float32,), layout.recurrence.decay == "derived")
    optional = [name for name, one in every.items() if one.given is None]
    for name in given:
        if name not in optional:
            raise ValueError(f"given: expected some of {optional} for {layout.recurrence.name}, got {name!r}")
    return {name: one._replace(given=name in given) if one.given is None else one for name, one in every.items()}


@lru_cache(maxsize=256)
def signature(plugin: str, layout: Layout, given: tuple[str, ...] = ()) -> Signature:
    """The plugin's signature for a layout's tensors and the given ones."""
    one, wanted, arguments = PLUGINS[plugin], tensors(plugin, layout, given), schema(plugin)
    tensor = {a.name: "Tensor" in str(a.type) for a in arguments}
    inputs = tuple(name for name, is_tensor in tensor.items() if is_tensor and name != OUT and wanted[name].given)
    state = tuple(name for name in inputs if name in STATE)
    fixed, types = {"backend", *one.fixed}, {"int": int, "str": str, "bool": bool}
    attributes = tuple((a.name, types[str(a.type)]) for a in arguments if not tensor[a.name] and a.name not in fixed)
    if one.out is not None:
        wanted[OUT], state = wanted[one.out], (OUT, *state)
    return Signature(plugin, tuple(tensor), inputs, state, attributes, wanted)
