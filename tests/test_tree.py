"""Draft trees: every token sees its ancestors and the committed history alone, and an accepted path becomes the history."""

from __future__ import annotations

import random

import pytest
import torch

from replayssm import Conv, ReplayState, reference
from tests.cases import AWKWARD, FAMILY, inputs
from tests.harness import BACKENDS, BOUND, DEVICE, GPU, Speculation, relative_worst

STEP_BACKENDS = BACKENDS
CASE = next(case for case in AWKWARD if case.name == "smallest")


def a_tree(draw: random.Random, n: int) -> list[int]:
    """Parents of n tokens: from chains to stars, several roots."""
    depth = draw.choice([0.0, 0.5, 0.9, 1.0])
    return [i - 1 if draw.random() < depth else draw.randint(-1, i - 1) for i in range(n)]


def ancestors(parents: list[int], i: int) -> list[int]:
    """The path that ends in token i, from its root down."""
    return [*ancestors(parents, parents[i]), i] if i >= 0 else []


def a_path(draw: random.Random, parents: list[int]) -> list[int]:
    return ancestors(parents, draw.randrange(len(parents))) if parents else []


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def slow(backend: str) -> bool:
    """Whether kernels run in the interpreter."""
    return backend == "triton" and not GPU


class Trees(Speculation):
    """Requests whose rows are trees in some steps and chains in others."""

    def walk_trees(self, steps: int) -> None:
        """Random trees, paths, acceptance, forced flushes, order of rows, padding, chains and plain tokens between them."""
        draw = self.random
        for i in range(steps):
            slots = draw.sample(self.live, draw.randint(1, len(self.live))) + [-1] * (i % 2)
            draw.shuffle(slots)
            t = [draw.choice([0, 1, self.T, draw.randint(0, self.T)]) for _ in slots]
            force = [int(draw.random() < 0.1) for _ in slots]
            if i % 4 == 3:
                t = [min(n, 2) for n in t]
                self.step(slots, t, [draw.randint(0, n) for n in t], force)
                continue
            parents = [a_tree(draw, n) for n in t]
            paths = [a_path(draw, one) for one in parents]
            accepted = [draw.choice([len(path), draw.randint(0, len(path))]) for path in paths]
            self.step(slots, t, accepted, force, packed=i % 3 == 0, parents=parents, paths=paths)
        self.check()

    def committed(self, slot: int) -> dict[str, torch.Tensor]:
        """The slot's live records, oldest first."""
        at = int(self.state.cursors.start[slot]) + torch.arange(int(self.state.cursors.count[slot]), device=DEVICE)
        rings = {name: x for name, x in self.state.buffers._asdict().items() if x is not None and name != "state"}
        return {name: x[:, slot, :, at % self.layout.R] for name, x in rings.items()}


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", STEP_BACKENDS)
@pytest.mark.parametrize("T, W, steps", [(5, 8, 120), (32, 32, 6), (7, 7, 10), (1, 3, 10)])
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_random_trees(case, T, W, steps, backend):
    """Two requests over many windows, each row its own tree: outputs of all tokens, states and cursors."""
    run = Trees(case, backend, [2, 0], W, T, seed=T)
    run.walk_trees(2 + steps // 12 if slow(backend) else steps)
    assert slow(backend) or steps < 20 or min(int(run.state.cursors.flushes[slot]) for slot in run.live) > 5


@pytest.mark.parametrize("backend", STEP_BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_rejected_tokens_leave_no_trace(case, backend):
    """NaN in all tokens off the accepted path: kept outputs, records, states and what follows bit for bit the same."""
    one, other = (Trees(case, backend, [1], W=12, T=8) for _ in range(2))
    draw = random.Random(1)
    for i in range(8):
        parents = a_tree(draw, 8)
        path = max((ancestors(parents, j) for j in range(8)), key=len) if i % 2 else a_path(draw, parents)
        path = path[: draw.randint(1, len(path))]
        x = one.draw(1, [8])
        spoiled = {name: x[name].clone() for name in x}
        for tensor in spoiled.values():
            tensor[[j for j in range(8) if j not in path]] = float("nan")
        how = {"slots": [1], "t": [8], "accepted": [len(path)], "parents": [parents], "paths": [path]}
        assert torch.equal(one.step(x=x, **how)[path], other.step(x=spoiled, **how)[path])
        for name, records in one.committed(1).items():
            assert torch.equal(records, other.committed(1)[name]), name
        assert torch.equal(one.state.materialize(ints([1])), other.state.materialize(ints([1])))
    assert int(one.state.cursors.flushes[1]) > 0
    assert torch.equal(one.state.buffers.state[:, 1], other.state.buffers.state[:, 1])


@pytest.mark.parametrize("backend", STEP_BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_chains_are_trees(case, backend):
    """A chain said by parents equals no parents bit for bit: outputs, every buffer, cursors."""
    one, other = (Trees(case, backend, [0, 1], W=6, T=5) for _ in range(2))
    for t, accepted in (([5, 3], [2, 3]), ([4, 0], [4, 0]), ([1, 5], [1, 4]), ([5, 5], [0, 5])):
        x = one.draw(2, t)
        chains = [list(range(-1, n - 1)) for n in t]
        plain = one.step([1, 0], t, accepted, x=x)
        assert torch.equal(plain, other.step([1, 0], t, accepted, x=x, parents=chains, paths=[list(range(n)) for n in t]))
        for a, b in zip((*one.state.buffers, *one.state.cursors), (*other.state.buffers, *other.state.cursors), strict=True):
            assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("backend", STEP_BACKENDS)
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_strong_decay_off_the_path(name, backend):
    """g = -1e4 and -inf in some branches: siblings and their children do not decay."""
    run = Trees(FAMILY[name], backend, [0], W=8, T=8)
    parents = [-1, 0, 0, 1, 2, -1, 5, 4]
    for strong in (1, 2, 5, 0):
        x = run.draw(1, [8])
        x["a"][strong] = 1e4
        run.step([0], [8], [3], x=x, parents=[parents], paths=[[0, 2, 4, 7]])
    run.check()


@pytest.mark.parametrize("backend", STEP_BACKENDS)
def test_parents_are_copied_by_the_plan(backend):
    """An engine may write its tensor of parents anew as soon as plan has returned."""
    run = Trees(FAMILY["gdn"], backend, [0], W=6, T=3)
    x = inputs(run.layout, 3, run.generator)
    parents = ints([[-1, -1, 0]])
    plan = run.state.plan(ints([0]), t=3, parents=parents)
    parents.fill_(2)
    o = run.state.step(0, plan, **{name: one.to(DEVICE) for name, one in x.items()}, **run.weights).cpu()
    expected = run.ring.step(0, [{name: one[[j]] for name, one in x.items()} for j in range(3)], parents=[-1, -1, 0])
    assert relative_worst(o, expected) < BOUND


# ---- plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("T", [1, 2, 3, 8, 13, 32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ancestors(backend, T, wide):
    """The plan's tree of every row: parents as given, ancestor bits; what no token owns is harmless, whatever it holds."""
    draw = random.Random(T)
    B = 9
    state = ReplayState(CASE.layout(W=T, T_max=T), 1, B, DEVICE, backend, debug=True)
    t = [T, 0, *(draw.randint(0, T) for _ in range(B - 2))]
    parents = [[*a_tree(draw, n), *(draw.choice([-7, 0, n, T, 2**31 - 1]) for _ in range(T - n))] for n in t]
    plan = state.plan(ints([*range(B - 1), -1]), t=ints(t), parents=ints(parents, wide))
    for n, given, (copied, bits) in zip(t, parents, plan.tree.cpu().tolist(), strict=True):
        assert copied[:n] == given[:n]
        assert all(-1 <= parent < i for i, parent in enumerate(copied))
        assert [b % 2**32 for b in bits[:n]] == [sum(1 << m for m in ancestors(given, i)) for i in range(n)]
    chain = state.plan(ints([-1]), t=1)
    assert chain.tree is None


# ---- commit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, options",
    [
        ("mamba2", {"order": "token"}),
        ("gdn", {"act": torch.bfloat16, "order": "token"}),
        ("kda", {"act": torch.float16}),
        ("gla", {}),
    ],
)
def test_commit_moves_the_path_together(name, options, backend):
    """Every ring tensor of every layer, bit for bit; other rows, other slots and a second commit: nothing."""
    layers, draw = 2, random.Random(0)
    layout = FAMILY[name].layout(W=7, T_max=6, conv=Conv(75), **options)
    A = torch.ones(layers, layout.H, device=DEVICE) if layout.recurrence.decay == "derived" else None
    state = ReplayState(layout, layers, 4, DEVICE, backend, A=A, debug=True)
    rings = {name: x for name, x in state.buffers._asdict().items() if x is not None and name != "state"}
    for step in range(2 if slow(backend) else 6):
        for x in rings.values():
            x.copy_(torch.randn(x.shape))
        before = {name: x.clone() for name, x in rings.items()}
        slots = [*draw.sample(range(4), 2), -1]
        parents = [a_tree(draw, 6) for _ in slots]
        paths = [a_path(draw, one) for one in parents]
        paths[0], parents[0] = [0, 2, 3, 5], [-1, -1, 0, 2, 2, 3]
        accepted = [4, *(draw.randint(0, len(path)) for path in paths[1:])]
        path = ints([[*one, *[-1] * (6 - len(one))] for one in paths], torch.int64 if step % 2 else torch.int32)
        plan = state.plan(ints(slots), t=6, parents=ints(parents), force=ints([step == 1] * 3))
        append = plan.rows[:, 5].tolist()
        for _ in range(2):
            state.commit(plan, ints(accepted), path)
        for i, slot in enumerate(slots[:2]):
            for j, node in enumerate(paths[i][: accepted[i]]):
                for x in before.values():
                    x[:, slot, :, (append[i] + j) % layout.R] = x[:, slot, :, (append[i] + node) % layout.R]
        for name, x in rings.items():
            assert torch.equal(x, before[name]), name
    assert (state.cursors.flushes > 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_commit_of_a_tree_changes_nothing(backend):
    """Neither rings nor cursors, once the slot's request was replaced."""
    state = ReplayState(CASE.layout(W=4, T_max=3, conv=Conv(8)), 1, 2, DEVICE, backend)
    for x in state.buffers:
        if x is not None:
            x.copy_(torch.randn(x.shape))
    plan = state.plan(ints([1]), t=3, parents=ints([[-1, -1, 1]]))
    state.reset(ints([1]))
    before = [x.clone() for x in (*state.buffers, *state.cursors) if x is not None]
    state.commit(plan, ints([2]), ints([[1, 2, -1]]))
    after = [x for x in (*state.buffers, *state.cursors) if x is not None]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


# ---- convolution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width, T, W", [(4, 6, 7), (2, 3, 3), (3, 32, 32), (4, 1, 2)])
def test_convolution_follows_paths(width, T, W, backend):
    """Each token's window: its ancestors, then the committed inputs; rejected ones, NaN too, leave no trace later."""
    draw, generator, C = random.Random(width), torch.Generator().manual_seed(width), 20
    state = ReplayState(CASE.layout(W=W, T_max=T, conv=Conv(C, width)), 1, 3, DEVICE, backend, debug=True)
    state.buffers.conv.fill_(float("nan"))
    kept = {slot: torch.randn(width - 1, C, generator=generator) for slot in (2, 0)}
    zeros = torch.zeros(1, 2, CASE.H, CASE.V, CASE.K, device=DEVICE)
    state.load(ints([2, 0]), zeros, conv=torch.stack([kept[2], kept[0]])[None].to(DEVICE))
    weight, bias = torch.randn(C, width, generator=generator), torch.randn(C, generator=generator)
    for i in range((6 if T < 32 else 1) if slow(backend) else 20):
        slots = draw.sample([2, 0, -1], 3)
        t = [0 if slot < 0 else draw.choice([T, draw.randint(0, T)]) for slot in slots]
        parents = [a_tree(draw, n) for n in t]
        paths = [a_path(draw, one) for one in parents]
        x = torch.randn(3, T, C, generator=generator)
        for row, path, n in zip(x, paths, t, strict=True):
            row[n:] = float("nan")
            if i % 2:
                row[[j for j in range(n) if j not in path]] = float("nan")
        accepted = [draw.choice([len(path), draw.randint(0, len(path))]) for path in paths]
        plan = state.plan(ints(slots), t=ints(t), parents=ints([[*one, *[T] * (T - len(one))] for one in parents]))
        given = (one.to(DEVICE) for one in (x.flatten(0, 1), weight, bias))
        y = state.conv(0, plan, *given).cpu().unflatten(0, (3, T))
        state.commit(plan, ints(accepted), ints([[*one, *[-1] * (T - len(one))] for one in paths]))
        for row, slot in enumerate(slots):
            assert not y[row, t[row] :].any(), "rows of padding and unused tokens must be zero"
            for j in range(t[row]):
                expected = reference.causal_conv(x[row, ancestors(parents[row], j)], weight, bias, kept[slot])[-1]
                torch.testing.assert_close(y[row, j].double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            if slot >= 0:
                kept[slot] = torch.cat([kept[slot], x[row, paths[row][: accepted[row]]]])[-(width - 1) :]
        assert torch.equal(state.conv_window(ints([2, 0]))[0].cpu(), torch.stack([kept[2], kept[0]]))
