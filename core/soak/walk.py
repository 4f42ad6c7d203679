"""A seeded random walk of the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from .check import Found
from .engine import Engine
from .step import STYLES


@dataclass(frozen=True)
class Report:
    """What a walk did and found.

    Attributes:
        seed: which walk; with the same setup it repeats every event.
        seconds: what it took.
        events: how many of each.
        found: per kind of comparison.
    """

    seed: int
    seconds: float
    events: dict[str, int]
    found: dict[str, Found]

    @property
    def mismatches(self) -> int:
        """Comparisons beyond their bound."""
        return sum(one.wrong for one in self.found.values())


def event(engine: Engine) -> None:
    """Something happens to each worker, then both take a step."""
    draw, slots = engine.random, engine.setup.slots
    some = max(1, slots // 32)
    for worker in (0, 1):
        if draw.random() < 0.3:
            engine.resume(worker)
        if draw.random() < 0.6:
            engine.admit(worker, draw.randint(1, max(2, slots // 4)), hit=draw.random() < 0.4)
        happening = draw.random()
        if happening < 0.15:
            engine.preempt(worker, some, fold=draw.random() < 0.5)
        elif happening < 0.25:
            engine.fork(worker, some)
        elif happening < 0.35:
            engine.move(worker, 2 * some)
        elif happening < 0.4:
            engine.abort(engine.some(engine.of(worker), 1))
        elif happening < 0.45:
            engine.audit(worker)
        if draw.random() < 0.5:
            engine.prefill(worker, 4 * some)
        abort = draw.random() < 0.1
        engine.step(worker, draw.choice(STYLES), draw.choice([1.0, 0.8]), int(abort), fault=draw.random() < 0.05)
        for one in engine.of(worker):
            if one.spoiled and draw.random() < 0.3:
                engine.abort([one])


def walk(
    engine: Engine,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
    check_every: int = 64,
    seconds: float = math.inf,
) -> Report:
    """Events until that many request-steps are done, or something is wrong; then all live states are compared.

    Args:
        progress: called with the request-steps done.
        check_every: events between two looks at what the device found, each of which waits for it.
        seconds: after which it ends early.
    """
    begin = time.perf_counter()
    while engine.events["request-steps"] < steps and time.perf_counter() - begin < seconds:
        engine.check.step += 1
        event(engine)
        if engine.check.step % check_every == 0:
            if any(one.wrong for one in engine.check.found().values()):
                break
            progress(engine.events["request-steps"])
    for worker in (0, 1):
        engine.audit(worker)
    found = engine.check.found()
    return Report(engine.seed, time.perf_counter() - begin, dict(engine.events), found)
