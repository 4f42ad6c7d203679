"""Sizes at their limits: pools beyond 32 bits of bytes and of elements, thousands of slots and rows, none at all."""

import dataclasses

import pytest
import torch

from replayssm import Buffers, ReplayState, reference
from tests.cases import FAMILY, inputs, weights
from tests.harness import BACKENDS, BOUND, DEVICE, GPU, Requests, Speculation, relative_worst

TINY = {name: dataclasses.replace(case, V=16, K=16) for name, case in FAMILY.items()}
FAR = 2**30 + 64  # elements between slots: those of slot 2 are beyond 2^31, though the stride fits 32 bits


def pages(layout, slots: int, stride: int, path) -> Buffers:
    """Buffers [1, slots, ...] of fp32 that lie side by side in one page a slot, ``stride`` elements apart.

    On a GPU in real memory; on a CPU in a sparse file, of which only the pages that are touched exist.
    """
    sizes = {name: shape for name, (shape, dtype) in layout.tensors.items()}
    assert {dtype for _, dtype in layout.tensors.values()} == {torch.float32}
    end = (slots - 1) * stride + sum(torch.Size(shape).numel() for shape in sizes.values())
    if GPU:
        pool = torch.empty(end, device=DEVICE)
    else:
        pool = torch.from_file(str(path / "pool"), shared=True, size=end)
    views, at = dict.fromkeys(Buffers._fields), 0
    for name, shape in sizes.items():
        inner = torch.empty(shape, device="meta")
        views[name] = pool.as_strided((1, slots, *shape), (0, stride, *inner.stride()), at)
        at += inner.numel()
    return Buffers(**views)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", TINY.values(), ids=str)
def test_offsets_of_more_than_32_bits(case, backend, tmp_path):
    """Requests whose every tensor lies beyond 2^31 elements and 2^33 bytes of the pool: steps, folds, copies, states."""
    layout = case.layout(W=3)
    run = Requests(layout, [2, 0], backend, buffers=pages(layout, 3, FAR, tmp_path), state_slots=3)
    for i in range(8):
        run.decode([0, 2] if i % 2 else [2, -1, 0])
    run.check(BOUND)
    run.state.move(run.tensor([2, 0]), run.tensor([0, 2]))
    states = run.state.materialize(run.tensor([0, 2]))[0].cpu()
    assert all(relative_worst(states[i], run.oracle(slot)[1]) < BOUND for i, slot in enumerate((2, 0)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gdn", "kda", "mamba2"])
def test_verify_beyond_32_bits(name, backend, tmp_path):
    """Draft windows, trees and their compaction there."""
    run = Speculation(TINY[name], backend, [2, 0], W=4, T=3)
    old = run.state
    run.state = ReplayState(run.layout, 1, 3, DEVICE, backend, A=old.A, buffers=pages(run.layout, 3, FAR, tmp_path), max_rows=6)
    run.state.load(run.tensor([2, 0]), old.materialize(run.tensor([2, 0])))
    run.step([2, 0], [3, 2], [2, 1])
    run.step([0, 2], [3, 3], [2, 2], parents=[[-1, -1, 1], [-1, 0, 0]], paths=[[1, 2], [0, 2]])
    run.step([2, 0], [3, 1], [3, 1])
    run.step([2, 0], [1, 2], [0, 2])
    run.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("B", [0, 1, 2, 127, 128, 129, pytest.param(4096, marks=() if GPU else pytest.mark.slow)])
def test_batches(B, backend):
    """Any number of rows, some of them padding: outputs and cursors are those of the rows alone."""
    interpreted = backend == "triton" and not GPU
    if interpreted and B in (127, 128, 4096):
        pytest.skip("the interpreter runs one program after another")
    case = dataclasses.replace(TINY["gdn"], H=1, G=1)
    layout, generator = case.layout(W=2, stagger=False), torch.Generator().manual_seed(0)
    w = {name: one if one is None else one.to(DEVICE) for name, one in weights(layout, generator).items()}
    some = sorted({0, B // 2, B - 1} & set(range(B)))
    state = ReplayState(layout, 1, B + 1, DEVICE, backend, max_rows=max(B, 1), debug=False)
    rows = torch.randperm(B, generator=generator).to(DEVICE, torch.int32)
    padding = torch.arange(B, device=DEVICE) % (16 if interpreted else 5)
    rows = torch.where(padding > 0 if interpreted and B > 2 else padding == 3, -1, rows)
    tokens, outputs = [], []
    for _ in range(5):
        x = {name: one.to(DEVICE) for name, one in inputs(layout, B, generator).items()}
        plan = state.plan(rows)
        outputs.append(state.step(0, plan, **x, **w))
        state.commit(plan)
        tokens.append(x)
    assert bool((torch.stack(outputs)[:, rows < 0] == 0).all())
    for i in some:
        if rows[i] >= 0:
            request = {name: torch.cat([x[name][i : i + 1] for x in tokens]) for name in tokens[0]}
            o, s = reference.decode(layout.recurrence, torch.zeros(1, 16, 16, device=DEVICE), **request, **w)
            assert relative_worst(torch.stack(outputs)[:, i], o) < BOUND
            assert relative_worst(state.materialize(rows[i : i + 1])[0, 0], s) < BOUND
    live = rows[rows >= 0].long()
    assert state.cursors.count[live].tolist() == [1] * len(live) and int(state.cursors.count.sum()) == len(live)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_thousands_of_slots_and_rows(name, T):
    """8,704 slots whose checkpoints alone take 9.1 GB and 2^31 elements, 4,096 rows of 16 heads: a grid beyond 65,535."""
    case = dataclasses.replace(FAMILY[name], H=16, G=8, V=128, K=128)
    layout, slots, B = case.layout(W=4, T_max=T), 8704, 4096
    generator = torch.Generator().manual_seed(0)
    w = {one: x if x is None else x.to(DEVICE) for one, x in weights(layout, generator).items()}
    kept = {"A": w["A"][None]} if layout.recurrence.decay == "derived" else {}
    given = w | dict.fromkeys(kept)
    state = ReplayState(layout, 1, slots, DEVICE, max_rows=B, debug=False, **kept)
    assert state.buffers.state.numel() > 2**31 and state.buffers.state.nbytes > 2**32
    rows = torch.randperm(slots, generator=generator)[:B].to(DEVICE, torch.int32)
    some = {0: slots - 1, 1: 0, B - 1: slots - 2}  # rows of the pool's ends
    rows[torch.isin(rows, torch.tensor(list(some.values()), device=DEVICE))] = -1
    for i, slot in some.items():
        rows[i] = slot
    tokens, outputs = [], []
    for _ in range(6):
        x = {one: t.to(DEVICE) for one, t in inputs(layout, B * T, generator).items()}
        plan = state.plan(rows, t=T)
        outputs.append(state.step(0, plan, **x, **given))
        state.commit(plan)
        tokens.append(x)
    for i in some:
        request = {one: torch.cat([x[one][i * T : (i + 1) * T] for x in tokens]) for one in tokens[0]}
        o, s = reference.decode(layout.recurrence, torch.zeros(16, 128, 128, device=DEVICE), **request, **w)
        assert relative_worst(torch.cat([one[i * T : (i + 1) * T] for one in outputs]), o) < BOUND, i
        assert relative_worst(state.materialize(rows[i : i + 1])[0, 0], s) < BOUND, i
