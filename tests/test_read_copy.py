"""Steps with low-precision checkpoints and read copies: what reaches the recurrence, what only a readout, and how far off."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from replayssm import ReplayState, formats
from replayssm.layout import STORED
from tests.cases import FAMILY, relative
from tests.harness import BACKENDS, DEVICE, Requests, fill_nan, rows

TINY = {name: dataclasses.replace(case, H=1, G=1, V=16, K=32) for name, case in FAMILY.items()}
PAIRS = [
    *((state, None) for state in ("bf16", "fp16", "fp16+sr", "e4m3", "e4m3+sr", "int8", "nvfp4")),
    *(("fp32", read) for read in formats.READ),
    ("fp16+sr", "nvfp4"),
    ("e4m3+sr", "int8:row"),
    ("e4m3+sr:row", "nvfp4"),
]
FEW = [("fp16+sr", "nvfp4"), ("e4m3+sr", None)]
READ = ("read", "read_scale", "read_row_scale")
# (family, tokens a step, backend): the interpreter is slow, so of it only what another kernel or another row of the table is
STEPS = [(name, T, "torch") for name in ("mamba2", "gdn", "kda") for T in (1, 3)]
STEPS += [
    pytest.param(name, T, *BACKENDS[1].values, marks=BACKENDS[1].marks) for name, T in (("mamba2", 1), ("gdn", 1), ("kda", 3))
]


def cast_error(one: formats.Format, s: Tensor) -> float:
    """Relative error of one cast of these states."""
    draws = torch.rand(s.shape, generator=torch.Generator().manual_seed(0)) if one.stochastic else None
    return relative(one.decode(one.encode(s, draws)), s)


def check(run: Requests) -> None:
    """Errors against fp64, in units of a cast's own error.

    The recurrence does not amplify what a cast leaves behind, and casts err independently: after n of them a state is off by
    sqrt(n) casts of its format, and outputs by that and one cast of what they read. A half more, since states differ in shape.
    """
    layout = run.layout
    states = run.state.materialize(run.tensor(run.live))[0].cpu()
    truth = [run.oracle(slot) for slot in run.live]
    s, o = torch.stack([s for _, s in truth]), torch.cat([o for o, _ in truth])
    outputs = torch.cat([torch.stack(run.outputs[slot]) for slot in run.live])
    flushes = int(run.state.cursors.flushes.max())
    assert flushes >= 2
    state_bound = 1.5 * math.sqrt(flushes) * cast_error(layout.format, s.float()) + 2e-6
    read_bound = state_bound + 1.5 * cast_error(layout.read_format or layout.format, s.float())
    assert relative(states, s) <= state_bound and relative(outputs, o) <= read_bound


@pytest.mark.parametrize("state, read", PAIRS)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_decode(case, state, read):
    """Staggered rows and padding through several flushes, every family and pair of formats."""
    run = Requests(case.layout(W=3, state=state, read=read), [3, 0], "torch")
    run.decode([3])
    for _ in range(7):
        run.decode([0, -1, 3])
    check(run)


@pytest.mark.parametrize("state, read", [*FEW, ("fp32", "int8"), ("nvfp4", "e4m3:row")])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_backends_agree(name, state, read):
    """The kernels on the same tokens: within the same bounds, and their checkpoints the torch backend's but for ties."""
    if BACKENDS[1].marks[0].args[0]:
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    layout = TINY[name].layout(W=2, state=state, read=read)
    one, other = (Requests(layout, [1, 0], backend) for backend in ("torch", "triton"))
    for _ in range(5):
        x = one.draw([1, -1, 0])
        one.decode([1, -1, 0], x=x)
        other.decode([1, -1, 0], x=x)
    check(other)
    states = [run.layout.format.decode(run.state.buffers.layer(0).checkpoint)[:2].cpu() for run in (one, other)]
    close = (states[0] - states[1]).abs() <= 1e-5 * states[0].abs() + 1e-6
    assert close.float().mean() > 0.99, "the same random bits, so other numbers only where a fold's last bit decides"


def speculate(run: Requests, slots: list[int], T: int) -> None:
    """One step of T tokens a row, all kept."""
    x = [run.draw(slots) for _ in range(T)]
    packed = {name: torch.stack([one[name] for one in x], 1).flatten(0, 1).to(DEVICE) for name in x[0]}
    plan = run.state.plan(run.tensor(slots), t=T)
    o = run.state.step(0, plan, **packed, **run.step_weights).cpu().unflatten(0, (len(slots), T))
    run.state.commit(plan)
    for i, slot in enumerate(slots):
        run.tokens[slot] += [{name: t[i : i + 1] for name, t in one.items()} for one in x]
        run.outputs[slot] += [*o[i]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, state, read",
    [("mamba2", "fp16+sr", "nvfp4"), ("gdn", "fp16+sr", "nvfp4"), ("gdn", "e4m3+sr", "int8"), ("kda", "e4m3+sr", "int8")],
)
def test_verify(name, state, read, backend):
    """Four tokens a step through several flushes."""
    run = Requests(TINY[name].layout(W=6, T_max=4, state=state, read=read), [0, 1], backend)
    for _ in range(4):
        speculate(run, [0, 1], 4)
    check(run)


def steps(run: Requests, T: int, n: int, before=lambda i, flush: None) -> None:
    """n steps of T tokens of slots 0 and 1; before(i, whether slot 0 flushes) comes ahead of each."""
    for i in range(n):
        before(i, int(run.state.cursors.count[0]) + T > run.layout.W)
        if T > 1:
            speculate(run, [0, 1], T)
        else:
            run.decode([0, 1])


@pytest.mark.parametrize("name, T, backend", STEPS)
def test_checkpoints_do_not_depend_on_the_read_copy(name, T, backend):
    """With a copy, with another, without any, and with a copy destroyed before every step: the same checkpoint bit for bit."""
    runs, copies = {}, ("int8", "nvfp4", None, "destroyed")
    for read in copies:
        layout = TINY[name].layout(W=2 * T, T_max=T, state="fp16+sr", read="int8" if read == "destroyed" else read)
        run = runs[read] = Requests(layout, [0, 1], backend)

        def destroy(i, flush, run=run):
            for field in READ:
                x = getattr(run.state.buffers, field)
                if x is not None:
                    rows(x).copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).mul(9).to(x.dtype))

        steps(run, T, 5, destroy if read == "destroyed" else lambda i, flush: None)
        assert int(run.state.cursors.flushes[0]) == 2
    outputs = [torch.stack(runs[read].outputs[0]) for read in copies]
    assert not any(torch.equal(outputs[0], o) for o in outputs[1:]), "the copies must be seen by readouts"
    for read in copies[1:]:
        assert torch.equal(runs["int8"].state.buffers.state[:, :2], runs[read].state.buffers.state[:, :2]), read
        slots = runs[read].tensor([0, 1])
        assert torch.equal(runs["int8"].state.materialize(slots), runs[read].state.materialize(slots)), read


@pytest.mark.parametrize("name, T, backend", STEPS)
def test_readouts_read_the_copy_alone(name, T, backend):
    """NaN in the checkpoint until it is folded: no output between flushes knows of it."""
    layout = TINY[name].layout(W=2 * T, T_max=T, state="e4m3+sr", read="nvfp4", stagger=False)
    clean, poisoned = (Requests(layout, [0, 1], backend) for _ in range(2))
    kept: dict[str, Tensor] = {}

    def poison(i, flush):
        for field in ("state", "state_scale"):
            x = getattr(poisoned.state.buffers, field)
            if flush:
                rows(x).copy_(kept.pop(field))
            elif field not in kept:
                kept[field] = rows(x).clone()
                fill_nan(x)

    steps(clean, T, 4)
    steps(poisoned, T, 4, poison)
    for slot in (0, 1):
        assert torch.equal(torch.stack(clean.outputs[slot]), torch.stack(poisoned.outputs[slot]))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state, read", [("e4m3+sr", None), ("fp32", "nvfp4")])
def test_a_flush_step_reads_what_its_flush_stored(state, read, backend, T):
    """Outputs are as exact as what is stored, from the step on whose flush stored it first."""
    run = Requests(TINY["gdn"].layout(W=2 * T, T_max=T, state=state, read=read), [0, 1], backend)
    steps(run, T, 4)
    error = [relative(torch.stack(run.outputs[0][i * T : i * T + T]), run.oracle(0)[0][i * T : i * T + T]) for i in range(4)]
    assert min(error[2:]) > 1e-3
    assert all(e > 1e-3 if read else e < 2e-6 for e in error[:2])


# ---- between steps -------------------------------------------------------------------------------------------------------


def split(backend: str, name: str = "kda", slots: int = 4) -> Requests:
    layout = TINY[name].layout(W=2, state="fp16+sr", read="nvfp4", seed=5)
    run = Requests(layout, [2, 0], backend, poison=False, state_slots=slots)
    run.state.cursors.key[:] = torch.arange(slots) + 2**35
    return run


def stored(state: ReplayState, slots: list[int]) -> list[Tensor]:
    return [rows(x)[:, slots].clone() for x in state.buffers if x is not None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_moved_request_goes_on_bit_for_bit(backend):
    """Exported and imported to another slot of another state, or copied: key and flush count travel, so do the random bits."""
    here, there = split(backend), split(backend)
    for _ in range(4):
        here.decode([2, 0])
    exported = here.state.export(here.tensor([2]))
    assert {"read", "read_scale", "read_row_scale"} <= set(exported.tensors)
    there.state.import_(there.tensor([3]), exported)
    here.state.copy(here.tensor([2]), here.tensor([1]))
    for run, slot in ((here, 1), (there, 3)):
        run.tokens[slot], run.outputs[slot] = [], []
    for _ in range(3):
        x = here.draw([2])
        for run, slot in ((here, 2), (here, 1), (there, 3)):
            run.decode([slot], x=x)
    expected = stored(here.state, [2])
    for run, slot in ((here, 1), (there, 3)):
        assert all(torch.equal(a, b) for a, b in zip(expected, stored(run.state, [slot]), strict=True))
    assert torch.equal(here.state.materialize(here.tensor([2])), there.state.materialize(there.tensor([3])))
    here.state.cursors.key[1] += 1
    for _ in range(2):
        x = here.draw([2])
        for slot in (1, 2):
            here.decode([slot], x=x)
    assert not torch.equal(here.state.buffers.state[0, 1], here.state.buffers.state[0, 2]), "another key, other bits"


@pytest.mark.parametrize("backend", BACKENDS)
def test_fold_and_materialize(backend):
    """A fold writes both formats of the state that materialize gives; a cursor at any count; other slots untouched."""
    run = split(backend)
    for _ in range(4):
        run.decode([2, 0])
    layout, slots, others = run.layout, run.tensor([-1, 2]), stored(run.state, [0, 1, 3])
    exact = run.state.materialize(slots)[:, 1].cpu()
    flushes, key = run.state.cursors.flushes.cpu()[[2]], run.state.cursors.key.cpu()[[2]]
    run.state.fold(slots)
    draws = formats.draws(layout.seed, 0, key, flushes, layout.H, layout.V, layout.K)
    expected = [*layout.format.encode(exact, draws), *layout.read_format.encode(exact)]
    for name, x in zip(STORED, expected, strict=True):
        if x is not None:
            assert torch.equal(rows(x)[0], rows(getattr(run.state.buffers, name)[0, 2]).cpu()), name
    assert all(torch.equal(a, b) for a, b in zip(others, stored(run.state, [0, 1, 3]), strict=True))
    run.decode([2, 0])
    run.decode([0, 2])
    check(run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_and_load_of_a_layer(backend):
    """After a reset both formats decode to zero; layer by layer a load is the load of all."""
    layout = TINY["gdn"].layout(W=2, state="e4m3+sr", read="int8")
    one, whole = (ReplayState(layout, 2, 3, DEVICE, backend) for _ in range(2))
    states = torch.randn(2, 2, layout.H, layout.V, layout.K, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots, keys = torch.tensor([2, 0], device=DEVICE), torch.tensor([5, 2**40], device=DEVICE)
    whole.load(slots, states, keys=keys)
    one.reset(slots, keys)
    for layer in range(2):
        one.load_layer(layer, slots, states[layer])
    assert all(torch.equal(a, b) for a, b in zip(stored(one, [0, 1, 2]), stored(whole, [0, 1, 2]), strict=True))
    one.reset(slots[:1])
    buffers = one.buffers.layer(1)
    assert not layout.format.decode(buffers.checkpoint)[2].any() and not layout.read_format.decode(buffers.copy)[2].any()
    assert layout.read_format.decode(buffers.copy)[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_adopted_buffers(backend):
    """Stored tensors inside an engine's wider slots: the same bits as in our own."""
    layout = TINY["gdn"].layout(W=2, state="e4m3+sr", read="nvfp4")
    wide = {}
    for name, (shape, dtype) in layout.tensors.items():
        heads, *inner = shape
        wide[name] = torch.zeros(1, 5, heads + 1, *inner, dtype=dtype, device=DEVICE)[:, 1:, 1:]
    buffers = layout.allocate(1, 4, DEVICE)._replace(**wide)
    plain, paged = (Requests(layout, [2, 0], backend, buffers=b, state_slots=4, poison=False) for b in (None, buffers))
    for _ in range(4):
        x = plain.draw([2, 0])
        assert torch.equal(plain.decode([2, 0], x=x), paged.decode([2, 0], x=x))
    assert all(torch.equal(a, b) for a, b in zip(stored(plain.state, [0, 2]), stored(paged.state, [0, 2]), strict=True))
