"""Decode steps of one token a request, ours and the peers', on equal inputs: whole flush cycles in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from replayssm import Layout, launch
from replayssm.models import Model

from .contest import Absent, Contestant, Ours, best_candidate, error, timed
from .peers import DECODE
from .work import MODELS, Work, cold_groups

BATCHES = (256, 64, 16, 8, 4, 2, 1)
ERROR_BOUND = 1e-2  # bf16 outputs, some from bf16 records: 4e-3 is usual
STATE_BYTES = 24 * 2**30  # most that one contestant's states take; a model's further layers would not change a mean


def why(failed: Exception) -> str:
    """A one-line reason."""
    return " ".join(f"{'' if isinstance(failed, Absent) else type(failed).__name__ + ': '}{failed}".split())[:300]


def check(kinds: Sequence[type[Contestant]], layout: Layout, T: int = 1) -> dict[str, float | str]:
    """Per contestant its outputs' relative error against the oracle, or why it has none.

    Raises:
        RuntimeError: ours is wrong.
    """
    found: dict[str, float | str] = {}
    for kind in kinds:
        try:
            found[kind.name] = error(kind, layout, T, B=8, candidate=kind.candidates[0])
        except Exception as failed:
            found[kind.name] = why(failed)
        torch.cuda.empty_cache()
    ours = found.get(Ours.name, 0.0)
    if isinstance(ours, str) or not ours < ERROR_BOUND:
        raise RuntimeError(f"{layout.recurrence.name}, state {layout.state}, T = {T}: our own outputs are off by {ours}")
    return found


def absentees(found: dict[str, float | str]) -> dict[str, str]:
    """The contestants that are not measured, each with its reason."""
    wrong = {n: f"computes something else: outputs off by {e:.1e}" for n, e in found.items() if not isinstance(e, str)}
    return {n: e for n, e in found.items() if isinstance(e, str)} | {
        n: text
        for n, text in wrong.items()
        if not found[n] < ERROR_BOUND  # type: ignore[operator]
    }


def layers(model: Model, layout: Layout, B: int, states: int = 1) -> int:
    """How many of the model's layers are run."""
    return max(2, min(model.layers, STATE_BYTES // (layout.state_bytes * B * states)))


def times(
    kinds: Sequence[type[Contestant]], make: Callable[[type[Contestant], bool], Work], absent: dict[str, str], replays: int
) -> tuple[dict[str, tuple[float, float]], dict[str, object]]:
    """(median, spread) microseconds of each contestant that is not absent, and the settings chosen for those that have some.

    Args:
        make: the contestant's Work; a short one, of two layers, to choose its settings with.
        absent: contestants left out; those that fail here are added.
    """
    found: dict[str, tuple[float, float]] = {}
    settings: dict[str, object] = {}
    for kind in kinds:
        if kind.name in absent:
            continue
        try:
            chosen = best_candidate(kind, make(kind, True)) if len(kind.candidates) > 1 else None
            if chosen is not None:
                settings[kind.name] = chosen
            found[kind.name] = timed(kind, make(kind, False), replays, chosen)
        except Exception as failed:
            if kind is Ours:
                raise
            absent[kind.name] = why(failed)
        torch.cuda.empty_cache()
    return found, settings


def measure(name: str, B: int, state: str, W: int, ceiling: float, found: dict[str, float | str], replays: int) -> dict:
    """One row of results; ``found`` says who takes part (see ``check``)."""
    model = MODELS[name]
    layout = model.layout(W=W, state=state)

    def make(kind: type[Contestant], short: bool) -> Work:
        n = 2 if short else layers(model, layout, B)
        return Work(layout, n, B, groups=cold_groups(layout, n, B), steps=W)

    absent = absentees(found)
    kinds = [kind for kind in (Ours, *DECODE[layout.recurrence.name]) if kind.name in found]
    us, settings = times(kinds, make, absent, replays)
    (ours, spread), peers = us.pop(Ours.name), {n: t for n, (t, _) in us.items()}
    traffic = layout.step_bytes()
    total = B * (traffic.replay.total + traffic.io.total)
    floor = total / ceiling * 1e6
    return {
        "family": layout.recurrence.name,
        "layer": name,
        "batch": B,
        "T": 1,
        "W": W,
        "state": state,
        "read": None,
        "u": str(layout.u).removeprefix("torch."),
        "us": ours,
        "spread_us": spread,
        "floor_us": floor,
        "bytes": total,
        "share": floor / ours,
        "peers": peers,
        "ratio": {n: t / ours for n, t in peers.items()},
        "peer_spread_us": {n: s for n, (_, s) in us.items()},
        "peer_settings": settings,
        "absent": absent,
        "layers": layers(model, layout, B),
        "launch": str(launch.decode(layout, B)),
    }


def rows(
    names: Sequence[str],
    batches: Sequence[int],
    states: Sequence[str],
    W: int,
    ceiling: float,
    with_peers: bool,
    replays: int,
    checks: dict[str, dict[str, float | str]],
) -> Iterator[dict]:
    """Rows of every layer, state format and batch, each as soon as it is measured; ``checks`` gathers what ``check`` found."""
    for name in names:
        kinds = (Ours, *(DECODE[MODELS[name].recurrence.name] if with_peers else ()))
        for state in states:
            found = checks[f"{name}, {state}"] = check(kinds, MODELS[name].layout(W=W, state=state))
            for B in batches:
                yield measure(name, B, state, W, ceiling, found, replays)
