"""Fixed inputs of a scenario, what they must give, and how far a plain run in the same precision is from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formats import Format
from ..layout import Conv, Layout
from ..soak import truth
from ..soak.check import distance
from ..soak.inputs import Inputs
from .scenarios import Scenario, Snapshot, Step

# An implementation sums in another order than the plain run; both are samples of the same rounding errors, and the largest of a
# few thousand samples differs between two runs by less than this.
FACTOR = 4.0
VOCABULARY = 32


@dataclass(frozen=True)
class Run:
    """What requests' own tokens give.

    Attributes:
        outputs: [L, requests, N, H, V] of each token.
        states: [L, requests, N + 1, H, V, K] before the first token and after each.
    """

    outputs: Tensor
    states: Tensor


def identity(states: Tensor) -> Tensor:
    """Nothing is rounded."""
    return states


class Problem:
    """A layout, a scenario and everything it feeds: weights, initial states, each request's tokens, drafts to be rejected.

    Requests that a snapshot starts have their own tokens and the parent's exact state as initial one. Weights are values that
    bf16 holds, so that every implementation can have them.

    Attributes:
        layout: of our own implementations, with the scenario's T as T_max and without a convolution.
        weights: A, dt_bias, D, each [L, ...] or None.
        tokens: per input [L, requests, N, ...]; drafts: per input [L, steps, requests, T, ...].
        initial: [L, requests, H, V, K] fp32; rows of requests that snapshots start are not read.
        exact, plain: the fp64 truth, and the same in plain fp32 with states and outputs rounded as the layout says.
        bound: per "outputs" and "states" the largest error that passes: FACTOR times the plain run's.
        readout: [H V, VOCABULARY]: the last layer's output times it are logits.
    """

    def __init__(self, layout: Layout, scenario: Scenario, layers: int = 2, device: str = "cpu", seed: int = 0) -> None:
        self.layout = layout = replace(layout, T_max=scenario.T, R=0, conv=None)
        self.scenario, self.layers, self.device = scenario, layers, torch.device(device)
        inputs = Inputs(replace(layout, conv=Conv(1), R=0), layers, torch.device("cpu"), seed)
        generator, n = inputs.generator, scenario.requests
        self.weights: dict[str, Tensor | None] = {
            name: None if x is None else self._to(x if name == "A" else x.bfloat16().float())
            for name, x in inputs.weights.items()
        }
        length = max(sum(one.accepted[one.rows.index(r)] for one in scenario.steps if r in one.rows) for r in range(n))
        self.tokens = {name: self._to(x) for name, x in inputs.draw(n, length)[0].items()}
        steps = len(scenario.steps)
        drafts = inputs.draw(steps * n, scenario.T)[0]
        self.drafts = {name: self._to(x).unflatten(1, (steps, n)) for name, x in drafts.items()}
        shape = layers, n, layout.H, layout.V, layout.K
        self.initial = self._to(torch.randn(shape, generator=generator) * layout.K**-0.5)
        readout = torch.randn(layout.H * layout.V, VOCABULARY, generator=generator)
        self.readout = self._to(readout / readout.norm(dim=0)).double()
        self.exact, self.plain = self._run(torch.float64), self._plain()
        kept = self.kept
        rounded = self.plain.outputs.to(layout.act)
        errors = {
            "outputs": distance(rounded, self.exact.outputs, 2)[:, kept[:, :-1]],
            "states": distance(self.plain.states, self.exact.states, 3)[:, kept],
        }
        self.bound = {name: FACTOR * float(error.max()) for name, error in errors.items()}

    def _to(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    @property
    def kept(self) -> Tensor:
        """[requests, N + 1]: whether a request keeps that many tokens at some time."""
        most = [0] * self.scenario.requests
        for one in self.scenario.steps:
            for row, n in zip(one.rows, one.accepted, strict=True):
                most[row] += n if row >= 0 else 0
        length = self.tokens["v"].shape[2]
        return torch.arange(length + 1) <= torch.tensor(most)[:, None]

    def _plain(self) -> Run:
        """In fp32, the state rounded to nearest before every token, and as the copy where outputs are read from one."""
        kept, read = replace(self.layout.format, stochastic=False), self.layout.read_format

        def through(one: Format, states: Tensor) -> Tensor:
            return one.decode(one.encode(states))

        run = self._run(torch.float32, lambda states: through(kept, states))
        if read is None:
            return run
        copies = self._run(torch.float32, lambda states: through(kept, states), lambda states: through(read, states))
        return Run(copies.outputs, run.states)

    def _run(
        self, dtype: torch.dtype, keep: Callable[[Tensor], Tensor] = identity, read: Callable[[Tensor], Tensor] = identity
    ) -> Run:
        """All requests' tokens, one after the other; those that snapshots start after their parents."""
        n, length = self.scenario.requests, self.tokens["v"].shape[2]
        starts = self._parents()
        states = self.initial.new_zeros(self.layers, n, length + 1, *self.initial.shape[2:], dtype=dtype)
        outputs = self.initial.new_zeros(*self.tokens["v"].shape, dtype=dtype)
        states[:, :, 0] = self.initial
        for group in ([request for request in range(n) if request not in starts], list(starts)):
            for request in group:
                if request in starts:
                    states[:, request, 0] = states[:, starts[request][0], starts[request][1]]
            one = torch.ones(len(group), dtype=torch.int32, device=self.device)
            for i in range(length if group else 0):
                x: dict[str, Tensor] = {name: tokens[:, group, i : i + 1] for name, tokens in self.tokens.items()}
                states[:, group, i] = keep(states[:, group, i])
                run = truth.run(self.layout, self.weights, read(states[:, group, i]), x, one, dtype=dtype)
                outputs[:, group, i] = run.outputs[:, :, 0]
                if read is not identity:
                    run = truth.run(self.layout, self.weights, states[:, group, i], x, one, dtype=dtype)
                states[:, group, i + 1] = run.states
            states[:, group, length] = keep(states[:, group, length])
        return Run(outputs, states)

    def _parents(self) -> dict[int, tuple[int, int]]:
        """Per request that a snapshot starts: its parent and how many tokens the parent had."""
        position = [0] * self.scenario.requests
        found = {}
        for one in self.scenario.events:
            if isinstance(one, Step):
                for row, n in zip(one.rows, one.accepted, strict=True):
                    position[row] += n if row >= 0 else 0
            elif isinstance(one, Snapshot):
                found[one.child] = (one.parent, position[one.parent] - one.back)
        return found

    def inputs(self, number: int, positions: list[int]) -> dict[str, Tensor]:
        """The tokens of a step: per input [L, rows, T, ...]; a request's next tokens where they stay, drafts where they do
        not, NaN in padding and beyond a row's t.

        Args:
            number: which of the scenario's steps.
            positions: tokens that each request has kept before.
        """
        step, T = self.scenario.steps[number], self.scenario.T
        found = {}
        for name, own in self.tokens.items():
            x = own.new_full((self.layers, len(step.rows), T, *own.shape[3:]), float("nan"))
            for i, (row, t, n) in enumerate(zip(step.rows, step.t, step.accepted, strict=True)):
                if row >= 0:
                    x[:, i, :n] = own[:, row, positions[row] : positions[row] + n]
                    x[:, i, n:t] = self.drafts[name][:, number, row, n:t]
            found[name] = x
        return found

    def replayed(self, scenario: Scenario) -> Problem:
        """The same requests under a script that keeps the same tokens."""
        other = copy.copy(self)
        other.scenario, other.layout = scenario, replace(self.layout, T_max=scenario.T, R=0)
        return other

    def logits(self, outputs: Tensor) -> Tensor:
        """[L, ..., H, V] -> [..., VOCABULARY] of the last layer, in fp64."""
        return outputs[-1].double().flatten(-2) @ self.readout
