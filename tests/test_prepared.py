"""Operations kept ready: what was seen is not checked again, what was not is, and a launch made again is the same launch."""

import dataclasses

import pytest
import torch
import triton

from replayssm.kernels.prepared import Prepared, known, recording
from tests.cases import FAMILY
from tests.harness import BACKENDS, DEVICE, Requests

TINY = dataclasses.replace(FAMILY["gdn"], V=16, K=16)


class Compiled:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    """As Triton's: launched through its own look at the arguments, it gives what it compiled."""

    arg_names = ("x", "n", "pool", "WIDTH", "BLOCK")

    def __init__(self):
        self.looks, self.launches = [], []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.looks.append((grid, args, constants))
            return Compiled(self.launches)

        return launch


def test_launched_again():
    """The first launch is Triton's own; later ones pass the same in the kernel's order, settled tensors as addresses."""
    kernel, x, pool = Kernel(), torch.ones(2), (torch.ones(3), None, 7)
    ready = Prepared(kernel, torch.device("cpu"), (5,), (pool,), BLOCK=16, WIDTH=4, num_warps=2)
    ready((x, 1), 3)
    assert kernel.looks == [((5,), ((x, 1), 3, pool), {"BLOCK": 16, "WIDTH": 4, "num_warps": 2})] and not kernel.launches
    other = torch.zeros(2)
    ready((other, 1), 4)
    assert len(kernel.looks) == 1
    assert kernel.launches == [((5, 1, 1), ((other, 1), 4, (pool[0].data_ptr(), None, 7), 4, 16))]


def test_not_launched_again_while_launches_are_recorded():
    kernel = Kernel()
    ready = Prepared(kernel, torch.device("cpu"), (5,), (1, 2), WIDTH=4, BLOCK=16)
    ready(0)
    with recording:
        ready(0)
    ready(0)
    assert len(kernel.looks) == 2 and len(kernel.launches) == 1


def test_an_unknown_triton_launches_its_own_way(monkeypatch, caplog):
    """Every time, and says so once."""
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    known.cache_clear()
    kernel = Kernel()
    ready = Prepared(kernel, torch.device("cpu"), (5,), (1, 2), WIDTH=4, BLOCK=16)
    for _ in range(3):
        ready(0)
    assert len(kernel.looks) == 3 and not kernel.launches
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith("Triton 9.1.0: not among 3.5, 3.6, 3.7, 3.8")
    known.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spoil, message", [
    (lambda x: x | {"k": x["k"].double()}, r"k: expected .* torch.float32, got .* torch.float64"),
    (lambda x: x | {"v": x["v"][:1]}, r"v: expected \[2, 2, 16\]"),
    (lambda x: x | {"q": x["q"].repeat_interleave(2, -1)[..., ::2]}, "q: expected unit inner stride"),
    (lambda x: x | {"b": None}, r"b: expected \[2, 2\] for gdn, got None"),
    (lambda x: x | {"a": x["a"].to("meta")}, "a: expected device"),
    (lambda x: x | {"out": torch.empty(2, 2, 8, device=DEVICE)}, r"out: expected \[2, 2, 16\]"),
], ids=["dtype", "shape", "stride", "absent", "device", "out"])  # fmt: skip
def test_good_tensors_do_not_hide_bad_ones(spoil, message, backend):
    run = Requests(TINY.layout(W=4), [0, 1], backend)
    slots = run.tensor([0, 1])
    x = {name: one.to(DEVICE) for name, one in run.draw([0, 1]).items()}
    for _ in range(2):
        plan = run.state.plan(slots)
        run.state.step(0, plan, **x, **run.step_weights)
        run.state.commit(plan)
    plan = run.state.plan(slots)
    before = [None if one is None else one.clone() for one in run.state.buffers]
    with pytest.raises(ValueError, match=message):
        run.state.step(0, plan, **spoil(x), **run.step_weights)
    assert all(
        one is None or torch.equal(one.nan_to_num(), old.nan_to_num())
        for one, old in zip(run.state.buffers, before, strict=True)
    )
    with pytest.raises(ValueError, match=r"slots: expected"):
        run.state.plan(slots.float())
    with pytest.raises(ValueError, match=r"accepted: expected \[2\]"):
        run.state.commit(plan, slots[:1])
    run.state.commit(plan)
    ends = run.tensor([0, 1, 1])
    run.state.plan(slots, cu_seqlens=ends)
    with pytest.raises(ValueError, match="t: expected to be left alone with cu_seqlens"):
        run.state.plan(slots, t=0, cu_seqlens=ends)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_many_forms(backend):
    """Strides, alignment and output given or not change from step to step: the same results as from plain tensors."""
    one, other = (Requests(TINY.layout(W=3), [0, 1], backend) for _ in range(2))
    slots, whole = one.tensor([0, 1]), {}
    for i in range(6):
        x = {name: t.to(DEVICE) for name, t in one.draw([0, 1]).items()}
        for name, t in x.items():  # views into wider rows, from elements 0, 1 or 4 on
            whole[name] = torch.full((2, t[0].numel() + 8), float("nan"), dtype=t.dtype, device=DEVICE)
        views = {name: whole[name][:, (0, 1, 4)[i % 3] :][:, : t[0].numel()].view(t.shape) for name, t in x.items()}
        for name, t in views.items():
            t.copy_(x[name])
        out = []
        for run, given in ((one, x), (other, views)):
            plan = run.state.plan(slots)
            to = torch.empty(2, 2, 32, device=DEVICE)[..., 1:17] if i % 2 else None
            out.append(run.state.step(0, plan, **given, **run.step_weights, out=to if run is other else None))
            run.state.commit(plan)
        assert torch.equal(*out)
    for a, b in zip(one.state.buffers, other.state.buffers, strict=True):
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.gpu
def test_what_is_launched_again_is_what_triton_would_choose(monkeypatch):
    """At every launch, by its own look at the arguments."""
    chosen, calls, launch = {}, [], Prepared._launch

    def checked(self, args):
        named = args if self.named is None else self.named(*args)
        found = self.kernel.run(*named, *self.settled, grid=self.grid, warmup=True, **self.constants)
        assert chosen.setdefault(self, found) is found
        calls.append(self)
        launch(self, args)

    monkeypatch.setattr(Prepared, "_launch", checked)
    test_tensors_of_many_forms("triton")
    assert len(calls) > 2 * len(chosen)


@pytest.mark.gpu
def test_steps_allocate_nothing():
    """Into a caller's output, once every form was seen."""
    run = Requests(TINY.layout(W=3), [0, 1], "triton", debug=False)  # whose checks would allocate
    slots, out = run.tensor([0, 1]), torch.empty(2, 2, 16, device=DEVICE)
    x = {name: one.to(DEVICE) for name, one in run.draw([0, 1]).items()}
    found = []
    for _ in range(8):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        plan = run.state.plan(slots)
        run.state.step(0, plan, **x, **run.step_weights, out=out)
        run.state.commit(plan)
        found.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert found[1:] == [0] * 7


@pytest.mark.gpu
def test_launched_on_the_current_stream():
    """A step launched again waits for what its own stream does before, not for the stream of the first launch."""
    run = Requests(TINY.layout(W=3), [0, 1], "triton")
    slots, side = run.tensor([0, 1]), torch.cuda.Stream()
    x = {name: one.to(DEVICE) for name, one in run.draw([0, 1]).items()}
    late = {name: torch.empty_like(one) for name, one in x.items()}
    outputs = []
    for stream in (torch.cuda.current_stream(), side):
        torch.cuda.synchronize()
        run.state.reset(slots)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for name, one in x.items():
                late[name].copy_(one)
            plan = run.state.plan(slots)
            outputs.append(run.state.step(0, plan, **late, **run.step_weights).clone())
            run.state.commit(plan)
            for one in late.values():
                one.zero_()
    torch.cuda.synchronize()
    assert torch.equal(*outputs) and bool(outputs[0].any())
