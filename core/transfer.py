"""Requests as one unit: copied between slots, read to the host, taken in again."""

from __future__ import annotations

from torch import Tensor

from .cursor import CARRIED, Cursors
from .eager import scatter
from .export import Export
from .layout import Buffers, Layout


def copy(src: Tensor, dst: Tensor, buffers: Buffers, cursors: Cursors) -> None:
    """As ``ReplayState.copy``, but for ``pending``."""
    at = src.long().clamp(min=0)
    for one in (layer for buffer in buffers if buffer is not None for layer in buffer):
        scatter(one, dst, one[at])
    for name in CARRIED:
        one = getattr(cursors, name)
        scatter(one, dst, one[at])


def export(slots: Tensor, buffers: Buffers, cursors: Cursors, layout: Layout) -> Export:
    """As ``ReplayState.export``."""
    at = slots.long()
    if bool((at < 0).any()):
        raise ValueError(f"slots: expected live slots, got {slots.tolist()}")
    tensors = {name: x[:, at].cpu() for name, x in buffers._asdict().items() if x is not None}
    tensors |= {f"cursor.{name}": getattr(cursors, name)[at].cpu() for name in CARRIED}
    return Export(layout, tensors).without_dead_rows()


def import_(slots: Tensor, exported: Export, buffers: Buffers, cursors: Cursors, layout: Layout) -> None:
    """As ``ReplayState.import_``, but for ``pending``."""
    exported.check()
    exported, (L, B) = exported.to(layout), (buffers.state.shape[0], slots.shape[0])
    if exported.shape != (L, B):
        raise ValueError(f"exported: expected [{L}, {B}, ...], got {list(exported.tensors['state'].shape)}")
    for name, x in buffers._asdict().items():
        if x is not None:
            values = exported.tensors[name].to(x.device)
            for one, value in zip(x, values, strict=True):
                scatter(one, slots, value)
    for name in CARRIED:
        x = getattr(cursors, name)
        scatter(x, slots, exported.tensors[f"cursor.{name}"].to(x.device))
