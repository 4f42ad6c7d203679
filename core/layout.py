"""Sizes, dtypes, strides and bytes of one layer's state: the only place that spells shapes.

Our own encoding is head-major (``[slot, head, row, dim]``); ``order="token"`` allocates ring rows token-major
(``[slot, row, head, dim]``). Views of an engine's tensors are adopted with whatever slot, head and row strides they have.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import formats
from .formats import Stored
from .recurrence import FAMILIES, Recurrence

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)


class Buffers(NamedTuple):
    """Every tensor of a request's state but the cursors; ``None`` where the family has none. All but the dim is strided.

    With layers in front, ``[L, S, ...]``, as ReplayState holds them, or ``[S, ...]`` for one layer.
    """

    state: Tensor  # [H, V, K]   the checkpoint, in its format
    state_scale: Tensor | None  # [H, V, K / block]
    state_row_scale: Tensor | None  # [H, V]
    read: Tensor | None  # [H, V, K]  the read copy, in its format: what readouts use instead of the checkpoint
    read_scale: Tensor | None  # [H, V, K / block]
    read_row_scale: Tensor | None  # [H, V]
    k: Tensor  # [G, R, K]       raw keys, activation dtype
    v: Tensor  # [H, R, V]       raw values, activation dtype
    beta: Tensor | None  # [H, R]      fp32
    g: Tensor | None  # [H, R, KG]     fp32; None where derived
    u: Tensor | None  # [H, R, V]      readout helper of the delta rule
    gsum: Tensor | None  # [H, R, KG]  readout helper: cumulative g of the window, each token's clamped at -20
    rnorm: Tensor | None  # [G, R]     readout helper: 1 / |k| of normalised keys
    conv: Tensor | None  # [1, R, C]   raw inputs of the causal convolution

    @property
    def checkpoint(self) -> Stored:
        """What the recurrence continues from."""
        return Stored(self.state, self.state_scale, self.state_row_scale)

    @property
    def copy(self) -> Stored | None:
        """The read copy, where there is one."""
        return None if self.read is None else Stored(self.read, self.read_scale, self.read_row_scale)

    def layer(self, layer: int) -> Buffers:
        """One layer's buffers [S, ...]."""
        return Buffers(*(None if x is None else x[layer] for x in self))  # type: ignore[arg-type]  # state, k, v always are


class Inputs(NamedTuple):
    """A step's packed tokens; absent ones are None. In kernels: pointers with their strides."""

    q: Tensor  # [N, G, K]
    k: Tensor  # [N, G, K]
    v: Tensor  # [N, H, V]
    b: Tensor | None  # [N, H]
    a: Tensor | None  # [N, H] or [N, H, K]
    z: Tensor | None  # [N, H, V]


class Weights(NamedTuple):
    """A layer's own parameters, contiguous; absent ones are None."""

    A: Tensor | None  # [H]
    dt_bias: Tensor | None  # [H] or [H, K]
    D: Tensor | None  # [H]


def states(tensor: Tensor) -> Buffers:
    """A caller's states [L, B, H, V, K] in the checkpoint's place, with nothing beside them."""
    return Buffers(tensor, *[None] * (len(Buffers._fields) - 1))  # type: ignore[arg-type]


# A state's stored tensors: written by folds and loads, contiguous within a head.
STORED = Buffers._fields[: Buffers._fields.index("k")]
SUFFIXES = (("values", ""), ("scale", "_scale"), ("row_scale", "_row_scale"))  # fields of formats.Stored
# What only a readout reads: noise in these must never reach a checkpoint.
HELPERS = ("u", "gsum", "rnorm")


@dataclass(frozen=True)
class Conv:
    """The causal convolution in front of the recurrence: its channels and its width (taps)."""

    channels: int
    width: int = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step for one request and layer."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Read and written."""
        return self.read + self.written

    def __mul__(self, times: float) -> Traffic:
        """That many times these bytes."""
        return Traffic(self.read * times, self.written * times)


@dataclass(frozen=True)
class StepBytes:
    """The byte model of a decode or verify step for one request and layer, as means over whole flush cycles.

    Attributes:
        io: the step's activations: q, k, v, gates, output. Both ways have them, neither figure below holds them.
        conventional: the state in and out, S + S; for T tokens S read and a snapshot S written per token.
        replay: read S_read + r_read * mean live records + r_fold per folded record; written r_new per token + S + read copy per
            flush. S_read is the read copy, or S without one. A flush reads S as well, for its fold.
    """

    io: Traffic
    conventional: Traffic
    replay: Traffic


@dataclass(frozen=True)
class Layout:
    """Shapes, dtypes and byte counts of one recurrent layer's state.

    Args:
        recurrence: the family's row, or its name.
        H, G: value heads and key groups of this rank; G divides H, head h belongs to group ``h // (H // G)``.
        V, K: dimensions of a head's state; multiples of 16, at most 256.
        W: window: most records between flushes.
        T_max: most tokens per row and step, ``1 <= T_max <= W``.
        R: ring rows, at least ``W + T_max`` (the default); with a convolution also ``W + width - 1``, so that a full
            window still has the inputs before its first record.
        state: name of the checkpoint's format: what the recurrence continues from (``replayssm.formats``).
        read: name of the format of a copy that readouts use instead, written with the checkpoint; None: they read that.
        act: dtype of q, k, v, z and outputs, and so of the ring's k and v.
        u: dtype of the delta rule's readout helper; None takes fp32 with fp32 activations and fp16, saturating, with 16-bit
            ones. It never reaches the recurrence; docs/precision.md has the measured output errors.
        conv: the causal convolution whose window the core keeps, or None where the engine keeps it.
        order: "head" or "token": which of head and row is outermost in allocated rings.
        stagger: whether a request's first window is shorter by a phase of its slot, so that requests admitted together do not
            fold together; off, a request's bits do not depend on its slot.
        seed: of stochastic rounding, below 2^32; random bits also depend on a request's key, its folds so far and the layer.

    Raises:
        ValueError: a size that cannot be; NotImplementedError: a valid one that is not supported.
    """

    recurrence: Recurrence
    H: int
    G: int
    V: int
    K: int
    W: int = 16
    T_max: int = 1
    R: int = 0
    state: str = "fp32"
    read: str | None = None
    act: torch.dtype = torch.bfloat16
    u: torch.dtype | None = None
    conv: Conv | None = None
    order: Literal["head", "token"] = "head"
    stagger: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.u is None:
            object.__setattr__(self, "u", torch.float32 if self.act == torch.float32 else torch.float16)
        if isinstance(self.recurrence, str):
            if self.recurrence not in FAMILIES:
                raise ValueError(f"recurrence: expected one of {sorted(FAMILIES)}, got {self.recurrence!r}")
            object.__setattr__(self, "recurrence", FAMILIES[self.recurrence])
        for name in ("H", "G", "V", "K", "W", "T_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected >= 1, got {getattr(self, name)}")
        if self.H % self.G:
            raise ValueError(f"G: expected a divisor of H = {self.H}, got {self.G}")
        for name in ("V", "K"):
            size = getattr(self, name)
            if size % 16 or size > 256:
                raise NotImplementedError(f"{name}: supported are multiples of 16 up to 256, got {size}")
        if self.T_max > 32:
            raise NotImplementedError(f"T_max: supported are 1 ... 32 tokens a row, got {self.T_max}")
        if self.T_max > self.W:
            raise ValueError(f"T_max: expected at most W = {self.W}, got {self.T_max}")
        least = self.W + max(self.T_max, self.conv.width - 1 if self.conv else 0)
        if self.R == 0:
            object.__setattr__(self, "R", least)
        if self.R < least:
            raise ValueError(
                f"R: expected at least {least} (W = {self.W}, T_max = {self.T_max}, conv = {self.conv}), got {self.R}"
            )
        self.format.check("state", self.K)
        if self.read_format is not None:
            self.read_format.check("read", self.K)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 0 ... 2^32 - 1, got {self.seed}")
        for name in ("act", "u"):
            if getattr(self, name) not in ACTIVATIONS:
                raise NotImplementedError(f"{name}: supported are {list(ACTIVATIONS)}, got {getattr(self, name)}")
        if self.order not in ("head", "token"):
            raise ValueError(f"order: expected 'head' or 'token', got {self.order!r}")

    @property
    def KG(self) -> int:
        """Width of g: 1, or K with per-channel decay."""
        return self.K if self.recurrence.per_channel else 1

    @property
    def phases(self) -> int:
        """How many lengths a first window can have."""
        return self.W if self.stagger else 1

    @property
    def format(self) -> formats.Format:
        """The checkpoint's format."""
        return formats.named(self.state)

    @property
    def read_format(self) -> formats.Format | None:
        """The read copy's format, where there is one."""
        return None if self.read is None else formats.named(self.read, "read")

    @property
    def packed(self) -> int:
        """Most values in one stored element: a kernel's chunk of K must divide K / packed."""
        return max(self.format.packed, self.read_format.packed if self.read_format else 1)

    @property
    def spec(self) -> str:
        """This layout as one line of JSON, which ``Layout.parse`` reads: what ops and exported states carry."""
        return _spec(self)

    @staticmethod
    def parse(spec: str) -> Layout:
        """The layout that a ``spec`` describes."""
        return _parse(spec)

    def with_window(self, W: int) -> Layout:
        """The same layer with another window and the ring that it needs."""
        return dataclasses.replace(self, W=W, R=0)

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Per tensor that this layout has: its shape for one slot and its dtype, in the order of Buffers."""
        row, H, G, R = self.recurrence, self.H, self.G, self.R
        assert self.u is not None
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {
            **self._stored("state", self.format),
            **(self._stored("read", self.read_format) if self.read_format else {}),
            "k": ((G, R, self.K), self.act),
            "v": ((H, R, self.V), self.act),
            "beta": ((H, R), torch.float32) if row.beta != "one" else None,
            "g": ((H, R, self.KG), torch.float32) if row.stores_g else None,
            "u": ((H, R, self.V), self.u) if row.delta else None,
            "gsum": ((H, R, self.KG), torch.float32) if row.stores_g else None,
            "rnorm": ((G, R), torch.float32) if row.normalize else None,
            "conv": ((1, R, self.conv.channels), self.act) if self.conv else None,
        }
        return {name: spec for name, spec in shapes.items() if spec is not None}

    def _stored(self, field: str, one: formats.Format) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Fields of Buffers that hold states of this format."""
        tensors = one.tensors(self.V, self.K)
        return {field + suffix: ((self.H, *tensors[part][0]), tensors[part][1]) for part, suffix in SUFFIXES if part in tensors}

    def allocate(self, layers: int, slots: int, device: torch.device | str, state: Tensor | None = None) -> Buffers:
        """Zeroed buffers [layers, slots, ...] of every tensor; ring rows token-major where ``order`` says so.

        ``state``: an engine's own checkpoints, taken as they are in place of new ones.
        """

        def one(name: str) -> Tensor | None:
            if name == "state" and state is not None:
                return state
            if name not in self.tensors:
                return None
            shape, dtype = self.tensors[name]
            if self.order == "head" or name in (*STORED, "conv"):
                return torch.zeros(layers, slots, *shape, dtype=dtype, device=device)
            heads, rows, *dim = shape
            return torch.zeros(layers, slots, rows, heads, *dim, dtype=dtype, device=device).transpose(2, 3)

        return Buffers(*(one(name) for name in Buffers._fields))  # type: ignore[arg-type]  # state, k, v always are

    def check(self, buffers: Buffers) -> None:
        """Raise ValueError unless buffers [L, S, ...] have this layout's shapes and dtypes and are contiguous in their dim."""
        if buffers.state.dim() != 5:
            raise ValueError(f"state: expected [L, S, H, V, K], got {list(buffers.state.shape)}")
        layers, slots = buffers.state.shape[:2]
        for name, tensor in buffers._asdict().items():
            if name not in self.tensors:
                if tensor is not None:
                    raise ValueError(f"{name}: expected None for {self.recurrence.name}, got {list(tensor.shape)}")
                continue
            shape, dtype = self.tensors[name]
            expected = [layers, slots, *shape]
            if tensor is None:
                raise ValueError(f"{name}: expected {expected} {dtype}, got None")
            if list(tensor.shape) != expected or tensor.dtype != dtype:
                raise ValueError(f"{name}: expected {expected} {dtype}, got {list(tensor.shape)} {tensor.dtype}")
            if tensor.device != buffers.state.device:
                raise ValueError(f"{name}: expected device {buffers.state.device}, got {tensor.device}")
            # [heads, R] has no inner dimension: its rows are strided as the others' are.
            contiguous = len(shape) < 3 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
            if not (tensor[0, 0, 0].is_contiguous() if name in STORED else contiguous):
                what = "[V, K]" if name in ("state", "read") else "heads" if name in STORED else "rows"
                raise ValueError(f"{name}: expected contiguous {what}, got strides {tensor.stride()}")

    # ---- bytes -----------------------------------------------------------------------------------------------------

    @cached_property
    def state_bytes(self) -> int:
        """S: bytes of one layer's checkpoint for one request."""
        return self.H * self.format.bytes(self.V, self.K)

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of one layer's read copy for one request."""
        return self.H * self.read_format.bytes(self.V, self.K) if self.read_format else 0

    def _record(self, *names: str) -> int:
        """Bytes of one ring row of these tensors."""
        total = 0
        for name in names:
            if name in self.tensors:
                (heads, _, *dim), dtype = self.tensors[name]
                total += heads * (dim[0] if dim else 1) * dtype.itemsize
        return total

    @cached_property
    def read_bytes(self) -> int:
        """r_read: bytes of one record that a readout reads."""
        return (
            self._record("k", "u", "gsum", "rnorm")
            if self.recurrence.delta
            else self._record("k", "v", "beta", "gsum", "rnorm")
        )

    @cached_property
    def fold_bytes(self) -> int:
        """r_fold: bytes of one record that a fold reads, the raw inputs alone."""
        return self._record("k", "v", "beta", "g")

    @cached_property
    def record_bytes(self) -> int:
        """r_new: bytes of one appended record."""
        return self._record("k", "v", "beta", "g", "u", "gsum", "rnorm")

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one request and layer: checkpoint, read copy, ring, convolution window."""
        return self.state_bytes + self.copy_bytes + self.R * (self.record_bytes + self._record("conv"))

    def snapshot_bytes(self, tokens: int | None = None) -> int:
        """Bytes of one request and layer where rollback is by snapshots: 1 + T states and width - 1 + T convolution inputs, T
        by default ``T_max``: the request's own state and one after every token of a verify step, whose windows overlap."""
        T = self.T_max if tokens is None else tokens
        inputs = self.conv.width - 1 + T if self.conv else 0
        return (1 + T) * self.state_bytes + inputs * self._record("conv")

    def fold_traffic(self, count: float, target: str | None = None) -> Traffic:
        """The byte model of folding `count` records of one request and layer: in place, where a flush also
        writes the read copy, or into a state of format `target`."""
        in_place = self.state_bytes + self.copy_bytes
        written = in_place if target is None else self.H * formats.named(target).bytes(self.V, self.K)
        return Traffic(read=self.state_bytes + self.fold_bytes * count, written=written)

    def step_bytes(self, tokens: int = 1, acceptance: float = 1.0, gated: bool = False) -> StepBytes:
        """The byte model of a step of `tokens` tokens, means over whole flush cycles.

        Args:
            acceptance: probability that a token after the first stays, given that all before it did.
            gated: whether the epilogue reads z.
        """
        row, size = self.recurrence, self.act.itemsize
        gate_inputs = self.H * ((row.beta != "one") + (self.KG if row.stores_g else 0))
        x_in = tokens * size * (2 * self.G * self.K + (1 + gated) * self.H * self.V + gate_inputs)
        S = self.state_bytes
        return StepBytes(
            io=Traffic(read=x_in, written=tokens * size * self.H * self.V),
            conventional=Traffic(read=S, written=tokens * S),
            replay=self.replay_bytes(1, tokens, *_cycle(self.W, tokens, acceptance)),
        )

    def replay_bytes(self, steps: float, tokens: float, live: float, folded: float, flushes: float) -> Traffic:
        """Bytes of steps that append `tokens` records, of which readouts find `live` records, flushes fold `folded`."""
        S = self.state_bytes
        read = steps * (self.copy_bytes or S) + flushes * S
        return Traffic(
            read=read + self.read_bytes * live + self.fold_bytes * folded,
            written=self.record_bytes * tokens + (S + self.copy_bytes) * flushes,
        )


@lru_cache(maxsize=1024)
def _cycle(W: int, tokens: int, acceptance: float) -> tuple[float, float, float]:
    """Means per step of the records that a readout finds, of those folded, and of flushes.

    A flush leaves the accepted tokens alone in the ring; then come steps until the next tokens would not fit.
    """
    accepted = [acceptance**n * (1 - acceptance) for n in range(tokens - 1)] + [acceptance ** (tokens - 1)]
    visits = [0.0] * (W + 1)  # of each count between two flushes
    for count in range(W + 1 - tokens):
        for n, chance in enumerate(accepted, start=1):
            visits[count + n] += chance * (visits[count] if count else 1.0)
    live, full = visits[: W + 1 - tokens], visits[W + 1 - tokens :]
    steps = sum(visits)
    records = sum(count * times for count, times in enumerate(live))
    folded = sum(count * times for count, times in enumerate(full, start=len(live)))
    return records / steps, folded / steps, 1 / steps


@lru_cache(maxsize=256)
def _spec(layout: Layout) -> str:
    fields = dataclasses.asdict(layout) | {name: str(getattr(layout, name)).removeprefix("torch.") for name in ("act", "u")}
    return json.dumps(fields, separators=(",", ":"))


@lru_cache(maxsize=256)
def _parse(spec: str) -> Layout:
    fields = json.loads(spec)
    fields |= {name: getattr(torch, fields[name]) for name in ("act", "u")}
    conv = fields["conv"]
    return Layout(**fields | {"recurrence": Recurrence(**fields["recurrence"]), "conv": conv and Conv(**conv)})
