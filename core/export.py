"""Requests on the host: one self-describing unit, saved as safetensors, taken to another layout or tensor-parallel degree."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import eager
from .cursor import CARRIED, append_row
from .layout import STORED, Buffers, Conv, Layout, states

VERSION = 1
# Fields of Layout that say what a request is; the others say how its records are kept.
SAME = ("recurrence", "H", "G", "V", "K", "act", "conv", "seed")
GROUPED = ("k", "rnorm")  # tensors with one entry per key group; the others have one per value head


@dataclass(frozen=True)
class Export:
    """Everything some requests are, on the host. Each method returns a new one and writes nothing.

    Attributes:
        layout: of the tensors.
        tensors: [L, B, ...] by the names of Buffers, and the cursors [B] as ``cursor.<name>``.
    """

    layout: Layout
    tensors: dict[str, Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and requests."""
        L, B = self.tensors["state"].shape[:2]
        return L, B

    def check(self) -> None:
        """Raise ValueError unless the tensors are those of the layout and the cursors possible ones."""
        layout, cursors = self.layout, {f"cursor.{name}": dtype for name, dtype in CARRIED.items()}
        if self.tensors.keys() != layout.tensors.keys() | cursors.keys():
            raise ValueError(f"exported: expected {sorted([*layout.tensors, *cursors])}, got {sorted(self.tensors)}")
        if self.tensors["state"].dim() != 5:
            raise ValueError(f"exported: expected state [L, B, H, V, K], got {list(self.tensors['state'].shape)}")
        L, B = self.shape
        wanted = {name: ((L, B, *shape), dtype) for name, (shape, dtype) in layout.tensors.items()}
        wanted |= {name: ((B,), dtype) for name, dtype in cursors.items()}
        for name, (shape, dtype) in wanted.items():
            x = self.tensors[name]
            if tuple(x.shape) != shape or x.dtype != dtype:
                raise ValueError(f"exported: expected {name} {list(shape)} {dtype}, got {list(x.shape)} {x.dtype}")
        for name, most in (("start", layout.R - 1), ("count", layout.W)):
            x = self.tensors[f"cursor.{name}"]
            if bool(((x < 0) | (x > most)).any()):
                raise ValueError(f"exported: expected {name} 0 ... {most}, got {x.tolist()}")

    # ---- files ---------------------------------------------------------------------------------------------------------

    def to_bytes(self, model: str = "") -> bytes:
        """One safetensors file: the tensors, and in its header version, layout, model and a checksum.

        Args:
            model: whose states these are; reading asks for the same.

        Raises:
            ModuleNotFoundError: safetensors is not installed.
        """
        tensors = {name: x.contiguous() for name, x in self.tensors.items()}
        about = {"layout": self.layout.spec, "model": model}
        header = {"replayssm": str(VERSION), **about, "crc32": str(_checksum(tensors, about))}
        return _safetensors().save(tensors, header)

    @staticmethod
    def from_bytes(data: bytes, model: str = "") -> Export:
        """What ``to_bytes`` wrote. ValueError where it is foreign, cut short, damaged, of another version or model."""
        library = _safetensors()
        try:
            tensors = library.load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        except Exception as error:  # the library's own class, and whatever torch makes of a dtype it lacks
            raise ValueError(f"exported: expected a safetensors file, got {len(data)} bytes: {error}") from None
        if "replayssm" not in header:
            raise ValueError(f"exported: expected a header with 'replayssm', got {sorted(header)}: another program's file")
        if header["replayssm"] != str(VERSION):
            raise ValueError(f"exported: expected version {VERSION}, got {header['replayssm']}")
        about = {name: header.get(name) for name in ("layout", "model")}
        if header.get("crc32") != str(_checksum(tensors, about)):
            raise ValueError(f"exported: expected checksum {header.get('crc32')}, got another: the file is damaged")
        if about["model"] != model:
            raise ValueError(f"exported: expected model {model!r}, got {about['model']!r}")
        found = Export(Layout.parse(about["layout"]), tensors)
        found.check()
        return found

    def save(self, path: str | os.PathLike[str], model: str = "") -> None:
        """``to_bytes`` in a file, which at every moment is the old one or the new one, whole."""
        path = Path(path)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.to_bytes(model))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

    @staticmethod
    def load(path: str | os.PathLike[str], model: str = "") -> Export:
        """What ``save`` wrote; errors as of ``from_bytes``."""
        return Export.from_bytes(Path(path).read_bytes(), model)

    # ---- other layouts -------------------------------------------------------------------------------------------------

    def to(self, layout: Layout) -> Export:
        """The same requests in another layout: other W, T_max, R, order, dtype of u; from fp32 checkpoints also other formats.

        Formats are encoded as by ``ReplayState.load``. Strides need nothing: exported tensors have none of their own.

        Raises:
            ValueError: another recurrence, size, activation dtype, convolution or seed, or more live records than W.
            NotImplementedError: another format, and the checkpoint is rounded already.
        """
        if layout == self.layout:
            return self
        for name in SAME:
            ours, theirs = getattr(self.layout, name), getattr(layout, name)
            if ours != theirs:
                hint = "; shard or merge first" if name in ("H", "G", "conv") else ""
                raise ValueError(f"exported: expected layout.{name} {theirs}, got {ours}{hint}")
        count = self.tensors["cursor.count"]
        if bool((count > layout.W).any()):
            raise ValueError(
                f"exported: expected at most W = {layout.W} live records, got {count.tolist()}; fold slots before their export"
            )
        cursors = {name: x for name, x in self.tensors.items() if name.startswith("cursor.")}
        return Export(layout, self._encoded(layout) | cursors | self._rings(layout))

    def _rings(self, layout: Layout) -> dict[str, Tensor]:
        """Ring tensors with R rows of the other layout: live records from row 0 on, the convolution's inputs before them."""
        found = {name: self.tensors[name] for name in layout.tensors if name not in STORED}
        if "u" in found and layout.u is not None and layout.u != self.layout.u:
            most = torch.finfo(layout.u).max
            found["u"] = found["u"].clamp(-most, most).to(layout.u)
        if layout.R == self.layout.R:
            return found
        B, start, count = self.shape[1], self.tensors["cursor.start"].long(), self.tensors["cursor.count"]
        i = torch.arange(1 - layout.conv.width if layout.conv else 0, min(layout.W, self.layout.W))
        row, live = append_row(start[:, None], i, self.layout.R), i < count[:, None]
        for name, x in found.items():
            records = x.movedim(3, 2)[:, torch.arange(B)[:, None], row]  # [L, B, i, heads, ...]
            new = x.new_zeros(*x.shape[:3], layout.R, *x.shape[4:])
            new.movedim(3, 2)[:, :, i % layout.R] = records.masked_fill(~live.view(*live.shape, *[1] * (x.dim() - 3)), 0)
            found[name] = new
        return found | {"cursor.start": torch.zeros_like(self.tensors["cursor.start"])}

    def without_dead_rows(self) -> Export:
        """Zeros in every ring row that is neither a live record nor an input of the convolution before the first of them."""
        start, count = (self.tensors[f"cursor.{name}"][:, None] for name in ("start", "count"))
        i = (torch.arange(self.layout.R) - start) % self.layout.R
        live, rings = i < count, {name: x for name, x in self.tensors.items() if name in Buffers._fields and name not in STORED}
        for name, x in rings.items():
            back = self.layout.conv.width - 1 if self.layout.conv and name == "conv" else 0
            kept = live | (i >= self.layout.R - back)
            rings[name] = x.masked_fill(~kept.view(kept.shape[0], 1, kept.shape[1], *[1] * (x.dim() - 4)), 0)
        return Export(self.layout, self.tensors | rings)

    def _encoded(self, layout: Layout) -> dict[str, Tensor]:
        """Checkpoints and read copies in the other layout's formats."""
        if (layout.state, layout.read) == (self.layout.state, self.layout.read):
            return {name: self.tensors[name] for name in layout.tensors if name in STORED}
        if self.layout.state != "fp32":
            raise NotImplementedError(
                f"exported: expected state {layout.state!r}, read {layout.read!r}, got {self.layout.state!r}, "
                f"{self.layout.read!r}; supported from fp32 alone: what is rounded once must not be rounded again"
            )
        (L, B), key = self.shape, self.tensors["cursor.key"]
        target, rows = layout.allocate(L, B, "cpu"), torch.arange(B)
        eager.materialize(states(self.tensors["state"]), rows, None, None, target, rows, key, None, 0, layout)
        return {name: x for name, x in target._asdict().items() if x is not None and name in STORED}

    # ---- tensor parallelism --------------------------------------------------------------------------------------------

    def shard(self, parts: int, conv: str = "") -> list[Export]:
        """The requests as that many ranks hold them: equal runs of value heads, each with the key groups that they belong to.

        With more parts than groups a group stands in several parts. Rounding draws depend on a rank's own elements, so a
        sharded request's later draws are others.

        Args:
            conv: the order of the convolution's channels as letters of their tensors, "qkv" or "vkq", where the layout has one.
        """
        H, G = self.layout.H, self.layout.G
        if parts < 1 or H % parts or (G % parts and parts % G):
            raise ValueError(f"parts: expected a divisor of H = {H} that divides or is divided by G = {G}, got {parts}")
        sections = _sections(self.layout, conv)
        layout = _resized(self.layout, H // parts, max(1, G // parts), conv)

        def cut(name: str, x: Tensor, part: int) -> Tensor:
            if name.startswith("cursor."):
                return x
            if name != "conv":
                heads, whole = (layout.G, G) if name in GROUPED else (layout.H, H)
                return x.narrow(2, part * whole // parts, heads)
            pieces = x.split([size for _, size in sections], -1)
            sizes = [size for _, size in _sections(layout, conv)]
            wholes = [G if grouped else H for grouped, _ in sections]
            return torch.cat(
                [
                    piece.narrow(-1, part * n // parts * (piece.shape[-1] // n), size)
                    for piece, size, n in zip(pieces, sizes, wholes, strict=True)
                ],
                -1,
            )

        return [Export(layout, {name: cut(name, x, part) for name, x in self.tensors.items()}) for part in range(parts)]

    @staticmethod
    def merge(parts: list[Export], G: int = 0, conv: str = "") -> Export:
        """The whole of what ``shard`` gives, or of the exports of all ranks, in their order.

        Args:
            G: key groups of the whole; default: all that the parts hold, none of them in two parts.
            conv: as in ``shard``.

        Raises:
            ValueError: parts of different layouts, requests or cursors, or copies of a group that differ.
        """
        if not parts:
            raise ValueError("parts: expected at least one, got none")
        first, n = parts[0], len(parts)
        for i, part in enumerate(parts):
            if part.layout != first.layout or part.shape != first.shape:
                raise ValueError(
                    f"parts: expected {first.layout.spec} {first.shape}, got {part.layout.spec} {part.shape} at {i}"
                )
            for name in CARRIED:
                mine, theirs = (one.tensors[f"cursor.{name}"] for one in (first, part))
                if not torch.equal(mine, theirs):
                    raise ValueError(f"parts: expected {name} {mine.tolist()} of all ranks, got {theirs.tolist()} at {i}")
        G = G or n * first.layout.G
        copies = n * first.layout.G // G
        if copies * G != n * first.layout.G:
            raise ValueError(f"G: expected a divisor of {n * first.layout.G}, got {G}")
        layout = _resized(first.layout, n * first.layout.H, G, conv)

        def joined(name: str, pieces: list[Tensor], grouped: bool, dim: int) -> Tensor:
            if not grouped:
                return torch.cat(pieces, dim)
            for i, x in enumerate(pieces):
                if not torch.equal(x, pieces[i - i % copies]):
                    raise ValueError(f"parts: expected equal {name} of {copies} ranks that share a group, got another at {i}")
            return torch.cat(pieces[::copies], dim)

        def whole(name: str) -> Tensor:
            pieces = [part.tensors[name] for part in parts]
            if name.startswith("cursor."):
                return pieces[0]
            if name != "conv":
                return joined(name, pieces, name in GROUPED, 2)
            sections = _sections(first.layout, conv)
            split = [x.split([size for _, size in sections], -1) for x in pieces]
            every = [(grouped, [x[i] for x in split]) for i, (grouped, _) in enumerate(sections)]
            return torch.cat([joined(name, x, grouped, -1) for grouped, x in every], -1)

        return Export(layout, {name: whole(name) for name in first.tensors})


def _sections(layout: Layout, conv: str) -> list[tuple[bool, int]]:
    """Per run of the convolution's channels: whether it follows key groups, and how many channels it has."""
    sizes = {"q": layout.G * layout.K, "k": layout.G * layout.K, "v": layout.H * layout.V}
    found = [(one != "v", sizes[one]) for one in conv if one in sizes]
    channels = layout.conv.channels if layout.conv else 0
    if sum(size for _, size in found) != channels or len(found) != len(conv):
        raise ValueError(f"conv: expected letters of {sizes} channels that fill {channels}, got {conv!r}")
    return found


def _resized(layout: Layout, H: int, G: int, conv: str) -> Layout:
    """The layout of another number of heads."""
    if layout.conv is None:
        return dataclasses.replace(layout, H=H, G=G)
    channels = sum(H * layout.V if one == "v" else G * layout.K for one in conv)
    return dataclasses.replace(layout, H=H, G=G, conv=Conv(channels, layout.conv.width))


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> int:
    """CRC-32 of every tensor's bytes, names and what the header says of them."""
    total = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, total)
    return total


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing.name} is not installed, which files of exports need; pip install 'replayssm[export]'", name=missing.name
        ) from None
    return safetensors.torch
