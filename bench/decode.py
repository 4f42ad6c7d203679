"""Decode steps of one token a request, ours and the peers', on equal inputs: whole flush cycles in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from replayssm import Layout, launch
from replayssm.models import Model

from .check import Found, absentees, check, why
from .contest import Contestant, Ours, Unflushed, best_candidate, timed
from .peers import DECODE
from .precision import Precision
from .work import MODELS, Work, cold_groups

BATCHES = (256, 64, 16, 8, 4, 2, 1)
STATE_BYTES = 24 * 2**30  # most that one contestant's states take; a model's further layers would not change a mean
PEERS_STATE = "fp32"  # of peers, beside every format of ours: what models are served with


def layers(model: Model, layout: Layout, B: int, states: int = 1) -> int:
    """How many of the model's layers are run."""
    return max(2, min(model.layers, STATE_BYTES // ((layout.state_bytes * states + layout.copy_bytes) * B)))


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
            absent[kind.name] = why(failed)
        torch.cuda.empty_cache()
    return found, settings


def maker(name: str, layout: Layout, B: int, steps: int) -> Callable[[type[Contestant], bool], Work]:
    """Makes a contestant's Work, of two layers where it is to be short."""

    def make(kind: type[Contestant], short: bool) -> Work:
        n = 2 if short else layers(MODELS[name], layout, B)
        return Work(layout, n, B, groups=cold_groups(layout, n, B), steps=steps)

    return make


def measure_peers(name: str, B: int, W: int, found: Found, replays: int) -> dict[str, Any]:
    """What rows of this layer and batch say of the peers; ``found`` says who takes part (see ``check``)."""
    layout, absent = MODELS[name].layout(W=W, state=PEERS_STATE), absentees(found)
    kinds = [kind for kind in DECODE[layout.recurrence.name] if kind.name in found]
    us, settings = times(kinds, maker(name, layout, B, W), absent, replays)
    return {
        "peers": {n: t for n, (t, _) in us.items()},
        "peer_spread_us": {n: s for n, (_, s) in us.items()},
        "peer_settings": settings,
        "peers_state": PEERS_STATE,
        "absent": absent,
    }


def measure(name: str, B: int, layout: Layout, ceiling: float, peers: dict[str, Any], replays: int) -> dict[str, Any]:
    """One row of results beside what ``measure_peers`` found."""
    us, spread = timed(Ours, maker(name, layout, B, layout.W)(Ours, False), replays)
    torch.cuda.empty_cache()
    unflushed, _ = timed(Unflushed, maker(name, layout, B, 1)(Unflushed, False), replays)
    torch.cuda.empty_cache()
    traffic, without = layout.step_bytes(), layout.replay_bytes(1, 1, (layout.W - 1) / 2, 0, 0)
    total, rest = (B * (replay.total + traffic.io.total) for replay in (traffic.replay, without))
    floor = total / ceiling * 1e6
    return {
        "family": layout.recurrence.name,
        "layer": name,
        "batch": B,
        "T": 1,
        "W": layout.W,
        "state": layout.state,
        "read": layout.read,
        "u": str(layout.u).removeprefix("torch."),
        "us": us,
        "spread_us": spread,
        "floor_us": floor,
        "bytes": total,
        "share": floor / us,
        "us_no_flush": unflushed,
        "floor_no_flush_us": rest / ceiling * 1e6,
        "ratio": {n: t / us for n, t in peers["peers"].items()},
        "layers": layers(MODELS[name], layout, B),
        "launch": str(launch.decode(layout, B)),
    } | peers


def layouts(name: str, precisions: Sequence[Precision], windows: Sequence[int]) -> list[Layout]:
    """One of a model's layers in every format and window."""
    return list(dict.fromkeys(precision.layout(MODELS[name], W) for precision in precisions for W in windows))


def rows(
    name: str,
    batches: Sequence[int],
    of: Sequence[Layout],
    ceiling: float,
    with_peers: bool,
    replays: int,
    checks: dict[str, Found],
) -> Iterator[dict[str, Any]]:
    """Rows of a model's layer in every layout and batch, each as soon as it is measured; ``checks`` gathers errors.

    Peers are measured once for a batch, those that replay with the first layout's window.
    """
    kinds, at = DECODE[MODELS[name].recurrence.name] if with_peers else (), of[0].W
    found = checks[f"{name}, peers"] = check(kinds, MODELS[name].layout(W=at, state=PEERS_STATE))
    for layout in of:
        checks[f"{name}, {formats(layout)}, W = {layout.W}"] = check((Ours,), layout)
    for B in batches:
        peers = measure_peers(name, B, at, found, replays)
        for layout in of:
            yield measure(name, B, layout, ceiling, peers, replays)


def formats(layout: Layout) -> str:
    """ "state", or "state/read", with the helper's where it has one."""
    read, u = f"/{layout.read}" if layout.read else "", f", u {layout.u}" if layout.recurrence.delta else ""
    return (layout.state + read + u).replace("torch.", "")
