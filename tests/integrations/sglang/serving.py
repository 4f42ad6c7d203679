"""What a run of SGLang takes and gives; ``cpu.serve`` does it, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .alone import alone


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens to generate, and the scheduler's iteration that finds it in the queue."""

    prompt: Sequence[int]
    tokens: int
    at: int = 0


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        tokens: as generated.
        likeliest: per token the largest log-probabilities, in descending order.
        cached: tokens of the prompt that the prefix cache had.
        retracted: how often it was put back into the queue.
        slots: the engine's slots of recurrent state that it held.
        folds: how many windows ReplaySSM folded for it, at least; 0 without.
    """

    tokens: list[int] = field(default_factory=list)
    likeliest: list[list[float]] = field(default_factory=list)
    cached: int = 0
    retracted: int = 0
    slots: set[int] = field(default_factory=set)
    folds: int = 0


def serve(folder: Path, requests: Sequence[Request], *options: str, plugin: bool = False) -> list[Answer]:
    """The requests' answers from SGLang's own scheduler with a model's folder and command-line options.

    Args:
        plugin: whether SGLang finds the installed plugin; without it, what runs is SGLang alone.
    """
    return alone(_serve, folder, requests, options, plugins="replayssm" if plugin else "none")


def _serve(folder: Path, requests: Sequence[Request], options: Sequence[str]) -> list[Answer]:
    from . import cpu

    return cpu.serve(folder, requests, options)
