"""What a model's decode steps cost on a GPU, with states written every step and with ReplaySSM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .calibration import Calibration, Curve
from .devices import GPU, GPUS
from .layout import Layout
from .models import Model
from .schedule import best_window


@dataclass(frozen=True)
class Cost:
    """One step of the whole batch, all layers of a kind, one GPU.

    Attributes:
        bytes: read and written.
        us: expected time.
        share: of what these bytes take at the read ceiling.
        measured: whether such steps were measured on this GPU.
    """

    bytes: float
    us: float
    share: float
    measured: bool


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Attributes:
        name: "conventional", "conventional, speculating" or "replay".
        tokens, kept: of a request and step; what stays of them on average.
        recurrent: cost of the recurrent layers.
        step_us: recurrent and attention layers, and what the caller says of the rest.
        tokens_per_second: of the whole batch.
        state, conv, kv: bytes that one request holds, on each GPU: states and rings, convolution windows, keys and values.
        fits: requests that fit beside the weights; None where the weights are unknown.
    """

    name: str
    tokens: int
    kept: float
    recurrent: Cost
    step_us: float
    tokens_per_second: float
    state: float
    conv: float
    kv: float
    fits: int | None

    @property
    def memory(self) -> float:
        """Bytes that one request holds."""
        return self.state + self.conv + self.kv


@dataclass(frozen=True)
class Estimate:
    """What ``estimate`` found.

    Attributes:
        window, best_window: in use, and of least bytes.
        attention: cost of the attention layers, the same for every way.
        ways: replay last.
        faster: per other way, how many times its time per token replay's is: of the recurrent layers, of the step.
        takes_over: per way, the context from which on the attention layers take longer than the recurrent ones; None: none.
        basis: what the figures rest on, a sentence each.
    """

    window: int
    best_window: int
    context: int
    attention: Cost
    ways: tuple[Way, ...]
    faster: dict[str, dict[str, float]]
    takes_over: dict[str, float | None]
    basis: tuple[str, ...]


@dataclass(frozen=True)
class Deployment:
    """What is to be estimated; the model is the whole one, everything else is of one GPU.

    Attributes:
        batch, context: requests of a step, and tokens that each has behind it.
        tokens, acceptance: of a request and step, and the probability that one after the first stays.
        window: records that a ring holds; None: the best one.
        formats: of the state, as Layout takes them.
        ranks: tensor parallelism.
        kv_bytes: of a cached element of the attention layers.
        other_us: rest of a step: weights, experts, convolution, communication.
        utilization: part of the memory that weights and requests may take.
    """

    model: Model
    gpu: GPU
    batch: int
    context: int
    tokens: int = 1
    acceptance: float = 1.0
    window: int | None = None
    formats: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    kv_bytes: float = 2.0
    other_us: float = 0.0
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected >= 1, got {getattr(self, name)}")
        for name in ("context", "other_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected >= 0, got {getattr(self, name)}")
        for name in ("acceptance", "utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected above 0, at most 1, got {getattr(self, name)}")


def estimate(of: Deployment, calibration: Calibration) -> Estimate:
    """Bytes and time of a step, memory of a request and how many fit, for every way of decoding.

    Raises:
        ValueError, NotImplementedError: a deployment that cannot be, by name.
    """
    return _Estimator(of, calibration).estimate()


class _Estimator:
    def __init__(self, of: Deployment, calibration: Calibration) -> None:
        self.of, self.calibration, self.part = of, calibration, of.model.shard(of.ranks)
        self.conv = self.part.conv
        # The window needs room for the step's tokens whatever it will be.
        least = self._layout(of.tokens)
        self.best = best_window(least, tokens=of.tokens, acceptance=of.acceptance)
        self.layout = self._layout(self.best if of.window is None else of.window)
        measured = next(gpu for gpu in GPUS.values() if gpu.device == calibration.device)
        self.ceiling = calibration.ceiling * of.gpu.bandwidth / measured.bandwidth
        kv = of.batch * self.part.attention.read(of.context) * of.kv_bytes
        self.attention = Cost(kv, kv / self.ceiling * 1e6, 1.0, False)

    def _layout(self, W: int) -> Layout:
        return self.part.layout(W=W, T_max=self.of.tokens, conv=self.conv, **self.of.formats)

    def estimate(self) -> Estimate:
        of = self.of
        speculating = [self.way("conventional, speculating", of.tokens, False)] if of.tokens > 1 else []
        others = [self.way("conventional", 1, False), *speculating]
        replay = self.way("replay", of.tokens, True)
        return Estimate(
            window=self.layout.W,
            best_window=self.best,
            context=of.context,
            attention=self.attention,
            ways=(*others, replay),
            faster={way.name: _faster(replay, way) for way in others},
            takes_over={way.name: self.takes_over(way) for way in (*others, replay)},
            basis=tuple(self.basis()),
        )

    def way(self, name: str, tokens: int, replay: bool) -> Way:
        of = self.of
        recurrent = self.cost(tokens, replay)
        step = recurrent.us + self.attention.us + of.other_us
        kept = sum(of.acceptance**n for n in range(tokens))
        state, conv = (of.model.layers * held for held in self.held(tokens, replay))
        kv = self.part.attention.cached(of.context) * of.kv_bytes
        fits = None
        if self.part.weights is not None:
            fits = max(0, int((of.gpu.memory * of.utilization - self.part.weights) // (state + conv + kv)))
        return Way(name, tokens, kept, recurrent, step, of.batch * kept / step * 1e6, state, conv, kv, fits)

    def cost(self, tokens: int, replay: bool) -> Cost:
        """All recurrent layers: the byte floor over the share that such steps were measured to reach."""
        one, floor = self.floor(tokens, replay)
        curve = self.curve(tokens, replay)
        used = curve or self.curve(tokens, not replay)
        us = used.us(floor) if used else floor
        here = self.of.gpu.device == self.calibration.device
        measured = curve is not None and curve.same and curve.reaches(floor) and here
        layers = self.of.model.layers
        return Cost(one * layers, us * layers, floor / us, measured)

    def floor(self, tokens: int, replay: bool) -> tuple[float, float]:
        """Bytes of one layer's step, and the microseconds that they take at the read ceiling."""
        traffic = self.layout.step_bytes(tokens, self.of.acceptance)
        one = self.of.batch * ((traffic.replay if replay else traffic.conventional).total + traffic.io.total)
        return one, one / self.ceiling * 1e6

    def curve(self, tokens: int, replay: bool) -> Curve | None:
        read = self.layout.read if replay else None  # only replay has a read copy
        return self.calibration.curve(self.part, replay, tokens, self.layout.state, read, self.layout.W)

    def held(self, tokens: int, replay: bool) -> tuple[int, int]:
        """Bytes of one request and layer: (states and ring, convolution window)."""
        # Where states are written, rejecting takes snapshots; a step of one token rejects nothing.
        state, both = (
            layout.slot_bytes if replay else layout.snapshot_bytes(tokens if tokens > 1 else 0)
            for layout in (dataclasses.replace(self.layout, conv=None), self.layout)
        )
        return state, both - state

    def takes_over(self, way: Way) -> float | None:
        of = self.of
        return self.part.attention.context(way.recurrent.us * self.ceiling / 1e6 / (of.batch * of.kv_bytes))

    def basis(self) -> Iterator[str]:
        of, measured = self.of, self.calibration
        yield (
            f"Times: bytes of the byte model over the share of the read ceiling that was measured on {measured.device}, "
            f"{measured.date}, commit {measured.commit[:12]}, read ceiling {measured.ceiling / 1e12:.2f} TB/s."
        )
        if of.gpu.device != measured.device:
            yield f"{of.gpu.device}: not measured; the read ceiling is scaled by the datasheets' bandwidths."
        steps = [("Replay", of.tokens, True), *(("Conventional", tokens, False) for tokens in sorted({1, of.tokens}))]
        for name, tokens, replay in steps:
            source = _source(self.curve(tokens, replay), self.floor(tokens, replay)[1])
            yield f"{name} steps of {tokens} token{'s' * (tokens > 1)}: {source}."
        yield "Keys and values: read once a step, at the read ceiling; not measured."
        yield "Not counted: weights, experts, convolution, communication, host (--other-us adds them)."
        if of.model.note:
            yield f"Model: {of.model.note}."


def _source(curve: Curve | None, floor_us: float) -> str:
    if curve is None:
        return "not measured for this family; they are taken to reach the other way's share"
    at = curve.points[0]
    read, asked = f", read {at.read}" if at.read else "", "" if curve.same else "; not measured as asked"
    small = ""
    if not curve.reaches(floor_us):
        rule = "they are taken to fall as steps of one token do" if curve.small else "they are taken to take as long"
        small = f"; not measured below {at.batch} requests, where {rule}"
    return f"from {at.layer}, T = {at.tokens}, state {at.state}{read}{asked}{small}"


def _faster(replay: Way, other: Way) -> dict[str, float]:
    """How many times replay's time per kept token the other way takes."""
    recurrent = (other.recurrent.us / other.kept) / (replay.recurrent.us / replay.kept)
    return {"recurrent": recurrent, "step": replay.tokens_per_second / other.tokens_per_second}
