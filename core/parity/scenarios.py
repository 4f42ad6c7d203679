"""What happens to a few requests: scripts of admission, steps, snapshots, preemption and migration, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

PADDING = -1


@dataclass(frozen=True)
class Admit:
    """Requests start from their initial states."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One step: each row's request, or PADDING; its tokens; how many of them stay."""

    rows: tuple[int, ...]
    t: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    """Request `child` starts from the state that `parent` had `back` kept tokens ago; the parent goes on."""

    parent: int
    child: int
    back: int


@dataclass(frozen=True)
class Leave:
    """Requests leave their slots for host memory."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Enter:
    """Requests that left come back; in a migration, into another implementation."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """A request ends and its slot is free; its states are compared, unless it is aborted as it is."""

    request: int
    aborted: bool = False


Event = Admit | Step | Snapshot | Leave | Enter | Finish


@dataclass(frozen=True)
class Scenario:
    """A script.

    Attributes:
        name, about: what it is called and what it shows.
        T: most tokens of a row and step.
        requests: how many, those included that snapshots start.
        lossless: whether every request keeps one token of each step, so that its outputs are those of plain decoding.
    """

    name: str
    about: str
    T: int
    requests: int
    events: tuple[Event, ...]
    lossless: bool = False

    @property
    def steps(self) -> list[Step]:
        """The steps alone."""
        return [one for one in self.events if isinstance(one, Step)]

    @property
    def uniform(self) -> bool:
        """Whether all requests are admitted first and then every step has all of them in order, each with T tokens."""
        everyone = tuple(range(self.requests))
        first, *rest = self.events
        return first == Admit(everyone) and all(
            isinstance(one, Step) and one.rows == everyone and set(one.t) == {self.T} and min(one.accepted) for one in rest
        )


@dataclass
class Script:
    """A scenario that is being written."""

    random: random.Random
    T: int
    events: list[Event] = field(default_factory=list)

    def step(self, rows: list[int], t: list[int] | None = None, accepted: list[int] | None = None) -> None:
        """A step of these rows, by default of T tokens each, of which a random number stays, the first at least."""
        t = [0 if row == PADDING else self.T for row in rows] if t is None else t
        accepted = [self.random.randint(1, n) if n else 0 for n in t] if accepted is None else accepted
        self.events.append(Step(tuple(rows), tuple(t), tuple(accepted)))

    def steps(self, rows: list[int], times: int) -> None:
        """That many such steps."""
        for _ in range(times):
            self.step(rows)

    def ends(self, name: str, about: str, requests: int, lossless: bool = False) -> Scenario:
        """What was written."""
        return Scenario(name, about, self.T, requests, tuple(self.events), lossless)


def _decode(script: Script, W: int) -> Scenario:
    script.events.append(Admit((0, 1, 2)))
    script.steps([0, 1, 2], 3 * W)
    return script.ends("decode", "one token a step through three windows", 3)


def _verify(script: Script, W: int) -> Scenario:
    script.events.append(Admit((0, 1, 2)))
    script.steps([0, 1, 2], 2 * W + 2)
    return script.ends("verify", "drafts, of which a random number stays", 3)


def _rejection(script: Script, W: int) -> Scenario:
    script.events.append(Admit((0, 1, 2)))
    for _ in range(3 * W):
        script.step([0, 1, 2], accepted=[1, 1, 1])
    return script.ends("rejection", "drafts, all rejected: plain decoding", 3, lossless=True)


def _batching(script: Script, W: int) -> Scenario:
    draw = script.random
    script.events.append(Admit((0, 1, 2)))
    for _ in range(2 * W):
        rows = [*draw.sample([0, 1, 2], draw.randint(2, 3)), *[PADDING] * draw.randint(0, 2)]
        draw.shuffle(rows)
        t = [0 if row == PADDING else draw.randint(0, script.T) for row in rows]
        script.step(rows, t, [draw.choice([n, n, draw.randint(0, n), 0]) for n in t])
    return script.ends("batching", "rows come, go and change places; any number of tokens, none included; padding", 3)


def _padding(script: Script, W: int) -> Scenario:
    draw = script.random
    script.events.append(Admit((0, 1, 2)))
    for _ in range(2 * W):
        rows = [*draw.sample([0, 1, 2], draw.randint(1, 3)), *[PADDING] * draw.randint(0, 2)]
        draw.shuffle(rows)
        script.step(rows)
    return script.ends("padding", "rows come, go and change places, with padding between them; as many tokens in each", 3)


def _snapshot(script: Script, W: int) -> Scenario:
    script.events.append(Admit((0, 1)))
    child = 2
    for n in range(W + 4):
        script.step([0, 1])
        last = script.events[-1]
        if n % 3 == 2 and child < 5 and isinstance(last, Step):
            script.events.append(Snapshot(0, child, script.random.randint(0, last.accepted[0] - 1)))
            script.steps([child], 2)
            script.events.append(Finish(child))
            child += 1
    return script.ends("snapshot", "prefixes taken within an accepted run, and requests that go on from them", child)


def _preemption(script: Script, W: int) -> Scenario:
    script.events.append(Admit((0, 1, 3)))
    script.steps([0, 3, 1], W // 2 + 1)
    script.events += [Leave((1,)), Finish(3, aborted=True), Admit((2,))]
    script.steps([2, 0], 3)
    script.events.append(Enter((1,)))
    script.steps([1, 0, 2], W + 1)
    return script.ends("preemption", "a request waits in host memory and resumes; another one's slot is used anew", 4)


def _migration(script: Script, W: int) -> Scenario:
    script.events.append(Admit((0, 1, 2)))
    script.steps([0, 1, 2], W // 2 + 1)
    script.events += [Leave((2, 0)), Enter((0, 2))]
    script.steps([2, 0], W + 1)
    return script.ends("migration", "requests decoded half way by one implementation are continued by another", 3)


_WRITERS: dict[str, tuple[Callable[[Script, int], Scenario], int]] = {
    "decode": (_decode, 1),
    "verify": (_verify, 4),
    "rejection": (_rejection, 4),
    "padding": (_padding, 2),
    "batching": (_batching, 3),
    "snapshot": (_snapshot, 3),
    "preemption": (_preemption, 2),
    "migration": (_migration, 1),
}
SCENARIOS = tuple(_WRITERS)


def scenario(name: str, W: int) -> Scenario:
    """The script of that name for a window of W records; the same at every call.

    Raises:
        ValueError: an unknown name, or a window below 4.
    """
    if name not in _WRITERS:
        raise ValueError(f"scenario: expected one of {', '.join(SCENARIOS)}, got {name!r}")
    if W < 4:
        raise ValueError(f"window: expected at least 4, got {W}")
    write, T = _WRITERS[name]
    return write(Script(random.Random(name), T), W)
