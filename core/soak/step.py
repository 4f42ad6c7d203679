"""One step of the miniature engine: drafts, launches, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cursor import Plan
from . import truth
from .check import distance
from .request import Request

if TYPE_CHECKING:
    from .engine import Engine

STYLES = ("decode", "chain", "packed", "tree")


@dataclass
class Draft:
    """What a row does in a step: t tokens, the token each follows, those that stay, and those that are NaN."""

    t: int
    parents: list[int]
    path: list[int]
    force: bool
    nan: list[int] = field(default_factory=list)


def draft(engine: Engine, one: Request | None, style: str) -> Draft:
    """A row's part in a step. A prompt's tokens, which may come by steps too, all stay."""
    draw, most = engine.random, 1 if style == "decode" else engine.setup.layout.T_max
    if one is None:
        return Draft(most if style == "decode" else 0, [], [], draw.random() < 0.3)
    force = draw.random() < 0.03
    if one.prompt or style == "decode":
        t = min(most, one.prompt or one.answer)
        stays = t if one.prompt or draw.random() < 0.95 else 0
        return Draft(t, list(range(-1, t - 1)), list(range(stays)), force)
    t = min(draw.randint(0, most), one.answer)
    parents = [draw.randint(-1, i - 1) if style == "tree" else i - 1 for i in range(t)]
    path = [draw.randrange(t)] if t else []
    while path and parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    path = path[: draw.randint(0, len(path))] if draw.random() < 0.5 else path
    nan = [i for i in range(t) if i not in path] if draw.random() < 0.2 else []
    return Draft(t, parents, path, force, nan)


class Step:
    """One step's tensors: the drafts as numbers on the device, launched and compared."""

    def __init__(
        self, engine: Engine, worker: int, style: str, rows: list[Request | None], drafts: list[Draft], gone: list[Request]
    ) -> None:
        self.engine, self.worker, self.state, self.style, self.drafts = engine, worker, engine.workers[worker], style, drafts
        self.T = T = 1 if style == "decode" else engine.setup.layout.T_max
        self.rows, self.gone, block = rows, gone, engine.setup.block
        self.marks = [0] * len(rows)
        for i, (one, draft) in enumerate(zip(rows, drafts, strict=True)):
            if one is not None and not one.spoiled and one not in gone and one.position % block + len(draft.path) >= block:
                self.marks[i] = block - one.position % block
        table = [
            [
                -1 if one is None else one.slot,
                draft.t,
                len(draft.path),
                draft.force,
                mark,
                -1 if one is None or one in gone else one.number,
                one is not None and one.spoiled,
                *draft.path, *[0] * (T - len(draft.path)),
                *draft.parents, *[-1] * (T - len(draft.parents)),
                *(one is None or one.spoiled or i >= draft.t or i in draft.nan for i in range(T)),
            ]
            for one, draft, mark in zip(rows, drafts, self.marks, strict=True)
        ]  # fmt: skip
        numbers = torch.tensor(table, dtype=torch.int32).to(engine.device, non_blocking=True)
        self.slots, self.t, self.kept, self.force, self.mark, self.number, self.spoiled = numbers[:, :7].t().contiguous()
        self.path, self.parents, self.nan = (x.contiguous() for x in numbers[:, 7:].split(T, 1))

    def launch(self) -> None:
        """Plan, every layer, commit."""
        engine, state, B, T = self.engine, self.state, len(self.rows), self.T
        self.x, self.lines = engine.inputs.draw(B, T, self.nan.bool())
        given = {"slots": self.slots, "t": self.t, "force": self.force, "parents": self.parents, "lines": self.lines} | self.x
        committed = {"kept": self.kept, "path": self.path}
        tokens: Tensor | slice = slice(None)
        if self.style == "packed":  # as many tokens as there are: no two steps have equal shapes
            t = [draft.t for draft in self.drafts]
            given["ends"] = engine.ints([0, *torch.tensor(t).cumsum(0).tolist()])
            tokens = given["tokens"] = engine.ints((i * T + j for i, n in enumerate(t) for j in range(n)), torch.int64)
            o, y, self.plan = self._run(given)
        else:
            o, y, self.plan = engine.replayed((self.worker, self.style, B), self._run, given)
        self.o, self.y = self._padded(o, tokens), self._padded(y, tokens)
        if self.gone:
            state.release(engine.slots(self.gone))
        engine.replayed((self.worker, self.style, B, "commit"), self._commit, committed)
        if engine.random.random() < 0.2:
            self._commit(committed | {"kept": self.t.clamp(max=1)})  # other numbers, neither none nor all
            engine.events["second commits"] += 1

    def _run(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Plan]:
        """Plan and every layer; reads nothing but what is given, so that it can be captured."""
        engine, state, tokens = self.engine, self.state, given.get("tokens", slice(None))
        slots, force = given["slots"], given["force"]
        if self.style == "packed":
            plan = state.plan(slots, force=force, cu_seqlens=given["ends"])
        elif self.style == "decode":
            plan = state.plan(slots, force=force)
        else:
            plan = state.plan(slots, t=given["t"], force=force, parents=given["parents"] if self.style == "tree" else None)
        o, y = [], []
        for layer in range(engine.setup.layers):
            x = {name: given[name][layer].flatten(0, 1)[tokens] for name in self.x}
            o.append(state.step(layer, plan, **x, **engine.inputs.of_step(layer)))  # type: ignore[arg-type]  # q, k, v always are
            y.append(state.conv(layer, plan, given["lines"][layer].flatten(0, 1)[tokens], *engine.inputs.of_conv(layer)))
        return torch.stack(o), torch.stack(y), plan

    def _commit(self, given: dict[str, Tensor]) -> None:
        """Commit, which can be captured, too: plans of as many rows are the same tensors."""
        self.state.commit(self.plan, given["kept"], given["path"] if self.style == "tree" else None)

    def _padded(self, x: Tensor, tokens: Tensor | slice) -> Tensor:
        """[L, N, ...] -> [L, B, T, ...]."""
        if isinstance(tokens, Tensor):
            padded = x.new_zeros(len(x), len(self.rows) * self.T, *x.shape[2:])
            padded[:, tokens] = x
            x = padded
        return x.unflatten(1, (len(self.rows), self.T))

    def compare(self) -> None:
        """Outputs of the tokens that stayed, zeros where none was, and the snapshots that fall due."""
        engine, i = self.engine, torch.arange(self.T, device=self.engine.device)
        kept = torch.where(self.number >= 0, self.kept, 0)
        at = torch.arange(len(self.rows), device=engine.device)[:, None], self.path.long()
        x, lines, o, y = {n: one[:, *at] for n, one in self.x.items()}, *(x[:, *at] for x in (self.lines, self.o, self.y))
        found, windows, before = engine.truth.advance(self.number.long(), x, lines, kept, self.mark)
        on = (i < kept[:, None]) & (self.spoiled[:, None] == 0)
        engine.check.note("outputs", distance(o, found.outputs, 2, found.sizes), on)
        engine.check.note("convolution", distance(y, truth.convolve(*engine.inputs.conv, before, lines), 1), on)
        unused = (i >= self.t[:, None]) | (self.slots[:, None] < 0)
        engine.check.note("padding", self.o.abs().amax((3, 4)).double(), unused)
        due = [n for n, mark in enumerate(self.marks) if mark]
        if due:
            rows = engine.ints(due, torch.int64)
            slots, exact, windows = self.slots[rows], found.marked[:, rows], windows[:, rows]
            n = self.state.cursors.count[slots.long()] - (self.kept - self.mark)[rows]
            states = self.state.materialize(slots, n)
            engine.check.note("snapshots", distance(states, exact, 3))
            engine.check.note("windows", distance(self.state.conv_window(slots, n), windows, 2))
            positions = [one.position + self.marks[n] for n in due if (one := self.rows[n]) is not None]
            engine.snapshot(states, windows, exact, positions)
