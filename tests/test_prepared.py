"""Operations kept ready: what was seen is not checked again, what was not is, and a launch made again is the same launch."""

import dataclasses

import pytest
import torch

from replayssm.kernels.prepared import Prepared
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
