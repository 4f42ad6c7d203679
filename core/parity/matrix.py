"""Scenario by implementation: errors of outputs and states against fp64, tokens that differ, or why there is no result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..export import Export
from ..layout import Layout
from ..soak.check import distance
from .implementation import Entry, Implementation
from .problem import Problem
from .scenarios import SCENARIOS, Admit, Enter, Finish, Leave, Snapshot, Step, scenario


@dataclass
class Found:
    """What a run of a scenario was compared to, and how far it was.

    Attributes:
        outputs, states: largest relative error of any request, layer and token; None where no state has taken in a token.
        tokens, differing: greedy tokens, and how many are not the truth's although its margin is beyond the bound.
        kept: per request its outputs [L, H, V].
    """

    outputs: float = 0.0
    states: float | None = None
    tokens: int = 0
    differing: int = 0
    kept: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)


class Player:
    """Plays a problem's script on an implementation; requests that leave come back to the last one given."""

    def __init__(self, problem: Problem, implementations: Sequence[Implementation]) -> None:
        self.problem, self.here, self.there = problem, implementations[0], implementations[-1]
        self.owner: dict[int, Implementation] = {}
        self.position = [0] * problem.scenario.requests
        self.parked: dict[int, Export] = {}
        self.number = 0
        self.found = Found(kept={request: [] for request in range(problem.scenario.requests)})

    def play(self) -> Found:
        """All events; then the states of all requests that are still there."""
        for event in self.problem.scenario.events:
            self.event(event)
        self.compare_states(list(self.owner))
        self.compare_tokens()
        return self.found

    def event(self, event: object) -> None:
        if isinstance(event, Step):
            self.step(event)
        elif isinstance(event, Admit):
            self.here.admit(event.requests, self.problem.initial[:, list(event.requests)])
            self.owner |= dict.fromkeys(event.requests, self.here)
        elif isinstance(event, Snapshot):
            self.snapshot(event)
        elif isinstance(event, Leave):
            self.parked |= {request: self.owner.pop(request).leave(request) for request in event.requests}
        elif isinstance(event, Enter):
            for request in event.requests:
                self.there.enter(request, self.parked.pop(request))
                self.owner[request] = self.there
        elif isinstance(event, Finish):
            self.compare_states([] if event.aborted else [event.request])
            self.owner.pop(event.request).finish(event.request)

    def step(self, step: Step) -> None:
        (owner,) = {self.owner[row] for row in step.rows if row >= 0} or {self.here}
        o = owner.step(step.rows, step.t, step.accepted, self.problem.inputs(self.number, self.position))
        for i, (row, t, n) in enumerate(zip(step.rows, step.t, step.accepted, strict=True)):
            if o[:, i, t:].any():  # zeros where there is no token
                self.found.outputs = math.inf
            if row >= 0:
                self.found.kept[row] += [o[:, i, j].clone() for j in range(n)]
                exact = self.problem.exact.outputs[:, row, self.position[row] : self.position[row] + n]
                self.found.outputs = max(self.found.outputs, worst(o[:, i, :n], exact, 2))
                self.position[row] += n
        self.number += 1

    def snapshot(self, event: Snapshot) -> None:
        owner, exact = self.owner[event.parent], self.problem.exact.states
        state = owner.snapshot(event.parent, event.back)
        self.note(state, exact[:, event.parent, self.position[event.parent] - event.back])
        owner.admit([event.child], state[:, None])
        self.owner[event.child] = owner

    def compare_states(self, requests: list[int]) -> None:
        for owner in set(self.owner.values()):
            mine = [request for request in requests if self.owner[request] is owner]
            if mine:
                states, lacking = owner.states(mine)
                for i, (request, n) in enumerate(zip(mine, lacking, strict=True)):
                    if (at := self.position[request] - n) > 0:
                        self.note(states[:, i], self.problem.exact.states[:, request, at])

    def note(self, state: Tensor, exact: Tensor) -> None:
        self.found.states = max(self.found.states or 0.0, worst(state, exact, 3))

    def compare_tokens(self) -> None:
        problem, found = self.problem, self.found
        for request, kept in found.kept.items():
            if kept:
                exact = problem.exact.outputs[:, request, : len(kept)]
                best = problem.logits(exact).topk(2, -1)
                sure = best.values.diff(dim=-1)[:, 0].abs() > 2 * problem.bound["outputs"] * exact[-1].flatten(-2).norm(dim=-1)
                tokens = problem.logits(torch.stack(kept, 1)).argmax(-1)
                found.tokens += len(kept)
                found.differing += int((sure & (tokens != best.indices[:, 0])).sum())


def worst(x: Tensor, exact: Tensor, dims: int) -> float:
    """Largest relative error over the last dimensions; 0 of nothing."""
    return float(distance(x, exact, dims).max()) if x.numel() else 0.0


def plain_decode(problem: Problem) -> Problem:
    """The same requests, weights and tokens, one token a step."""
    steps = tuple(dataclasses.replace(one, t=one.accepted) if isinstance(one, Step) else one for one in problem.scenario.events)
    return problem.replayed(dataclasses.replace(problem.scenario, events=steps, T=1, lossless=False))


Row = dict[str, Any]


def cells(entries: Sequence[Entry], name: str) -> list[tuple[Entry, Entry]]:
    """What a scenario is run on: each implementation; for migrations, each ordered pair of those that are ours."""
    if name != "migration":
        return [(one, one) for one in entries]
    ours = [one for one in entries if not one.native]
    return [(one, other) for one in ours for other in ours if one is not other]


def rows(
    entries: Sequence[Entry], layouts: Sequence[Layout], names: Sequence[str] = SCENARIOS, **options: Any
) -> Iterator[Row]:
    """One row per layout, scenario and cell.

    Args:
        entries: implementations.
        layouts: of the problems.
        names: scenarios.
        options: of Problem.
    """
    for layout in layouts:
        for name in names:
            problem = Problem(layout, scenario(name, layout.W), **options)
            for one, other in cells(entries, name):
                yield row(problem, one, other)


def row(problem: Problem, one: Entry, other: Entry) -> Row:
    """One cell of the matrix."""
    layout = problem.layout
    found: Row = {
        "family": layout.recurrence.name, "act": str(layout.act).removeprefix("torch."), "state": layout.state,
        "read": layout.read, "scenario": problem.scenario.name, "implementation": one.name, "native": one.native,
        "output_bound": problem.bound["outputs"], "state_bound": problem.bound["states"],
    }  # fmt: skip
    if one is not other:
        found["to"] = other.name
    try:
        played = run(problem, [one] if one is other else [one, other])
        if problem.scenario.lossless:
            alone = run(plain_decode(problem), [one])
            found["lossless_error"] = lossless_error(played, alone)
    except (NotImplementedError, ModuleNotFoundError) as error:
        return found | {"absent": str(error)}
    return found | {
        "output_error": played.outputs, "state_error": played.states,
        "tokens": played.tokens, "tokens_differing": played.differing,
    }  # fmt: skip


def run(problem: Problem, entries: Sequence[Entry]) -> Found:
    """The problem played on these."""
    return Player(problem, [entry.make(problem) for entry in entries]).play()


def lossless_error(played: Found, alone: Found) -> float:
    """The largest relative difference of two runs' kept outputs."""
    return max(worst(torch.stack(kept), torch.stack(alone.kept[request]), 2) for request, kept in played.kept.items() if kept)


def within(row: Row) -> bool:
    """Whether a row's errors are within their bounds and no token differs; so is a row without a result."""
    limits = {"output_error": "output_bound", "state_error": "state_bound", "lossless_error": "output_bound"}
    return (
        not row.get("tokens_differing")
        and not row.get("cursors_differing")
        and all(row[error] <= row[bound] for error, bound in limits.items() if row.get(error) is not None)
    )
