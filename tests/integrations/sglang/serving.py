"""Requests answered by SGLang on the CPU, each time in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replayssm.bench.sglang.requests import Answer, Request

from .alone import alone


@dataclass
class Seen:
    """What befell a request.

    Attributes:
        slots: the engine's slots of recurrent state that it held.
        batches: kinds of forward passes that it took part in, as SGLang calls them.
        folds: how many windows ReplaySSM folded for it, at least; 0 without.
    """

    slots: set[int] = field(default_factory=set)
    batches: set[str] = field(default_factory=set)
    folds: int = 0


def serve(folder: Path, requests: Sequence[Request], *options: str, plugin: bool = False) -> tuple[list[Answer], list[Seen]]:
    """The requests' answers from SGLang's own scheduler with a model's folder and command-line options.

    Args:
        plugin: whether SGLang finds the installed plugin; without it, what runs is SGLang alone.
    """
    found = alone(_serve, folder, requests, options, plugins="replayssm" if plugin else "none")
    return [answer for answer, _ in found], [seen for _, seen in found]


def _serve(folder: Path, requests: Sequence[Request], options: Sequence[str]) -> list[tuple[Answer, Seen]]:
    from . import cpu

    return cpu.serve(folder, requests, options)
