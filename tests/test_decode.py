"""Decode against the oracle: outputs and states, every family, geometry and window, with NaN wherever nothing may be read."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from replayssm import Buffers
from replayssm.layout import HELPERS
from tests.cases import AWKWARD, FAMILY, MODELS, READY, inputs
from tests.harness import BACKENDS, DEVICE, GPU, Requests, relative_worst

SMALL = [*FAMILY.values(), *READY.values()]
BOUND = 2e-5  # worst element over the rms: fp32 sums of up to 256 products


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*MODELS, *AWKWARD], ids=str)
def test_every_model(case, backend):
    """Two requests in shuffled slots with a gap and a padding row between, staggered, through a flush."""
    run = Requests(case.layout(W=3), [4, 1], backend)
    run.decode([4])
    for _ in range(5):
        run.decode([1, -1, 4])
    run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("W", [1, 2, 7, 16, 32])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_windows(case, W, backend):
    """Staggered rows through two flushes each, padding anywhere; a ring one row larger than needed."""
    run = Requests(case.layout(W=W, R=W + 2), [3, 0], backend)
    shuffle = random.Random(W)
    for i in range(2 * W + 3 if W < 16 or GPU or backend == "torch" else W + 3):
        slots = [3, 0][: 1 + min(i, 1)] + [-1] * (i % 2)
        shuffle.shuffle(slots)
        run.decode(slots)
    run.check(BOUND)
    counts = run.state.cursors.count.cpu()
    assert all(1 <= counts[s] <= W for s in (3, 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_forced_flush_at_any_count(case, backend):
    """A forced flush at counts 0 ... W, with a token and alone (t = 0), changes no output beyond rounding."""
    W = 4
    for count in range(W + 1):
        run = Requests(case.layout(W=W), [2, 0], backend, seed=count)
        for _ in range(count):
            run.decode([2, 0])
        plan = run.state.plan(run.tensor([2, -1]), t=0, force=run.tensor([1, 1]))
        x = {n: torch.empty(0, *one.shape[1:], device=DEVICE, dtype=one.dtype) for n, one in run.draw([2]).items()}
        run.state.step(0, plan, **x, **run.step_weights)
        run.state.commit(plan)
        assert run.state.cursors.count.cpu()[[2, 0]].tolist() == [0, count]
        run.decode([0, 2], force=[1, 0])
        assert run.state.cursors.count.cpu()[[2, 0]].tolist() == [1, 1]
        run.decode([0, 2])
        run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_dropped_plan_folds_nothing_twice(case, backend):
    """A plan that flushes and is neither run nor committed: outputs and states go on as if it had not been."""
    W = 3
    run = Requests(case.layout(W=W), [2, 0], backend, debug=False)
    for _ in range(W):
        run.decode([2, 0])
    for force in ([1, 0], [1, 1]):
        run.state.plan(run.tensor([2, 0]), force=run.tensor(force))
    assert run.state.cursors.count.cpu()[[2, 0]].tolist() == [0, 0]
    for _ in range(2):
        run.decode([0, 2])
    run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_window_of_one_is_the_plain_recurrence(case, backend):
    """W = 1 folds one record a step: its checkpoint is the conventional fp32 state of a token ago."""
    run = Requests(case.layout(W=1), [0], backend)
    for _ in range(6):
        run.decode([0])
    _, conventional = run.oracle(0, tokens=5, dtype=torch.float32)
    assert relative_worst(run.state.buffers.state[0, 0].cpu(), conventional) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in SMALL if c.recurrence.stores_g or c.recurrence.delta], ids=str)
def test_readout_helpers_never_reach_the_recurrence(case, backend):
    """Noise in u, 1/|k| and the cumulative decay before every flush: the folded checkpoint is bit-identical."""
    clean, noisy = (Requests(case.layout(W=3), [0, 1], backend) for _ in range(2))
    seen = False
    for _ in range(7):
        for name in HELPERS:
            helper = getattr(noisy.state.buffers, name)
            if helper is not None:
                helper.copy_(torch.randn(helper.shape, generator=noisy.generator).to(helper))
        noisy.generator.set_state(clean.generator.get_state())
        x = clean.draw([0, 1])
        seen |= not torch.equal(noisy.decode([0, 1], x=x), clean.decode([0, 1], x=x))
    assert seen, "the noise must be seen by readouts, else this test shows nothing"
    assert torch.equal(clean.state.buffers.state[:, :2], noisy.state.buffers.state[:, :2])
    slots = clean.tensor([0, 1])
    assert torch.equal(clean.state.materialize(slots), noisy.state.materialize(slots))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_strided_inputs_and_pools(case, backend):
    """Views of one packed projection, slots wider than their tensors, token-major rings: bit-identical to the plain layout."""
    layout = case.layout(W=3)
    plain = Requests(layout, [2, 0], backend)
    token_major = dataclasses.replace(layout, order="token")
    wide = {}
    for name, (shape, dtype) in layout.tensors.items():
        size = torch.Size(shape).numel() + 48
        wide[name] = torch.full((4, size), float("nan"), dtype=dtype, device=DEVICE)[None, :, 16 : size - 32].unflatten(
            2, shape
        )
    paged = Requests(
        layout, [2, 0], backend, buffers=Buffers(*(wide.get(n) for n in Buffers._fields)), state_slots=4, poison=False
    )
    rows = Requests(token_major, [2, 0], backend)
    for _ in range(7):
        x = plain.draw([2, -1, 0])
        flat = torch.cat([one.flatten(1) for one in x.values() if one.dtype == layout.act], 1)
        views, at = dict(x), 0
        for name, one in x.items():
            if one.dtype == layout.act:
                width = one[0].numel()
                views[name] = flat[:, at : at + width].unflatten(1, one.shape[1:])
                at += width
        o = plain.decode([2, -1, 0], x=x)
        assert torch.equal(o, paged.decode([2, -1, 0], x=views))
        assert torch.equal(o, rows.decode([2, -1, 0], x=views))
    plain.check(BOUND)
    for name, one in plain.state.buffers._asdict().items():
        if one is not None:
            for other in (paged, rows):
                assert torch.equal(one[0, [0, 2]].nan_to_num(), getattr(other.state.buffers, name)[0, [0, 2]].nan_to_num()), (
                    name
                )


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_slots_and_rows_stay_untouched(backend):
    """NaN marks what nothing may write: other slots, and ring rows not yet appended."""
    run = Requests(FAMILY["kda"].layout(W=4), [1], backend)
    for _ in range(3):
        run.decode([1, -1])
    for name, one in run.state.buffers._asdict().items():
        if one is not None:
            assert one[0, [0, 2]].isnan().all(), name
            if name != "state":
                assert not one[0, 1, :, :3].isnan().any() and one[0, 1, :, 3:].isnan().all(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_batch_of_none_and_batch_of_padding(case, backend):
    """No rows, and rows that are all padding, leave everything as it was."""
    run = Requests(case.layout(W=2), [0], backend)
    run.decode([0])
    before = [None if x is None else x.clone() for x in (*run.state.buffers, *run.state.cursors)]
    run.decode([])
    run.decode([-1, -1])
    for x, y in zip(before, (*run.state.buffers, *run.state.cursors), strict=True):
        assert x is None or torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_gated_epilogue(name, backend):
    """silu(z) times the output, D v added before."""
    run = Requests(FAMILY[name].layout(W=2), [0, 1], backend, z=True)
    for _ in range(4):
        run.decode([0, 1])
    run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16], ids=str)
def test_activation_dtypes(case, act, backend):
    """The ring keeps 16-bit inputs losslessly: the state is as exact as with fp32; outputs round once (the interpreter
    truncates bf16, so by up to 2^-7 or 2^-10) and, with the delta rule, see the fp16 helper."""
    run = Requests(case.layout(W=3, act=act), [0, 1], backend)
    for _ in range(8):
        run.decode([0, 1])
    run.check(2e-3 if case.recurrence.delta else BOUND, output_rounding=2**-7 if act is torch.bfloat16 else 2**-10)
    states = run.state.materialize(run.tensor([0, 1]))[0].cpu()
    assert all(relative_worst(states[i], run.oracle(i)[1]) < BOUND for i in (0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", ["bf16", "fp16"])
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_checkpoint_formats(case, state, backend):
    """A rounded checkpoint errs by a few roundings of its format and is stored as that format."""
    run = Requests(case.layout(W=3, state=state), [0, 1], backend)
    for _ in range(8):
        run.decode([0, 1])
    assert run.state.buffers.state.dtype is run.layout.format.dtype
    run.check(20 * (2**-8 if state == "bf16" else 2**-11))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in SMALL if c.recurrence.decay == "ready"], ids=str)
def test_total_forgetting(case, backend):
    """g = -inf empties the state and g = -20 nearly: no NaN, and exact afterwards."""
    run = Requests(case.layout(W=4), [0, 1], backend)
    for i in range(11):
        x = run.draw([0, 1])
        x["a"][i % 2] = -20.0 if i % 3 else float("-inf")
        run.decode([0, 1], x=x)
    run.check(BOUND)


def test_backends_agree_on_every_tensor():
    """The same steps leave the same ring: raw inputs bit for bit, helpers and state to rounding."""
    if len(BACKENDS) < 2 or (not GPU and BACKENDS[1].marks[0].args[0]):
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    for case in SMALL:
        one, other = (Requests(case.layout(W=3, act=torch.bfloat16), [1, 0], backend) for backend in ("torch", "triton"))
        for _ in range(5):
            x = one.draw([1, 0])
            one.decode([1, 0], x=x)
            other.decode([1, 0], x=x)
        for name, x in one.state.buffers._asdict().items():
            if x is not None:
                y = getattr(other.state.buffers, name)
                assert torch.equal(x.isnan(), y.isnan()), name
                if name in ("k", "v"):
                    assert torch.equal(x.nan_to_num(), y.nan_to_num()), name
                else:
                    assert relative_worst(y.nan_to_num(), x.nan_to_num()) < BOUND, name


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_graph_replay_with_moving_cursors(case):
    """One captured step, replayed over changing slots, padding and flushes, equals eager steps bit for bit."""
    layout = case.layout(W=5, act=torch.bfloat16)
    eager, graphed = (Requests(layout, [0, 1, 2, 3], "triton", debug=False) for _ in range(2))
    slots = graphed.tensor([-1, -1, -1])
    x = {n: t.to(DEVICE) for n, t in inputs(layout, 3, eager.generator).items()}

    def step():
        plan = graphed.state.plan(slots)
        o = graphed.state.step(0, plan, **x, **graphed.step_weights)
        graphed.state.commit(plan)
        return o

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    choice = random.Random(0)
    for _ in range(40):
        live = choice.sample([0, 1, 2, 3], 2) + [-1]
        choice.shuffle(live)
        new = eager.draw(live)
        expected = eager.decode(live, x=new)
        slots.copy_(eager.tensor(live))
        for name, one in new.items():
            x[name].copy_(one)
        graph.replay()
        assert torch.equal(o.cpu(), expected)
    for a, b in zip(
        (*eager.state.buffers, *eager.state.cursors), (*graphed.state.buffers, *graphed.state.cursors), strict=True
    ):
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())
    eager.check(2e-3, output_rounding=2**-8)
