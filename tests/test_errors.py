"""Every refusal: an error that names the argument, what was expected and what came, and not a bit written before it."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm import Buffers, Conv, ReplayState
from tests.cases import FAMILY, inputs, weights
from tests.harness import DEVICE, GPU

LAYERS, SLOTS, W, T_MAX, C = 2, 4, 3, 2, 8
META = torch.device("meta")


class Engine:
    """A state of two layers with random contents, its slots mid-window, and good arguments for every call."""

    def __init__(self, family: str, debug: bool, backend: str = "torch"):
        case, self.generator = FAMILY[family], torch.Generator().manual_seed(0)
        self.layout = case.layout(W=W, T_max=T_MAX, conv=Conv(C))
        self.w = weights(self.layout, self.generator, DEVICE)
        A = None
        if self.layout.recurrence.decay == "derived":
            A, self.w["A"] = self.w["A"].repeat(LAYERS, 1), None
        self.state = ReplayState(self.layout, LAYERS, SLOTS, DEVICE, backend, A=A, debug=debug)
        for x in self.state.buffers:
            if x is not None:
                x.copy_(self.randn(*x.shape))
        self.slots = self.ints(2, -1, 0)
        self.x = inputs(self.layout, 3, self.generator, DEVICE)
        self.lines, self.filter = self.randn(3, C), self.randn(C, 4)
        self.states, self.history = self.randn(LAYERS, 3, case.H, case.V, case.K), self.randn(LAYERS, 3, 3, C)
        self.state.commit(self.state.plan(self.slots))
        self.exported = self.state.export(self.ints(2, 0))

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def table(self, columns=T_MAX):
        return self.ints(*[-1] * 3 * columns).view(3, columns)

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in (*self.state.buffers, *self.state.cursors) if x is not None]

    def __getattr__(self, name):
        return getattr(self.state, name)

    def refuses(self, error, message, call):
        """The call raises this, and no buffer or cursor changes."""
        before = [x.clone() for x in self.tensors()]
        with pytest.raises(error, match=message):
            call()
        assert all(torch.equal(x, y) for x, y in zip(before, self.tensors(), strict=True)), "written before the check"

    def step(self, layer=0, out=None, **change):
        return self.state.step(layer, self.now, **{**self.x, **self.w, **change}, out=out)

    def conv(self, layer=0, **change):
        return self.state.conv(layer, self.now, **{"x": self.lines, "weight": self.filter, **change})

    def load(self, slots=None, **change):
        given = {"states": self.states, "conv": self.history, **change}
        self.state.load(self.slots if slots is None else slots, **given)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of the innermost dimension."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def expectation(argument: str, fragment: str) -> str:
    return rf"^{re.escape(argument)}: expected .*{re.escape(fragment)}"


# ---- calls between steps: (argument named, what the message holds, the call); e is the Engine -----------------------

BETWEEN = [
    ("slots", "torch.int32 or torch.int64, got [3] torch.float32", lambda e: e.plan(e.slots.float())),
    ("slots", "got [1, 3] torch.int32", lambda e: e.plan(e.slots[None])),
    ("slots", "device", lambda e: e.plan(e.slots.to(META))),
    ("slots", "unit inner stride, got strides (2,)", lambda e: e.plan(strided(e.slots))),
    ("slots", "at most max_rows = 4 rows, got 5", lambda e: e.plan(e.ints(0, 1, 2, 3, -1))),
    ("t", "0 ... T_max = 2, got 3", lambda e: e.plan(e.slots, t=3)),
    ("t", "0 ... T_max = 2, got -1", lambda e: e.plan(e.slots, t=-1)),
    ("t", "[3] torch.int32 or torch.int64, got [2] torch.int32", lambda e: e.plan(e.slots, t=e.ints(1, 1))),
    ("t", "got [3] torch.float32", lambda e: e.plan(e.slots, t=e.ints(1, 1, 1).float())),
    ("t", "got meta", lambda e: e.plan(e.slots, t=e.ints(1, 1, 1).to(META))),
    ("force", "[3] torch.bool or torch.int32 or torch.int64, got [1]", lambda e: e.plan(e.slots, force=e.ints(1))),
    ("force", "got [3] torch.float32", lambda e: e.plan(e.slots, force=e.ints(1, 1, 1).float())),
    ("cu_seqlens", "[4] torch.int32 or torch.int64, got [3]", lambda e: e.plan(e.slots, cu_seqlens=e.ints(0, 1, 2))),
    ("t", "to be left alone with cu_seqlens", lambda e: e.plan(e.slots, t=2, cu_seqlens=e.ints(0, 1, 1, 2))),
    ("t", "to be left alone with cu_seqlens", lambda e: e.plan(e.slots, t=e.slots, cu_seqlens=e.ints(0, 1, 1, 2))),
    ("parents", "[3, 2] torch.int32 or torch.int64, got [3] torch.int32", lambda e: e.plan(e.slots, parents=e.slots)),
    ("parents", "got [3, 2] torch.float32", lambda e: e.plan(e.slots, parents=e.table().float())),
    ("parents", "contiguous [B, T_max], got strides (4, 1)", lambda e: e.plan(e.slots, parents=e.table(4)[:, :2])),
    ("parents", "got meta", lambda e: e.plan(e.slots, parents=e.table().to(META))),
    ("slots", "got [3] torch.float32", lambda e: e.fold(e.slots.float())),
    ("slots", "device", lambda e: e.fold(e.slots.to(META))),
    ("n", "[3] torch.int32 or torch.int64, got [2] torch.int32", lambda e: e.materialize(e.slots, n=e.ints(0, 0))),
    ("n", "got [3] torch.float32", lambda e: e.materialize(e.slots, n=e.slots.float())),
    ("target", "[L, B, H, V, K] with H, V, K = [2, 32, 32], got", lambda e: e.materialize(e.slots, target=e.states[0])),
    ("target", "[2, at least 3, ...], got [1, 3, 2, 32, 32]", lambda e: e.materialize(e.slots, target=e.states[:1])),
    ("target", "[2, at least 3, ...], got [2, 2, 2, 32, 32]", lambda e: e.materialize(e.slots, target=e.states[:, :2])),
    ("target", "fp32, bf16 or fp16, got torch.float64", lambda e: e.materialize(e.slots, target=e.states.double())),
    ("target", "contiguous [V, K], got strides", lambda e: e.materialize(e.slots, target=e.states.mT)),
    ("target", "got meta", lambda e: e.materialize(e.slots, target=e.states.to(META))),
    ("target", "a tensor where to_slots says its rows, got None", lambda e: e.materialize(e.slots, to_slots=e.slots)),
    ("to_slots", "torch.int32 or torch.int64, got [1]", lambda e: e.materialize(e.slots, None, e.states, e.ints(0))),
    ("to_slots", "got [3] torch.float32", lambda e: e.materialize(e.slots, None, e.states, e.slots.float())),
    ("n", "got [2] torch.int32", lambda e: e.conv_window(e.slots, e.ints(0, 0))),
    ("slots", "got [3] torch.float32", lambda e: e.load(e.slots.float())),
    ("states", "with H, V, K = [2, 32, 32], got [2, 3, 2, 32, 16]", lambda e: e.load(states=e.states[..., :16])),
    ("states", "fp32, bf16 or fp16, got torch.int32", lambda e: e.load(states=e.states.int())),
    ("states", "contiguous [V, K], got strides", lambda e: e.load(states=e.states.mT)),
    ("states", "got meta", lambda e: e.load(states=e.states.to(META))),
    ("states", "[2, 3, ...], got [2, 2, 2, 32, 32]", lambda e: e.load(states=e.states[:, :2])),
    ("states", "[1, 3, ...], got [1, 2, 2, ", lambda e: e.load_layer(0, e.ints(1, -1, 3), e.states[0, :2], e.history[0])),
    ("layer", "0 ... 1, got 2", lambda e: e.load_layer(2, e.ints(1, -1, 3), e.states[0], e.history[0])),
    ("layer", "0 ... 1, got -1", lambda e: e.load_layer(-1, e.ints(1, -1, 3), e.states[0], e.history[0])),
    ("conv", "[L, B, width - 1, C], got None", lambda e: e.load(conv=None)),
    ("conv", "[2, 3, 3, 8] torch.float32", lambda e: e.load(conv=e.history[:, :, :2])),
    ("conv", "got [2, 2, 3, 8] torch.float32", lambda e: e.load(conv=e.history[:, :2])),
    ("conv", "got [2, 3, 3, 8] torch.int64", lambda e: e.load(conv=e.history.long())),
    ("conv", "got meta", lambda e: e.load(conv=e.history.to(META))),
    ("keys", "[3] torch.int32 or torch.int64, got [2] torch.int32", lambda e: e.load(keys=e.ints(0, 0))),
    ("keys", "got [3] torch.float32", lambda e: e.load(keys=e.slots.float())),
    ("keys", "got [2] torch.int32", lambda e: e.reset(e.slots, e.ints(0, 0))),
    ("src", "got [3] torch.float32", lambda e: e.copy(e.slots.float(), e.slots)),
    ("dst", "3 slots as in src, got 2", lambda e: e.copy(e.slots, e.ints(1, 3))),
    ("dst", "device", lambda e: e.copy(e.slots, e.slots.to(META))),
    ("slots", "live slots, got [2, -1, 0]", lambda e: e.export(e.slots)),
    ("exported", "[2, 1, ...], got [2, 2, ", lambda e: e.import_(e.ints(1), e.exported)),
    ("exported", "layout.recurrence Recurrence(name='gdn'", lambda e: e.import_(e.ints(1, 3), Engine("kda", False).exported)),
]  # fmt: skip

# ---- calls under a plan of e.slots, one token each ------------------------------------------------------------------

DURING = [
    *(
        (name, fragment, lambda e, name=name, change=change: e.step(**{name: change(e.x[name])}))
        for name in ("q", "k", "v")
        for fragment, change in (
            ("torch.float32, got [2, ", lambda x: x[:2]),
            ("torch.float32, got [3, ", lambda x: x.bfloat16()),
            ("unit inner stride, got strides", strided),
            ("got meta", lambda x: x.to(META)),
            ("32] torch.float32, got [3, ", lambda x: x[..., :16]),
        )
    ),
    ("v", "[3, 2, 32] for gdn, got None", lambda e: e.step(v=None)),
    ("b", "[3, 2] for gdn, got None", lambda e: e.step(b=None)),
    ("b", "torch.bfloat16 or torch.float16, got [3, 2] torch.int64", lambda e: e.step(b=e.x["b"].long())),
    ("a", "[3, 2] for gdn, got None", lambda e: e.step(a=None)),
    ("a", "got [3, 1] torch.float32", lambda e: e.step(a=e.x["a"][:, :1])),
    ("a", "unit inner stride, got strides", lambda e: e.step(a=strided(e.x["a"]))),
    ("z", "[3, 2, 32] torch.float32, got [3, 2, 32] torch.float16", lambda e: e.step(z=e.x["v"].half())),
    ("A", "[2] for gdn, got None", lambda e: e.step(A=None)),
    ("A", "[2] torch.float32, got [2] torch.bfloat16", lambda e: e.step(A=e.w["A"].bfloat16())),
    ("A", "got [1] torch.float32", lambda e: e.step(A=e.w["A"][:1])),
    ("A", "got strides (2,)", lambda e: e.step(A=strided(e.w["A"]))),
    ("dt_bias", "got [2, 32] torch.float32", lambda e: e.step(dt_bias=torch.zeros(2, 32, device=DEVICE))),
    ("dt_bias", "got [2] torch.int32", lambda e: e.step(dt_bias=e.ints(0, 0))),
    ("D", "got [2, 1] torch.float32", lambda e: e.step(D=torch.zeros(2, 1, device=DEVICE))),
    ("D", "got meta", lambda e: e.step(D=torch.zeros(2, device=META))),
    ("out", "[3, 2, 32] torch.float32, got [2, 2, 32] torch.float32", lambda e: e.step(out=e.randn(2, 2, 32))),
    ("out", "torch.float32, got [3, 2, 32] torch.bfloat16", lambda e: e.step(out=e.randn(3, 2, 32).bfloat16())),
    ("out", "unit inner stride", lambda e: e.step(out=strided(e.randn(3, 2, 32)))),
    ("layer", "0 ... 1, got 2", lambda e: e.step(layer=2)),
    ("layer", "0 ... 1, got -1", lambda e: e.step(layer=-1)),
    ("layer", "0 ... 1, got 2", lambda e: e.conv(layer=2)),
    ("x", "[3, 8] torch.float32, got [2, 8] torch.float32", lambda e: e.conv(x=e.lines[:2])),
    ("x", "[3, 8] torch.float32, got [3, 8] torch.float16", lambda e: e.conv(x=e.lines.half())),
    ("x", "unit inner stride", lambda e: e.conv(x=strided(e.lines))),
    ("weight", "[8, 4] torch.float32", lambda e: e.conv(weight=e.filter[:, :3])),
    ("weight", "got [8, 4] torch.int32", lambda e: e.conv(weight=e.filter.int())),
    ("weight", "contiguous [C, width], got strides", lambda e: e.conv(weight=torch.cat([e.filter] * 2, 1)[:, :4])),
    ("bias", "got [4] torch.float32", lambda e: e.conv(bias=e.filter[0])),
    ("out", "[3, 8] torch.float32, got [2, 8] torch.float32", lambda e: e.conv(out=e.lines[:2])),
    ("accepted", "[3] torch.int32 or torch.int64, got [2] torch.int32", lambda e: e.commit(e.now, e.ints(1, 1))),
    ("accepted", "got [3] torch.float32", lambda e: e.commit(e.now, e.slots.float())),
    ("accepted", "got meta", lambda e: e.commit(e.now, e.slots.to(META))),
]  # fmt: skip

UNDER_A_PLAN = [
    *(("gdn", *entry) for entry in DURING),
    ("mamba2", "a", "None for mamba2, got [3, 2] torch.float32", lambda e: e.step(a=e.x["b"])),
    ("mamba2", "A", "None for mamba2, got [2] torch.float32", lambda e: e.step(A=e.A[0])),
    ("mamba2", "b", "[3, 2] for mamba2, got None", lambda e: e.step(b=None)),
    ("kda", "a", "[3, 2, 32] torch.float32", lambda e: e.step(a=e.x["b"])),
    ("kda", "dt_bias", "[2, 32] torch.float32", lambda e: e.step(dt_bias=e.w["A"])),
    ("kda", "dt_bias", "contiguous, got strides (64, 1)", lambda e: e.step(dt_bias=e.randn(2, 64)[:, :32])),
    ("gla", "b", "None for gla, got [3, 2] torch.float32", lambda e: e.step(b=e.randn(3, 2))),
    ("gla", "dt_bias", "None for gla, got [2, 32] torch.float32", lambda e: e.step(dt_bias=e.randn(2, 32))),
    ("gla", "A", "None for gla, got [2] torch.float32", lambda e: e.step(A=e.randn(2))),
]  # fmt: skip


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("argument, fragment, call", BETWEEN, ids=[name for name, *_ in BETWEEN])
def test_between_steps(argument, fragment, call, debug):
    engine = Engine("gdn", debug)
    engine.refuses(ValueError, expectation(argument, fragment), lambda: call(engine))


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("family, argument, fragment, call", UNDER_A_PLAN, ids=[f"{f}-{x}" for f, x, *_ in UNDER_A_PLAN])
def test_under_a_plan(family, argument, fragment, call, debug):
    engine = Engine(family, debug)
    engine.now = engine.state.plan(engine.slots)
    engine.refuses(ValueError, expectation(argument, fragment), lambda: call(engine))
    engine.step(), engine.conv(), engine.state.commit(engine.now)  # a refused call is no run of the layer


def test_without_a_convolution():
    engine = Engine("gdn", False)
    state = engine.state = ReplayState(dataclasses.replace(engine.layout, conv=None), LAYERS, SLOTS, DEVICE, "torch")
    engine.now = state.plan(engine.slots)
    for call in (lambda: engine.conv(), lambda: state.conv_window(engine.slots)):
        engine.refuses(ValueError, r"^layout: expected conv=Conv\(channels, width\), got None", call)
    engine.refuses(ValueError, r"^conv: expected None, got \[2, 3, 3, 8\]", lambda: engine.load())


# ---- what only debug mode can see: values on the device -------------------------------------------------------------


DEBUG_BETWEEN = [
    ("slots", "slots below 4, got [0, 4]", lambda e: e.plan(e.ints(0, 4))),
    ("slots", "slots below 4, got [4]", lambda e: e.fold(e.ints(4))),
    ("slots", "slots below 4, got [4]", lambda e: e.conv_window(e.ints(4))),
    ("slots", "each live slot once, got [0, -1, 0]", lambda e: e.plan(e.ints(0, -1, 0))),
    ("slots", "each live slot once, got [0, 0]", lambda e: e.fold(e.ints(0, 0))),
    ("slots", "each live slot once, got [1, 1, 2]", lambda e: e.load(e.ints(1, 1, 2))),
    ("slots", "each live slot once, got [1, 1]", lambda e: e.reset(e.ints(1, 1))),
    ("slots", "each live slot once, got [1, 1]", lambda e: e.import_(e.ints(1, 1), e.exported)),
    ("dst", "each live slot once, got [1, 1]", lambda e: e.copy(e.ints(0, 2), e.ints(1, 1))),
    ("dst", "slots below 4, got [9]", lambda e: e.copy(e.ints(0), e.ints(9))),
    ("to_slots", "slots below 3, got [0, 1, 3]", lambda e: e.materialize(e.slots, None, e.states, e.ints(0, 1, 3))),
    ("to_slots", "each live slot once, got [0, 1, ", lambda e: e.materialize(e.slots, None, e.states, e.ints(0, 1, 0))),
    ("t", "0 ... T_max = 2 tokens a row, got [1, 3]", lambda e: e.plan(e.slots, t=e.ints(1, 9, 3))),
    ("t", "0 ... T_max = 2 tokens a row, got [-1, 1]", lambda e: e.plan(e.slots, t=e.ints(-1, 0, 1))),
    ("cu_seqlens", "0 ... T_max = 2 tokens a row, got [3, 0", lambda e: e.plan(e.slots, cu_seqlens=e.ints(0, 3, 3, 4))),
    ("cu_seqlens", "0 ... T_max = 2 tokens a row, got [1", lambda e: e.plan(e.slots, cu_seqlens=e.ints(0, 1, 0, 1))),
    ("slots", "count 0 (reset them first), got [1, 1]", lambda e: e.load_layer(0, e.slots, e.states[0], e.history[0])),
    ("slots", "each live slot once", lambda e: e.load_layer(0, e.ints(1, 1, 2), e.states[0], e.history[0])),
    ("n", "0 ... count = 1 in row 0, got 2", lambda e: e.materialize(e.slots, n=e.ints(2, 0, 0))),
    ("n", "0 ... count = 1 in row 2, got -1", lambda e: e.conv_window(e.slots, e.ints(1, 7, -1))),
]  # fmt: skip

DEBUG_PENDING = [
    ("slots", lambda e: e.plan(e.slots)),
    ("slots", lambda e: e.fold(e.ints(0))),
    ("slots", lambda e: e.materialize(e.ints(2))),
    ("slots", lambda e: e.conv_window(e.ints(2))),
    ("slots", lambda e: e.load()),
    ("slots", lambda e: e.reset(e.ints(0))),
    ("src", lambda e: e.copy(e.ints(0), e.ints(1))),
    ("dst", lambda e: e.copy(e.ints(1), e.ints(0))),
    ("slots", lambda e: e.export(e.ints(0))),
    ("slots", lambda e: e.import_(e.ints(0, 2), e.exported)),
]


@pytest.mark.parametrize("argument, fragment, call", DEBUG_BETWEEN, ids=[name for name, *_ in DEBUG_BETWEEN])
def test_debug_between_steps(argument, fragment, call):
    engine = Engine("gdn", True)
    engine.refuses(ValueError, expectation(argument, fragment), lambda: call(engine))


@pytest.mark.parametrize("value", ["above", "below"])
@pytest.mark.parametrize("name, most, good", [("count", W, 1), ("start", W + 2, 0)])
def test_debug_refuses_cursors_out_of_range(name, most, good, value):
    engine = Engine("gdn", True)
    value = most + 1 if value == "above" else -1
    getattr(engine.state.cursors, name)[0] = value
    message = expectation(f"cursors.{name}", f"0 ... {most}, got [{good}, {value}] in slots [2, 0]")
    engine.refuses(ValueError, message, lambda: engine.state.plan(engine.slots))


@pytest.mark.parametrize("argument, call", DEBUG_PENDING, ids=[name for name, *_ in DEBUG_PENDING])
def test_debug_refuses_slots_with_a_step_pending(argument, call):
    engine = Engine("gdn", True)
    engine.now = engine.state.plan(engine.slots)
    engine.refuses(ValueError, expectation(argument, "slots whose step was committed, got ["), lambda: call(engine))


def test_debug_under_a_plan():
    engine = Engine("gdn", True)
    engine.now = engine.state.plan(engine.slots)
    for accepted, message in (((2, 0, 0), "got 2 of 1 in row 0"), ((0, 0, -1), "got -1 of 1 in row 2")):
        message = expectation("accepted", f"0 ... t, {message}")
        engine.refuses(ValueError, message, lambda a=accepted: engine.commit(engine.now, engine.ints(*a)))
    engine.step(1)
    engine.step(0)
    engine.refuses(RuntimeError, "^layer 1 ran twice under one plan; call commit and plan", lambda: engine.step(1))
    engine.commit(engine.now)
    engine.now = engine.plan(engine.slots)
    engine.step(1)


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_paths_belong_to_trees(debug):
    """A plan with parents takes a path, one without takes none."""
    engine = Engine("gdn", debug)
    now = engine.plan(engine.slots)
    engine.refuses(ValueError, r"^path: expected None .*, got \[3, 2\]", lambda: engine.commit(now, path=engine.table()))
    engine.commit(now)
    now, one = engine.plan(engine.slots, parents=engine.table()), engine.ints(1, 0, 1)
    for path, fragment in (
        (None, "[3, T_max] for a plan with parents, got None"),
        (engine.slots, "[3, 2] torch.int32 or torch.int64, got [3] torch.int32"),
        (engine.table().float(), "got [3, 2] torch.float32"),
        (engine.table(4)[:, :2], "contiguous [B, T_max], got strides (4, 1)"),
        (engine.table().to(META), "got meta"),
    ):
        engine.refuses(ValueError, expectation("path", fragment), lambda path=path: engine.commit(now, one, path))


def test_debug_of_trees():
    """Parents stand before their tokens, a path goes from a root down; padding and unused entries are not judged."""
    engine, t = Engine("gdn", True), torch.tensor([2, 9, 1])
    for parents, message in (
        ([0, 0, 9, 9, -1, 9], "-1 ... -1 for token 0, got 0 in row 0"),
        ([-1, 1, 9, 9, -1, 9], "-1 ... 0 for token 1, got 1 in row 0"),
        ([-1, 0, 9, 9, -2, 9], "-1 ... -1 for token 0, got -2 in row 2"),
    ):
        parents = engine.ints(*parents).view(3, 2)
        call = lambda parents=parents: engine.plan(engine.slots, t=t, parents=parents)  # noqa: E731
        engine.refuses(ValueError, expectation("parents", message), call)
    now = engine.plan(engine.slots, t=t, parents=engine.ints(-1, -1, 9, 9, -1, 9).view(3, 2))
    for path, accepted, message in (
        ([0, 1], 2, "a child of token 0 at 1, got 1 of 2 in row 0"),
        ([2, 1], 1, "a token that follows the committed history at 0, got 2 of 2 in row 0"),
        ([-1, 1], 1, "a token that follows the committed history at 0, got -1 of 2 in row 0"),
    ):
        path, accepted = engine.ints(*path, 9, 9, 0, 9).view(3, 2), engine.ints(accepted, 5, 1)
        call = lambda path=path, accepted=accepted: engine.commit(now, accepted, path)  # noqa: E731
        engine.refuses(ValueError, expectation("path", message), call)
    engine.commit(now, engine.ints(1, 5, 1), engine.ints(1, 9, 9, 9, 0, 9).view(3, 2))
    assert engine.state.cursors.count.tolist() == [2, 0, 2, 0]


def test_debug_refuses_a_layer_that_is_late():
    """load_layer while a step is pending: the layer must not have run, its ring must be empty, a convolution unmoved."""
    engine = Engine("gdn", True)
    slots = engine.ints(1, -1, 3)
    engine.now = engine.plan(slots)
    engine.step(1)
    engine.load_layer(0, slots, engine.states[0], engine.history[0])
    late = expectation("slots", "slots whose step was committed, got [1, -1, 3]")
    engine.refuses(ValueError, late, lambda: engine.load_layer(1, slots, engine.states[1], engine.history[1]))
    engine.step(0)
    engine.commit(engine.now)
    engine.state.fold(slots)
    moved = expectation("slots", "start 0 (reset them first), got [1, 1]")
    engine.refuses(ValueError, moved, lambda: engine.load_layer(1, slots, engine.states[1], engine.history[1]))
    engine.state = ReplayState(dataclasses.replace(engine.layout, conv=None), LAYERS, SLOTS, DEVICE, "torch", debug=True)
    engine.commit(engine.plan(slots))
    filled = expectation("slots", "count 0 (reset or fold them first), got [1, 1]")
    engine.refuses(ValueError, filled, lambda: engine.load_layer(1, slots, engine.states[1]))
    engine.state.fold(slots)
    engine.load_layer(1, slots, engine.states[1])


def test_debug_lets_padding_rows_hold_anything():
    """Nothing of a padding row is read, so its t, accepted and n are not judged; padding may repeat."""
    engine = Engine("gdn", True)
    slots = engine.ints(-1, 2, -1)
    plan = engine.state.plan(slots, t=engine.ints(9, 2, -4))
    engine.state.commit(plan, engine.ints(7, 1, -2))
    engine.state.materialize(slots, n=engine.ints(99, 1, -1))
    assert int(engine.state.cursors.count[2]) == 2


# ---- construction ---------------------------------------------------------------------------------------------------


def build(family="gdn", **change):
    sizes = {"layout": FAMILY[family].layout(W=W), "layers": LAYERS, "slots": SLOTS}
    return ReplayState(**{**sizes, "device": "cpu", "backend": "torch", **change})


def adopt(**change):
    buffers: Buffers = FAMILY["gdn"].layout(W=W).allocate(LAYERS, SLOTS, "cpu")
    build(buffers=buffers._replace(**{name: f(getattr(buffers, name)) for name, f in change.items()}))


A = torch.zeros(LAYERS, 2)


@pytest.mark.parametrize(
    "error, argument, fragment, call",
    [
        (ValueError, "layers, slots, max_rows", ">= 1, got 0, 4, 4", lambda: build(layers=0)),
        (ValueError, "layers, slots, max_rows", ">= 1, got 2, 0, 0", lambda: build(slots=0)),
        (ValueError, "layers, slots, max_rows", ">= 1, got 2, 4, 0", lambda: build(max_rows=0)),
        (ValueError, "device", "a device of this machine, got cuda:99", lambda: build(device="cuda:99")),
        (NotImplementedError, "backend", "one of ['triton', 'torch'], got 'numpy'", lambda: build(backend="numpy")),
        (ValueError, "A", "[layers, H] fp32 for mamba2, got None", lambda: build("mamba2")),
        (ValueError, "A", "None for gdn, got [2, 2] torch.float32", lambda: build(A=A)),
        (ValueError, "A", "[2, 2] torch.float32, got [1, 2] torch.float32", lambda: build("mamba2", A=A[:1])),
        (ValueError, "A", "[2, 2] torch.float32, got [2, 2] torch.bfloat16", lambda: build("mamba2", A=A.bfloat16())),
        (ValueError, "A", "contiguous [layers, H], got strides (4", lambda: build("mamba2", A=A.repeat(1, 2)[:, :2])),
        (ValueError, "A", "device cpu, got meta", lambda: build("mamba2", A=A.to(META))),
        (ValueError, "buffers", "[2, 4, ...], got [2, 3, 2, 32, 32]", lambda: adopt(state=lambda x: x[:, :3])),
        (ValueError, "k", "[2, 4, 1, 4, 32] torch.float32, got [2, 4, 1, 4, 32]", lambda: adopt(k=torch.Tensor.half)),
        (ValueError, "beta", "[2, 4, 2, 4] torch.float32, got None", lambda: adopt(beta=lambda x: None)),
        (ValueError, "v", "device cpu, got meta", lambda: adopt(v=lambda x: x.to(META))),
    ],
)  # fmt: skip
def test_construction(error, argument, fragment, call):
    with pytest.raises(error, match=expectation(argument, fragment)):
        call()


@pytest.mark.parametrize("value", ["false", "", "2", "True"])
def test_debug_variable(value, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_DEBUG", value)
    with pytest.raises(ValueError, match=expectation("REPLAYSSM_DEBUG", f"'0' or '1', got {value!r}")):
        build()
    assert build(debug=False).debug is False
    for known in ("0", "1"):
        monkeypatch.setenv("REPLAYSSM_DEBUG", known)
        assert build().debug == (known == "1")


@pytest.mark.skipif(GPU, reason="a CUDA GPU is there")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match=expectation("device", "got cuda and torch finds no CUDA GPU; use 'cpu'")):
        build(device="cuda", backend=None)


def test_triton_on_a_cpu_without_the_interpreter():
    """In a process of its own: the variable is read when Triton is imported."""
    code = (
        "from replayssm import GDN, Layout, ReplayState\n"
        "try:\n    ReplayState(Layout(GDN, 1, 1, 16, 16), 1, 1, 'cpu', 'triton')\n"
        "except NotImplementedError as e:\n    print(e)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert ran.returncode == 0, ran.stderr
    message = "backend: triton needs a CUDA device (or TRITON_INTERPRET=1), got cpu; use backend='torch'"
    assert ran.stdout.strip() == message
