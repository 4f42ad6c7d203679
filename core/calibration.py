"""Measured steps as a rule for others: how long a step takes whose bytes alone would take so long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .models import MODELS, Model

STEPS = ("decode", "verify")  # the results files whose rows are steps
# Recurrences that the same kernels serve at the same cost as a measured one.
MEASURED_AS = {"kda_safe": "kda"}


@dataclass(frozen=True)
class Point:
    """One measured step: microseconds per layer, and what its bytes take at the read ceiling."""

    family: str
    layer: str
    replay: bool
    batch: int
    tokens: int
    window: int
    state: str
    read: str | None
    floor_us: float
    us: float


@dataclass(frozen=True)
class Curve:
    """Points of one layer, kind of step and format, by ascending floor.

    Attributes:
        same: whether kind of step and format are what was asked for.
        small: the family's steps of one token, whose times fall alike below the first point; None: this curve is of those.
    """

    points: tuple[Point, ...]
    same: bool
    small: Curve | None = None

    def reaches(self, floor_us: float) -> bool:
        """Whether batches as small as of this floor were measured; there is none below one request."""
        first = self.points[0]
        return floor_us >= first.floor_us * (1 - 1e-9) or first.batch == 1

    def us(self, floor_us: float) -> float:
        """Time of a step of this floor: between points by their logarithms, beyond the last by its share of the floor.

        Below the first point it falls as ``small`` does, to the time of one request, which launches and dependent steps make
        and not bytes; without ``small`` it is the first point's.
        """
        first, last = self.points[0], self.points[-1]
        if floor_us <= first.floor_us:
            return first.us * self.small.us(floor_us) / self.small.us(first.floor_us) if self.small else first.us
        for low, high in zip(self.points, self.points[1:], strict=False):
            if floor_us <= high.floor_us:
                at = math.log(floor_us / low.floor_us) / math.log(high.floor_us / low.floor_us)
                return low.us * (high.us / low.us) ** at
        return floor_us * last.us / last.floor_us


@dataclass(frozen=True)
class Calibration:
    """Committed results of one device.

    Attributes:
        device, date, commit: where and when they were measured.
        ceiling: bytes per second that it reads.
    """

    device: str
    date: str
    commit: str
    ceiling: float
    points: tuple[Point, ...]

    @staticmethod
    def of(results: Mapping[str, Mapping[str, Any]], replays: Callable[[str], bool]) -> Calibration:
        """From results files ``{"header": ..., "rows": ...}`` by name; `replays` tells replaying peers by their names."""
        every = [results[name] for name in STEPS if name in results]
        if not every:
            raise ValueError("results: expected those of `replayssm bench decode`, got none")
        head = every[0]["header"]
        points = [point for result in every for row in result["rows"] for point in _points(row, head["read_ceiling"], replays)]
        return Calibration(head["device"], head["date"], head.get("commit", "unknown"), head["read_ceiling"], tuple(points))

    def curve(self, model: Model, replay: bool, tokens: int, state: str, read: str | None, window: int) -> Curve | None:
        """The measured steps nearest to one of this model: of its family, as many tokens, its formats, its state's size, and
        for each batch the nearest window's."""
        family = MEASURED_AS.get(model.recurrence.name, model.recurrence.name)
        points = [point for point in self.points if (point.family, point.replay) == (family, replay)]
        if not points:
            return None

        def distance(point: Point) -> tuple[float, ...]:
            size = math.log(MODELS[point.layer].layout().state_bytes / model.layout().state_bytes)
            return abs(math.log(point.tokens / tokens)), (point.state, point.read) != (state, read), abs(size)

        least = min(map(distance, points))
        nearest: dict[int, Point] = {}
        for point in sorted(points, key=lambda point: abs(math.log(point.window / window)), reverse=True):
            if distance(point) == least:
                nearest[point.batch] = point
        plain = (tokens, state, read) == (1, "fp32", None)
        small = None if plain else self.curve(model, replay, 1, "fp32", None, window)
        return Curve(tuple(sorted(nearest.values(), key=lambda point: point.floor_us)), not any(least[:2]), small)


def _points(row: Mapping[str, Any], ceiling: float, replays: Callable[[str], bool]) -> Iterable[Point]:
    """A row's own step, and the fastest conventional one beside it."""
    if row["T"] == 1 and "one_step_us" in row:
        return  # verify repeats decode's steps, at other windows
    step = (row["batch"], row["T"], row["W"])
    yield Point(row["family"], row["layer"], True, *step, row["state"], row["read"], row["floor_us"], row["us"])
    conventional = [us for name, us in row.get("peers", {}).items() if not replays(name)]
    if conventional and row["layer"] in MODELS:
        layout = MODELS[row["layer"]].layout()  # peers hold fp32 states beside every format of ours
        traffic = layout.step_bytes(row["T"])
        floor = row["batch"] * (traffic.conventional.total + traffic.io.total) / ceiling * 1e6
        yield Point(row["family"], row["layer"], False, *step, layout.state, None, floor, min(conventional))
