"""The ops that torch.compile sees: schemas that tell the truth, whole engine steps compiled without a graph break."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from replayssm import Conv, ReplayState, ops
from replayssm.layout import STORED
from tests.cases import FAMILY, inputs, weights
from tests.harness import BACKENDS, DEVICE

LAYERS, SLOTS, C = 2, 4, 8
TINY = {name: dataclasses.replace(case, V=16, K=16) for name, case in FAMILY.items()}


class Layers:
    """A small state of two layers with two slots mid-window, and what a step takes; all instances are equal."""

    def __init__(self, case, backend: str, T_max: int = 1, device: str = DEVICE):
        self.layout = case.layout(W=2, T_max=T_max, conv=Conv(C))
        self.generator = torch.Generator().manual_seed(0)
        w = weights(self.layout, self.generator, device)
        derived = self.layout.recurrence.decay == "derived"
        A = w["A"].repeat(LAYERS, 1) if derived else None
        self.weights = w | ({"A": None} if derived else {})
        self.device = device
        self.state = ReplayState(self.layout, LAYERS, SLOTS, device, backend, A=A, debug=False)
        self.filter, self.bias = self.randn(C, 4), self.randn(C)
        self.slots = torch.tensor([2, -1, 0], device=device)
        self.state.load(self.slots, self.states(), conv=self.randn(LAYERS, 3, 3, C))
        self.state.step(0, self.state.plan(self.slots), **self.tokens(3), **self.weights)
        self.state.commit(self.state.plan(self.slots))

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def states(self, rows: int = 3):
        return self.randn(LAYERS, rows, self.layout.H, self.layout.V, self.layout.K)

    def tokens(self, N: int, z: bool = False):
        return inputs(self.layout, N, self.generator, self.device, z)

    def ints(self, *values):
        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def tensors(self):
        return {n: x for n, x in (self.state.buffers._asdict() | self.state.cursors._asdict()).items() if x is not None}


def op_calls(case):
    """(op, its arguments) in the order of an engine's step, with every optional argument given and left out."""
    one = Layers(case, "torch", T_max=2, device="cpu")
    s, end = one.state, (one.layout.spec, "torch")
    rows = torch.zeros(3, len(s.plan(one.slots).rows[0]), dtype=torch.int32)
    parents, tree = one.ints(-1, -1, -1, 0, -1, 0).view(3, 2), torch.zeros(3, 2, 2, dtype=torch.int32)
    yield "plan", (one.slots, None, None, None, None, *s.cursors, rows.clone(), None, 1, *end)
    yield "plan", (one.slots.int(), one.ints(2, 0, 1), one.ints(0, 1, 1), None, None, *s.cursors, rows.clone(), None, 2, *end)
    yield "plan", (one.slots, None, None, one.ints(0, 2, 2, 3), parents, *s.cursors, rows.clone(), tree, 2, *end)
    plan = s.plan(one.slots, t=2, parents=parents)
    x = {"q": None, "k": None, "v": None, "b": None, "a": None, "z": None} | one.tokens(6, z=not case.recurrence.delta)
    w = one.weights if s.A is None else one.weights | {"A": s.A[1]}
    for tree in (None, plan.tree):
        yield "step", (plan.rows, tree, 1, *x.values(), *w.values(), *s.buffers, torch.empty(6, case.H, case.V), 2, *end)
    for bias, tree in ((None, plan.tree), (one.bias, None)):
        lines, out, silu = one.randn(6, C), torch.empty(6, C), bias is None
        yield "conv", (plan.rows, tree, 1, lines, one.filter, bias, s.buffers.conv, out, 2, silu, *end)
    for accepted in (None, one.ints(1, 0, 1)):
        yield "compact", (plan.rows, one.ints(1, 0, 0, 0, 1, 1).view(3, 2), accepted, *s.buffers, s.cursors.pending, *end)
    yield "commit", (plan.rows, None, *s.cursors, *end)
    yield "commit", (plan.rows, one.ints(1, 0, 2), *s.cursors, *end)
    s.commit(plan, one.ints(2, 0, 1), one.ints(0, 1, 0, 0, 0, 0).view(3, 2))
    for n in (None, one.ints(1, 0, 0)):
        yield "materialize", (one.slots, n, *s.buffers, *s.cursors, s.A, one.states(), torch.tensor([1, 0, 2]), *end)
    yield "flush", (s.plan(one.slots, t=0, force=one.ints(1, 0, 1)).rows, *s.buffers, s.A, *end)
    yield "load", (one.states(), *s.buffers[: len(STORED)], s.cursors.key, one.slots, 0, *end)


@pytest.mark.parametrize("case", TINY.values(), ids=str)
def test_opcheck(case):
    """Schema, fake function and dispatch of every op: what is written is declared, nothing else is."""
    every = set(ops._library._op_defs)  # the core's: integrations define more
    for name, args in op_calls(case):
        torch.library.opcheck(getattr(torch.ops.replayssm, name).default, args)
        every.discard(f"replayssm::{name}")
    assert not every, "ops without a check"


def writes(name: str) -> set[str]:
    arguments = getattr(torch.ops.replayssm, name).default._schema.arguments
    return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}


def test_what_ops_declare_written():
    """No more than they write: a buffer declared mutated for nothing costs torch.compile a copy."""
    moved = {"start", "count", "flushes"}
    stored = {f"buffer_{name}" for name in STORED}
    ring = {f"buffer_{name}" for name in ("k", "v", "beta", "g", "u", "gsum", "rnorm")}
    assert {name: writes(name) for name in ("plan", "compact", "commit", "step", "conv", "materialize", "flush", "load")} == {
        "plan": moved | {"pending", "out", "tree"},
        "compact": {"buffer_conv"} | ring,
        "commit": {"count", "pending"},
        "step": {"out"} | ring,
        "conv": {"ring", "out"},
        "materialize": {"target"},
        "flush": stored,
        "load": stored,
    }


@pytest.mark.parametrize(
    "case, backend",
    [
        *((case, "torch") for case in TINY.values()),
        # To torch.compile the backends are the same opaque ops: one family with A kept by the state and one without.
        *(pytest.param(TINY[name], "triton", marks=BACKENDS[1].marks) for name in ("mamba2", "gdn")),
    ],
    ids=str,
)
def test_compiled_steps_equal_eager(case, backend):
    """Whole steps as one graph, over moving cursors; fold, load and copy as another: bit-identical everywhere."""
    T_max = 2 if backend == "torch" else 1
    eager, compiled = (Layers(case, backend, T_max) for _ in range(2))

    def decode(one, slots, force, accepted, x, lines):
        plan = one.state.plan(slots, t=T_max, force=force)
        filtered = one.state.conv(1, plan, lines, one.filter, one.bias)
        o = [one.state.step(layer, plan, **x, **one.weights) for layer in range(LAYERS)]
        one.state.commit(plan, accepted)
        return filtered, torch.stack(o).sum(0), one.state.materialize(slots), one.state.conv_window(slots)

    def draft(one, slots, parents, accepted, path, x, lines):
        plan = one.state.plan(slots, t=T_max, parents=parents)
        filtered = one.state.conv(1, plan, lines, one.filter, one.bias)
        o = [one.state.step(layer, plan, **x, **one.weights) for layer in range(LAYERS)]
        one.state.commit(plan, accepted, path)
        return filtered, torch.stack(o).sum(0), one.state.materialize(slots), one.state.conv_window(slots)

    def replace(one, slots, fresh, states, history):
        one.state.fold(slots)
        one.state.load(fresh, states, conv=history, keys=fresh)
        one.state.copy(fresh, slots[:1])
        return one.state.cursors.key.clone()

    def same(f, *args):
        for x, y in zip(f(eager, *args), compiled_of[f](compiled, *args), strict=True):
            assert torch.equal(x, y)
        for name, x in eager.tensors().items():
            assert torch.equal(x, compiled.tensors()[name]), name

    counter = CompileCounterWithBackend("aot_eager")
    compiled_of = {f: torch.compile(f, fullgraph=True, backend=counter) for f in (decode, draft, replace)}
    before = {name: x.clone() for name, x in compiled.tensors().items()}
    for i, slots in enumerate(([2, -1, 0], [0, 3, -1], [0, 2, 3])):
        x, lines = eager.tokens(3 * T_max), eager.randn(3 * T_max, C)
        same(decode, eager.ints(*slots), eager.ints(0, i == 1, 0), eager.ints(T_max, 1, i == 2), x, lines)
    assert counter.frame_count == 1, "moving cursors must not recompile"
    moved = {"start", "count", "pending", "flushes"}
    changed = {name for name, x in compiled.tensors().items() if not torch.equal(x, before[name])}
    assert changed == (set(before) | moved) - {"key"}
    roots, last = (eager.ints(*row).repeat(3, 1) for row in ([-1] * T_max, [T_max - 1] * T_max))
    x, lines = eager.tokens(3 * T_max), eager.randn(3 * T_max, C)
    same(draft, eager.ints(1, -1, 2), roots, eager.ints(1, 0, 1), last, x, lines)
    counts = compiled.state.cursors.count.clone()
    same(replace, eager.ints(0, -1, 3), eager.ints(1), eager.states(1), eager.randn(LAYERS, 1, 3, C))
    assert counts[[0, 3]].all() and compiled.state.cursors.count.tolist() == [0, 0, int(counts[2]), 0]
    assert compiled.state.cursors.key.tolist() == [1, 1, 0, 0]
    torch._dynamo.reset()
