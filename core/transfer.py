"""Requests as one unit: copied between slots, read to the host, taken in again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .cursor import Cursors
from .eager import scatter
from .layout import Buffers


@dataclass(frozen=True)
class Export:
    """Everything some requests are, on the host: the layout's spec and the tensors [L, B, ...] by name, cursors [B]."""

    spec: str
    tensors: dict[str, Tensor]


def copy(src: Tensor, dst: Tensor, buffers: Buffers, cursors: Cursors) -> None:
    """As ``ReplayState.copy``, but for ``pending``."""
    at = src.long().clamp(min=0)
    for one in (layer for buffer in buffers if buffer is not None for layer in buffer):
        scatter(one, dst, one[at])
    for name, one in cursors._asdict().items():
        if name != "pending":
            scatter(one, dst, one[at])


def export(slots: Tensor, buffers: Buffers, cursors: Cursors, spec: str) -> Export:
    """As ``ReplayState.export``."""
    at = slots.long()
    if bool((at < 0).any()):
        raise ValueError(f"slots: expected live slots, got {slots.tolist()}")
    tensors = {name: x[:, at].cpu() for name, x in buffers._asdict().items() if x is not None}
    return Export(spec, tensors | {f"cursor.{name}": x[at].cpu() for name, x in cursors._asdict().items()})


def import_(slots: Tensor, exported: Export, buffers: Buffers, cursors: Cursors, spec: str) -> None:
    """As ``ReplayState.import_``, but for ``pending``."""
    if exported.spec != spec:
        raise ValueError(f"exported: expected layout {spec}, got {exported.spec}")
    L, B = buffers.state.shape[0], slots.shape[0]
    if exported.tensors["state"].shape[:2] != (L, B):
        raise ValueError(f"exported: expected [{L}, {B}, ...], got {list(exported.tensors['state'].shape)}")
    for name, x in buffers._asdict().items():
        if x is not None:
            values = exported.tensors[name].to(x.device)
            for i in range(L):
                scatter(x[i], slots, values[i])
    for name, x in cursors._asdict().items():
        if name != "pending":
            scatter(x, slots, exported.tensors[f"cursor.{name}"].to(x.device))
