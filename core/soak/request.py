"""Requests of the miniature engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..export import Export


@dataclass(eq=False)
class Request:
    """A request: its row of the truth, where it lives, and how many tokens are to come."""

    number: int
    worker: int
    slot: int
    key: int
    position: int
    prompt: int
    answer: int
    spoiled: bool = False


@dataclass
class Parked:
    """Preempted requests in host memory."""

    worker: int
    requests: list[Request]
    exported: Export | bytes
