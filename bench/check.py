"""Who computes what is measured: every contestant's outputs against the fp64 oracle, before any clock runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm import Layout
from replayssm.formats import base

from .contest import Absent, Contestant, Ours, Plain, error

Found = dict[str, float | str]
# Most relative error of outputs: bf16, some from bf16 records, 4e-3 is usual; and by the format of what they are read from.
ERROR_BOUND = 1e-2
FORMAT_BOUND = {"int8": 3e-2, "e4m3": 0.1, "nvfp4": 0.3}
FACTOR = 2.0  # how many times the error of the same formats without kernels ours may be
ROWS = 8


def why(failed: Exception) -> str:
    """A one-line reason."""
    return " ".join(f"{'' if isinstance(failed, Absent) else type(failed).__name__ + ': '}{failed}".split())[:300]


def check(kinds: Sequence[type[Contestant]], layout: Layout, T: int = 1) -> Found:
    """Per contestant its outputs' relative error against the oracle, or why it has none.

    Raises:
        RuntimeError: ours is wrong.
    """
    found: Found = {}
    for kind in kinds:
        try:
            found[kind.name] = error(kind, layout, T, B=ROWS, candidate=kind.candidates[0])
        except Exception as failed:
            found[kind.name] = why(failed)
        torch.cuda.empty_cache()
    if Ours in kinds:
        ours, most = found[Ours.name], bound(layout, T)
        if isinstance(ours, str) or not ours < most:
            formats = f"state {layout.state}" + (f", read {layout.read}" if layout.read else "")
            raise RuntimeError(
                f"{layout.recurrence.name}, {formats}, T = {T}: our own outputs are off by {ours}, at most {most:.1e} is right"
            )
    return found


def bound(layout: Layout, T: int = 1) -> float:
    """Most relative error of our outputs: FACTOR times that of the same formats without kernels, at most the format's."""
    most = FORMAT_BOUND.get(base(layout.read or layout.state), ERROR_BOUND)
    return min(most, FACTOR * error(Plain, layout, T, B=ROWS))


def absentees(found: Found) -> dict[str, str]:
    """The contestants that are not measured, each with its reason."""
    wrong = {n: f"computes something else: outputs off by {e:.1e}" for n, e in found.items() if not isinstance(e, str)}
    return {n: e for n, e in found.items() if isinstance(e, str)} | {
        n: text
        for n, text in wrong.items()
        if not found[n] < ERROR_BOUND  # type: ignore[operator]
    }
