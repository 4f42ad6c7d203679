"""Verify steps of T tokens a request, of which a random number stays: ours at its best window, and the peers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from replayssm import Layout, launch

from .check import Found, absentees, check
from .contest import Contestant, Ours, timed
from .decode import layers, times
from .peers import DECODE, VERIFY, replays
from .work import ACCEPTANCE, MODELS, Work, cold_groups

TOKENS = (1, 2, 4, 8, 16)
BATCHES = (256, 64, 16, 1)
WINDOWS = (16, 24, 32)
STEPS = 32  # of one graph; every replay goes on from the cursors that the last one left


def layout(name: str, W: int) -> Layout:
    """One layer with a window of W; rings as for the most tokens measured, so that one kernel serves every T."""
    return MODELS[name].layout(W=W, T_max=min(W, max(TOKENS)))


def maker(name: str, of: Layout, B: int, T: int, steps: int) -> Callable[[type[Contestant], bool], Work]:
    """Makes a contestant's Work, of two layers where it is to be short."""

    def make(kind: type[Contestant], short: bool) -> Work:
        n = 2 if short else layers(MODELS[name], of, B, kind.states(T))
        return Work(of, n, B, T, groups=cold_groups(of, n, B), steps=steps)

    return make


def one_step(name: str, B: int, found: Found, repeat: int) -> dict[str, float]:
    """Microseconds of the conventional peers' one-token step."""
    of = MODELS[name].layout()
    kinds = [kind for kind in DECODE[of.recurrence.name] if kind.name in found and not replays(kind.name)]
    us, _ = times(kinds, maker(name, of, B, 1, of.W), absentees(found), repeat)
    return {name: t for name, (t, _) in us.items()}


def measure(name: str, B: int, T: int, windows: Sequence[int], ceiling: float, found: Found, one: dict, repeat: int) -> dict:
    """One row of results: the window of least time and, under ``windows``, every window's time."""
    tried = {}
    for W in windows:
        if T <= W:
            tried[W] = timed(Ours, maker(name, layout(name, W), B, T, STEPS)(Ours, False), repeat)
            torch.cuda.empty_cache()
    W = min(tried, key=lambda W: tried[W][0])
    (us, spread), of, absent = tried[W], layout(name, W), absentees(found)
    kinds = [kind for kind in (VERIFY if T > 1 else DECODE)[of.recurrence.name] if kind.name in found]
    peers, settings = times(kinds, maker(name, layout(name, max(16, T)), B, T, STEPS), absent, repeat) if T > 1 else ({}, {})
    traffic = of.step_bytes(T, ACCEPTANCE)
    total = B * (traffic.replay.total + traffic.io.total)
    floor = total / ceiling * 1e6
    return {
        "family": of.recurrence.name,
        "layer": name,
        "batch": B,
        "T": T,
        "W": W,
        "state": of.state,
        "read": None,
        "u": str(of.u).removeprefix("torch."),
        "acceptance": ACCEPTANCE,
        "us": us,
        "spread_us": spread,
        "floor_us": floor,
        "bytes": total,
        "share": floor / us,
        "one_step_us": min(one.values(), default=None),
        "one_step": one,
        "windows": {str(W): t for W, (t, _) in tried.items()},
        "peers": {n: t for n, (t, _) in peers.items()},
        "ratio": {n: t / us for n, (t, _) in peers.items()},
        "peer_settings": settings,
        "absent": absent if T > 1 else {},
        "layers": layers(MODELS[name], of, B),
        "launch": str(launch.verify(of, B) if T > 1 else launch.decode(of, B)),
    }


def rows(
    names: Sequence[str],
    batches: Sequence[int],
    tokens: Sequence[int],
    windows: Sequence[int],
    ceiling: float,
    with_peers: bool,
    repeat: int,
    checks: dict[str, Found],
) -> Iterator[dict]:
    """Rows of every layer, batch and T, each as soon as it is measured; ``checks`` gathers what ``check`` found."""
    for name in names:
        family = MODELS[name].recurrence.name
        conventional = [kind for kind in DECODE[family] if with_peers and not replays(kind.name)]
        single = check(conventional, MODELS[name].layout()) if conventional else {}
        found = {}
        for T in tokens:
            kinds = (Ours, *(VERIFY[family] if with_peers and T > 1 else ()))
            found[T] = checks[f"{name}, T = {T}"] = check(kinds, layout(name, max(16, T)), T)
        for B in batches:
            one = one_step(name, B, single, repeat)
            for T in tokens:
                yield measure(name, B, T, windows, ceiling, found[T], one, repeat)
