"""Requests answered by SGLang on the CPU, each time in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from replayssm.bench.sglang.requests import Answer, Request

from .alone import alone

__all__ = ["Answer", "Request", "serve"]


def serve(folder: Path, requests: Sequence[Request], *options: str, plugin: bool = False) -> list[Answer]:
    """The requests' answers from SGLang's own scheduler with a model's folder and command-line options.

    Args:
        plugin: whether SGLang finds the installed plugin; without it, what runs is SGLang alone.
    """
    return alone(_serve, folder, requests, options, plugins="replayssm" if plugin else "none")


def _serve(folder: Path, requests: Sequence[Request], options: Sequence[str]) -> list[Answer]:
    from . import cpu

    return cpu.serve(folder, requests, options)
