"""The state between steps: materialize at any position, fold, load, copy, reset, export and import."""

from __future__ import annotations

import pytest
import torch

from replayssm import Conv, ReplayState
from tests.cases import FAMILY, inputs, weights
from tests.harness import BACKENDS, DEVICE, Requests, relative_worst, rows

BOUND = 2e-5
LAYERS = 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_materialize_at_every_position(case, backend):
    """The exact state after any n <= count records, also in the ring's wrapped part; the live slot stays as it was."""
    W = 4
    run = Requests(case.layout(W=W), [2, 0], backend)
    for _ in range(W + 3):
        run.decode([2, 0])
    before = [None if x is None else x.clone() for x in (*run.state.buffers, *run.state.cursors)]
    count = int(run.state.cursors.count[2])
    folded = W + 3 - count
    for n in range(count + 1):
        states = run.state.materialize(run.tensor([0, 2]), n=run.tensor([count, n]))
        assert relative_worst(states[0, 1].cpu(), run.oracle(2, tokens=folded + n)[1]) < BOUND
        assert relative_worst(states[0, 0].cpu(), run.oracle(0)[1]) < BOUND
    for x, y in zip(before, (*run.state.buffers, *run.state.cursors), strict=True):
        assert x is None or torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_fold_then_decode(case, backend):
    """A fold leaves an empty ring and the exact state, equal to a materialized one bit for bit; decoding goes on from it."""
    run = Requests(case.layout(W=4, stagger=False), [1, 3], backend)
    for _ in range(3):
        run.decode([1, 3])
    slots = run.tensor([-1, 3])
    expected = run.state.materialize(slots)[0, 1]
    run.state.fold(slots)
    assert torch.equal(run.state.buffers.state[0, 3].float(), expected)
    assert run.state.cursors.count.tolist()[1::2] == [3, 0] and run.state.cursors.flushes.tolist()[1::2] == [0, 1]
    for _ in range(5):
        run.decode([3, 1])
    run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
def test_materialize_into_a_callers_tensor(backend):
    """Chosen rows of a strided bf16 target are written, the others and those of padding stay."""
    run = Requests(FAMILY["gdn"].layout(W=4), [1, 0], backend)
    for _ in range(3):
        run.decode([1, 0])
    H, V, K = run.layout.H, run.layout.V, run.layout.K
    target = torch.full((1, 5, H + 1, V, K), 7.0, dtype=torch.bfloat16, device=DEVICE)[:, :, 1:]
    run.state.materialize(run.tensor([1, -1, 0, 0]), target=target, to_slots=run.tensor([4, 0, -1, 2]))
    assert (target[0, [0, 1, 3]] == 7).all()
    for row, slot in ((4, 1), (2, 0)):
        assert relative_worst(target[0, row].float().cpu(), run.oracle(slot)[1], rounding=2**-7) < BOUND


def model(case, backend, slots: int = 5, **kwargs) -> ReplayState:
    """A state of several layers with a convolution, filled with finite noise."""
    layout = case.layout(conv=Conv(24, 3), **{"W": 3} | kwargs)
    generator = torch.Generator().manual_seed(1)
    A = -torch.rand(LAYERS, layout.H, generator=generator).to(DEVICE) if layout.recurrence.decay == "derived" else None
    state = ReplayState(layout, LAYERS, slots, DEVICE, backend, A=A, debug=True)
    for x in state.buffers:
        if x is not None:
            x.copy_(torch.rand(x.shape, generator=generator) - 1)
    state.cursors.start.copy_(torch.tensor([0, 3, 1, 2, 0])[:slots])
    state.cursors.count.copy_(torch.tensor([3, 2, 0, 1, 3])[:slots])
    state.cursors.flushes.copy_(torch.arange(slots) + 10)
    state.cursors.key.copy_(torch.arange(slots) + 2**40)
    return state


def tensors(state: ReplayState, slots: list[int]) -> list[torch.Tensor]:
    """Everything these slots are."""
    return [rows(x)[:, slots].clone() for x in state.buffers if x is not None] + [x[slots].clone() for x in state.cursors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_every_layer_at_once(case, backend):
    """Fold and materialize of all layers agree with each other; other slots keep every bit."""
    state = model(case, backend)
    slots = torch.tensor([3, 0, 4], device=DEVICE)
    others = tensors(state, [1, 2])
    expected = state.materialize(slots)
    assert expected.shape[0] == LAYERS and not torch.equal(expected[0], expected[1])
    state.fold(slots)
    assert torch.equal(state.buffers.state[:, slots].float(), expected)
    assert all(torch.equal(x, y) for x, y in zip(others, tensors(state, [1, 2]), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_copy_moves_everything(case, backend):
    """Checkpoint, ring, convolution and cursors as one unit; permutations and padding; a prefix hit brings its ring along."""
    state = model(case, backend)
    before = tensors(state, [0, 1, 2, 3, 4])
    state.copy(torch.tensor([1, 0, -1, 4], device=DEVICE), torch.tensor([0, 1, 3, 2], device=DEVICE))
    after = tensors(state, [0, 1, 2, 3, 4])
    for x, y in zip(before, after, strict=True):
        x, y = (x, y) if x.dim() == 1 else (x.transpose(0, 1), y.transpose(0, 1))
        assert torch.equal(y, x[[1, 0, 4, 3, 4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_of_padding_alone_changes_nothing(backend):
    state = model(FAMILY["gdn"], backend)
    before = tensors(state, [0, 1, 2, 3, 4])
    for src, dst in (([-1, -1], [0, 1]), ([0, 1], [-1, -1]), ([], [])):
        state.copy(*(torch.tensor(x, device=DEVICE, dtype=torch.int32) for x in (src, dst)))
    assert all(torch.equal(x, y) for x, y in zip(before, tensors(state, [0, 1, 2, 3, 4]), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_export_and_import(case, backend):
    """A request moved through the host to another slot of another state is the same request, bit for bit.

    Ring rows that are not its own stay behind: they may be a former request's.
    """
    state, other = model(case, backend), model(case, backend)
    exported = state.export(torch.tensor([3, 0], device=DEVICE))
    assert all(not x.is_cuda for x in exported.tensors.values())
    for x in other.buffers:
        if x is not None:
            x.fill_(float("nan"))
    other.import_(torch.tensor([1, 4], device=DEVICE), exported)
    slots = torch.tensor([1, 4], device=DEVICE)
    again = other.export(slots)
    assert all(torch.equal(x, again.tensors[name]) for name, x in exported.tensors.items())
    assert torch.equal(exported.tensors["state"].to(DEVICE), state.buffers.state[:, [3, 0]])
    for row, slot in enumerate((3, 0)):
        at = [(int(state.cursors.start[slot]) + i) % state.layout.R for i in range(int(state.cursors.count[slot]))]
        dead = [i for i in range(state.layout.R) if i not in at]
        for name in ("k", "v", "beta", "g", "u", "gsum", "rnorm"):
            x = exported.tensors.get(name)
            if x is not None:
                assert torch.equal(x[:, row, :, at].to(DEVICE), getattr(state.buffers, name)[:, slot, :, at])
                assert not x[:, row, :, dead].any()
    assert torch.equal(other.conv_window(slots), state.conv_window(torch.tensor([3, 0], device=DEVICE)))
    there = state.materialize(torch.tensor([3, 0], device=DEVICE))
    assert torch.equal(other.materialize(slots), there)
    wrong = model(case, backend, W=2)
    with pytest.raises(ValueError, match="exported: expected at most W = 2 live records"):
        wrong.import_(slots, exported)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_a_reused_slot_starts_anew(case, backend):
    """After load or reset nothing of the slot's predecessor is left to see, though its ring holds NaN."""
    run = Requests(case.layout(W=3), [1, 2], backend)
    for _ in range(5):
        run.decode([1, 2])
    for x in run.state.buffers:
        if x is not None:
            x[0, 1] = float("nan")
    run.state.load(
        run.tensor([-1, 1]),
        torch.stack([run.initial[1] + 1, run.initial[0]])[None].to(DEVICE),
        keys=torch.tensor([5, 6], device=DEVICE),
    )
    assert int(run.state.cursors.key[1]) == 6 and int(run.state.cursors.flushes[1]) == 0
    run.tokens[1], run.outputs[1] = [], []
    for _ in range(4):
        run.decode([2, 1])
    run.check(BOUND)

    run.state.reset(run.tensor([2]))
    run.initial[1], run.tokens[2], run.outputs[2] = 0.0, [], []
    for _ in range(4):
        run.decode([1, 2])
    run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
def test_load_of_one_layer_and_of_all(backend):
    """Layer by layer, as prefill hands states over, equals all at once."""
    one, whole = (model(FAMILY["kda"], backend) for _ in range(2))
    slots = torch.tensor([4, 1], device=DEVICE)
    layout = one.layout
    states = torch.randn(LAYERS, 2, layout.H, layout.V, layout.K, device=DEVICE)
    conv = torch.randn(LAYERS, 2, 2, 24, device=DEVICE)
    for state in (one, whole):
        state.reset(slots)
    whole.load(slots, states, conv=conv)
    for layer in range(LAYERS):
        one.load_layer(layer, slots, states[layer], conv[layer])
    assert all(torch.equal(x, y) for x, y in zip(tensors(one, [0, 1, 2, 3, 4]), tensors(whole, [0, 1, 2, 3, 4]), strict=True))
    assert torch.equal(whole.conv_window(slots), conv)
    assert torch.equal(whole.materialize(slots), states)


@pytest.mark.parametrize("formats", [{}, {"state": "e4m3+sr", "read": "int8"}], ids=lambda formats: "-".join(formats.values()))
@pytest.mark.parametrize("backend", BACKENDS)
def test_load_of_a_layer_while_a_step_is_pending(backend, formats):
    """A prefill that hands its last tokens over as a step: each layer loads, then runs, under the first layer's plan."""
    case = FAMILY["gdn"]
    layout, generator = case.layout(W=4, T_max=2), torch.Generator().manual_seed(0)
    one, whole = (ReplayState(layout, LAYERS, 3, DEVICE, backend, debug=True) for _ in range(2))
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    states = torch.randn(LAYERS, 3, layout.H, layout.V, layout.K, generator=generator).to(DEVICE)
    x = inputs(layout, 6, generator, DEVICE) | weights(layout, generator, DEVICE)
    whole.load(slots, states)
    plan = whole.plan(slots, 2)
    expected = [whole.step(layer, plan, **x) for layer in range(LAYERS)]
    whole.commit(plan)
    for layer in range(LAYERS):
        one.load_layer(layer, slots, states[layer])
        plan = one.plan(slots, 2) if layer == 0 else plan
        assert torch.equal(one.step(layer, plan, **x), expected[layer])
    one.commit(plan)
    assert all(torch.equal(a, b) for a, b in zip(tensors(one, [0, 1, 2]), tensors(whole, [0, 1, 2]), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_move_takes_everything_and_releases(backend):
    """As a copy, and sources that nothing moved into are empty; chains and swaps too."""
    state = model(FAMILY["gdn"], backend)
    before, others = tensors(state, [0, 1, 2]), tensors(state, [4])
    state.move(torch.tensor([0, -1, 1, 2], device=DEVICE), torch.tensor([3, 4, 0, 1], device=DEVICE))
    assert all(torch.equal(x, y) for x, y in zip(before, tensors(state, [3, 0, 1]), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(others, tensors(state, [4]), strict=True))
    assert [int(x[2]) for x in (state.cursors.start, state.cursors.count, state.cursors.flushes)] == [0, 0, 0]
    swapped = tensors(state, [1, 0])
    state.move(torch.tensor([0, 1], device=DEVICE), torch.tensor([1, 0], device=DEVICE))
    assert all(torch.equal(x, y) for x, y in zip(swapped, tensors(state, [0, 1]), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_an_engine_that_owns_checkpoints_writes_and_moves_them(case, backend):
    """Adopted states are those that were written in place; where the engine moved a checkpoint, all else follows it."""
    run = Requests(case.layout(W=4), [1, 2], backend)
    state, keys = run.state, torch.tensor([7, 8], device=DEVICE)
    for _ in range(3):
        run.decode([1, 2])
    state.buffers.state[:, [1, 2]] = run.initial[None].to(DEVICE)
    state.adopt(run.tensor([1, 2]), keys)
    run.tokens, run.outputs = {1: [], 2: []}, {1: [], 2: []}
    assert not any(x[[1, 2]].any() for x in state.cursors[:2]) and state.cursors.key[[1, 2]].equal(keys)
    for _ in range(3):
        run.decode([2, 1])
    moved = state.buffers.state[:, 2].clone()
    state.buffers.state[:, 3], state.buffers.state[:, 2] = moved, float("nan")
    state.move(run.tensor([2]), run.tensor([3]), checkpoint=False)
    assert torch.equal(state.buffers.state[:, 3], moved)
    run.live, run.tokens[3], run.outputs[3] = [1, 3], run.tokens.pop(2), run.outputs.pop(2)
    for _ in range(4):
        run.decode([3, 1])
    run.check(BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_a_request_aborted_in_the_midst_of_a_step(case, backend):
    """Its slot's next request sees nothing of it, of NaN among its inputs, or of the step's late commit."""
    run = Requests(case.layout(W=3, T_max=2), [1, 2], backend)
    for _ in range(2):
        run.decode([1, 2])
    plan = run.state.plan(run.tensor([1, 2]))
    x = run.draw([1, 2])
    given = {name: one.clone() for name, one in x.items()}
    for one in given.values():
        one[0] = float("nan")
    o = run.state.step(0, plan, **{n: one.to(DEVICE) for n, one in given.items()}, **run.step_weights).cpu()
    run.state.release(run.tensor([-1, 1, 1]))  # given to two requests that never ran
    run.state.load(run.tensor([1]), run.initial[:1][None].to(DEVICE))
    run.state.commit(plan)
    run.tokens[1], run.outputs[1] = [], []
    run.tokens[2].append({name: one[1:] for name, one in x.items()})
    run.outputs[2].append(o[1])
    assert run.state.cursors.count.tolist()[1:3] == [0, 3]
    for _ in range(4):
        run.decode([2, 1])
    run.check(BOUND)
