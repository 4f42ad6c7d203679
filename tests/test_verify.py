"""Steps of several tokens per row, chains of drafts: outputs, states and cursors against the oracle of the ring contract."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from replayssm import Conv, ReplayState, launch, reference
from tests.cases import AWKWARD, FAMILY, MODELS, READY, inputs
from tests.harness import BACKENDS, BOUND, DEVICE, GPU, Speculation, relative_worst

SMALL = [*FAMILY.values(), *READY.values()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_random_speculation(case, T, backend):
    """Rows of 0 ... T tokens, 0 ... t of them kept, over several windows, W in {T, 16, 32}."""
    quick = backend == "triton" and not GPU
    for W in {T} if quick else {T, 16, 32}:
        Speculation(case, backend, [3, 0], W, T, seed=T).walk(5 if quick else 25)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name, T", [("gdn", 1), ("mamba2", 1), ("kda", 2)])
def test_split_heads(name, T, backend, monkeypatch):
    """Programs that share a head, each some tiles of V: the same outputs and buffers bit for bit, flushes included."""
    runs = []
    for parts in (1, 2):
        record = launch.Launch(16, 16, warps=1, SPLIT=parts)
        monkeypatch.setattr(launch, "decode" if T == 1 else "verify", lambda layout, B, record=record: record)
        run = Speculation(FAMILY[name], backend, [1, 0], W=2, T=T)
        outputs = [run.step([0, 1], [T, 1], [1, 1]) for _ in range(4)]
        runs.append([*outputs, *(x for x in run.state.buffers if x is not None)])
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*runs, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", BACKENDS if GPU else ["torch"])
@pytest.mark.parametrize("W", [8, 16, 32])
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_five_hundred_steps(case, W, backend):
    """Draft, keep some, commit, 500 times, rows of different T."""
    Speculation(case, backend, [3, 0], W, T=8, seed=W).walk(500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS if GPU else ["torch"])
@pytest.mark.parametrize("name", ["gdn", "kda", "mamba2"])
def test_drift_over_ten_thousand_steps(name, backend):
    """Outputs of every step and the state after the last, against fp64 from the first token on."""
    Speculation(FAMILY[name], backend, [0], W=16, T=4).walk(10_000)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*MODELS, *AWKWARD], ids=str)
def test_every_model(case, backend):
    """The real V and K of every served model and the awkward ones."""
    run = Speculation(case, backend, [1], W=5, T=4)
    for t, accepted in ((4, 2), (3, 3), (2, 1)):
        run.step([1], [t], [accepted])
    run.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rejected_tokens_leave_no_trace(case, backend):
    """The same plan with other rejected rows, NaN included: kept outputs, cursors and folded states bit for bit the same."""
    one, other = (Speculation(case, backend, [1], W=6, T=5) for _ in range(2))
    for t, kept in ((5, 2), (4, 0), (5, 4), (3, 1), (5, 5)):
        x = one.draw(1, [t])
        spoiled = {name: x[name].clone() for name in x}
        for tensor in spoiled.values():
            tensor[kept:t] = float("nan")
        assert torch.equal(one.step([1], [t], [kept], x=x)[:kept], other.step([1], [t], [kept], x=spoiled)[:kept])
    slots = one.tensor([1])
    assert torch.equal(one.state.materialize(slots), other.state.materialize(slots))
    one.state.fold(slots)
    other.state.fold(slots)
    assert torch.equal(one.state.buffers.state[:, 1], other.state.buffers.state[:, 1])
    one.ring.fold(1)
    one.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_decode_and_verify_follow_each_other(case, backend):
    """Steps of one token through the decode launch and of several through verify share records and state."""
    run = Speculation(case, backend, [1, 0], W=6, T=3)
    for i in range(8):
        if i % 2:
            run.step([0, 1], [3, 1], [2, 1])
        else:
            x = inputs(run.layout, 2, run.generator)
            plan = run.state.plan(run.tensor([1, 0]), t=1)
            o = run.state.step(0, plan, **{name: one.to(DEVICE) for name, one in x.items()}, **run.weights).cpu()
            run.state.commit(plan)
            for row, slot in enumerate((1, 0)):
                expected = run.ring.step(slot, [{name: one[[row]] for name, one in x.items()}])
                run.ring.commit(slot, 1)
                assert relative_worst(o[[row]], expected) < BOUND
    run.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_speculation_that_keeps_only_the_first_token_is_plain_decode(case, backend):
    """Against decode of the kept tokens alone, whose flushes fall on other steps: within the bound, outputs and state."""
    run, plain = Speculation(case, backend, [0], W=6, T=4), Speculation(case, backend, [0], W=6, T=4)
    for _ in range(12):
        x = run.draw(1, [4])
        o = run.step([0], [4], [1], x=x)
        plan = plain.state.plan(plain.tensor([0]), t=1)
        first = {name: one[:1].to(DEVICE) for name, one in x.items()}
        alone = plain.state.step(0, plan, **first, **plain.weights).cpu()
        plain.state.commit(plan)
        assert relative_worst(o[:1], alone) < BOUND
    slots = run.tensor([0])
    assert relative_worst(run.state.materialize(slots), plain.state.materialize(slots)) < BOUND


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_nearly_parallel_keys(name, backend):
    """Sixteen keys a thousandth apart, beta near 1, no decay: the solve's error stays below 1e-5."""
    run = Speculation(READY[name], backend, [0], W=16, T=16)
    x = run.draw(1, [16])
    x["k"] = x["k"][:1] + 1e-3 * x["k"]
    x["b"] = 1 - 1e-3 * x["b"]
    x["a"] = x["a"] * 0
    tokens = [{name: one[[j]] for name, one in x.items()} for j in range(16)]
    expected = run.ring.step(0, tokens)
    plan = run.state.plan(run.tensor([0]), t=16)
    o = run.state.step(0, plan, **{name: one.to(DEVICE) for name, one in x.items()}, **run.weights).cpu()
    run.state.commit(plan)
    run.ring.commit(0, 16)
    assert relative_worst(o, expected) < 1e-5
    assert relative_worst(run.state.materialize(run.tensor([0]))[0, 0].cpu(), run.ring.materialize(0)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_strong_and_no_decay(name, backend):
    """g = 0, -5, -20, -1e4 and -inf within one window: no inf, no NaN, oracle-equal."""
    run = Speculation(READY[name], backend, [0], W=8, T=8)
    for shift in range(4):
        x = run.draw(1, [8])
        for i, g in enumerate((0.0, -5.0, -20.0, -1e4, float("-inf"))):
            x["a"][(i + shift) % 8] = g
        run.step([0], [8], [6], x=x)
    run.check()


@pytest.mark.parametrize("T", [1, 4])
def test_convolution_rolls_back(T):
    """The conv-input ring under speculation: rejected inputs leave no trace in later windows (backend torch and kernels)."""
    for backend in ("torch", "triton") if GPU else ("torch",):
        layout = FAMILY["gdn"].layout(W=6, T_max=T, conv=Conv(8, 4))
        state = ReplayState(layout, 1, 1, DEVICE, backend, debug=True)
        slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        choice, generator = random.Random(1), torch.Generator().manual_seed(1)
        weight = torch.randn(8, 4, generator=generator)
        kept = torch.zeros(3, 8)
        for _ in range(20):
            t = choice.randint(1, T)
            x = torch.randn(T, 8, generator=generator)
            plan = state.plan(slots, t=torch.tensor([t], device=DEVICE))
            y = state.conv(0, plan, x.to(DEVICE), weight.to(DEVICE)).cpu()
            accepted = choice.randint(0, t)
            state.commit(plan, torch.tensor([accepted], device=DEVICE))
            expected = reference.causal_conv(x[:t], weight, None, kept[-3:])
            assert relative_worst(y[:t], expected) < 1e-5
            kept = torch.cat([kept, x[:accepted]])


@pytest.mark.gpu
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_graph_replay(case, trees):
    """One captured verify step replayed with changing slots, counts, tokens, trees and acceptance equals eager steps bit for
    bit."""
    eager, graphed = (Speculation(case, "triton", [0, 1, 2], W=8, T=4) for _ in range(2))
    graphed.state = ReplayState(
        eager.layout, 1, 4, DEVICE, "triton", A=eager.state.A, buffers=graphed.state.buffers, max_rows=8, debug=False
    )
    slots, t, accepted = graphed.tensor([-1, -1]), graphed.tensor([0, 0]), graphed.tensor([0, 0])
    parents, path = (graphed.tensor([[-1] * 4] * 2) if trees else None for _ in range(2))
    x = {name: one.to(DEVICE) for name, one in inputs(eager.layout, 8, eager.generator).items()}

    def step() -> Tensor:
        plan = graphed.state.plan(slots, t=t, parents=parents)
        o = graphed.state.step(0, plan, **x, **graphed.weights)
        graphed.state.commit(plan, accepted, path)
        return o

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    choice = random.Random(0)
    for _ in range(30):
        rows = choice.sample([0, 1, 2, -1], 2)
        n = [choice.randint(0, 4) if slot >= 0 else 0 for slot in rows]
        above = [[choice.randint(-1, i - 1) for i in range(m)] for m in n]
        paths = [longest(one) for one in above]
        keep = [choice.randint(0, len(one) if trees else m) for m, one in zip(n, paths, strict=True)]
        new = eager.draw(2, n)
        expected = eager.step(rows, n, keep, x=new, **({"parents": above, "paths": paths} if trees else {}))
        for target, values in ((slots, rows), (t, n), (accepted, keep)):
            target.copy_(eager.tensor(values))
        if trees:
            parents.copy_(eager.table(above, 99))
            path.copy_(eager.table(paths, -1))
        for name, one in new.items():
            x[name].copy_(one)
        graph.replay()
        assert torch.equal(o.cpu(), expected)
    for one, other in zip(
        (*eager.state.buffers, *eager.state.cursors), (*graphed.state.buffers, *graphed.state.cursors), strict=True
    ):
        assert one is None or torch.equal(one.nan_to_num(), other.nan_to_num())


def longest(parents: list[int]) -> list[int]:
    """The longest path of a tree, from its root down."""
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return max(paths, key=len, default=[])


def test_more_than_thirty_two_tokens_are_refused():
    with pytest.raises(NotImplementedError, match="T_max: supported are 1 ... 32 tokens a row, got 33"):
        FAMILY["gdn"].layout(W=64, T_max=33)
