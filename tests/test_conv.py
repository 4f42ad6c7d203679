"""The convolution ring against the fp64 oracle: flushes, rejected tokens, NaN in every row that nothing may read."""

import random

import pytest
import torch

from replayssm import Conv, ReplayState
from replayssm.reference import causal_conv
from tests.cases import AWKWARD
from tests.harness import BACKENDS, DEVICE

CASE = next(case for case in AWKWARD if case.name == "smallest")
NAN = float("nan")
LAYERS = 2


class Lines:
    """Some requests' convolution inputs, beside a ReplayState of two layers whose rings start as NaN."""

    def __init__(self, backend, width=4, W=5, T_max=1, channels=20, bias=True, silu=True, act=torch.float32):
        self.layout = CASE.layout(W=W, T_max=T_max, conv=Conv(channels, width), act=act)  # R is the minimum
        self.state = ReplayState(self.layout, LAYERS, 5, DEVICE, backend, max_rows=8, debug=True)
        self.state.buffers.conv.fill_(NAN)
        self.generator = torch.Generator().manual_seed(0)
        self.weight = self.randn(LAYERS, channels, width, dtype=act)
        self.bias = self.randn(LAYERS, channels, dtype=act) if bias else None
        self.silu = silu
        self.seen: dict[int, torch.Tensor] = {}  # per slot: [L, width - 1 + committed, C]

    def randn(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.generator).to(dtype or self.layout.act)

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def load(self, slots):
        spec = self.layout.conv
        history = self.randn(LAYERS, len(slots), spec.width - 1, spec.channels)
        states = torch.zeros(LAYERS, len(slots), CASE.H, CASE.V, CASE.K, device=DEVICE)
        self.state.load(self.ints(slots), states, conv=history.to(DEVICE))
        self.seen |= {slot: history[:, i] for i, slot in enumerate(slots) if slot >= 0}

    def step(self, slots, t, accepted, force):
        """One step of t[i] tokens in row i, of which accepted[i] stay; outputs checked."""
        T_max, width = self.layout.T_max, self.layout.conv.width
        plan = self.state.plan(self.ints(slots), t=self.ints(t), force=self.ints(force))
        x = self.randn(LAYERS, len(slots), T_max, self.layout.conv.channels)
        for i, n in enumerate(t):
            x[:, i, n if slots[i] >= 0 else 0 :] = NAN
        for layer in range(LAYERS):
            bias = None if self.bias is None else self.bias[layer]
            packed, *filters = (a if a is None else a.to(DEVICE) for a in (x[layer].flatten(0, 1), self.weight[layer], bias))
            y = self.state.conv(layer, plan, packed, *filters, self.silu).cpu().unflatten(0, (len(slots), T_max))
            for i, slot in enumerate(slots):
                n = t[i] if slot >= 0 else 0
                assert not y[i, n:].any(), "rows of padding and unused tokens must be zero"
                if n:
                    history = self.seen[slot][layer, -(width - 1) :]
                    expected = causal_conv(x[layer, i, :n], self.weight[layer], bias, history, self.silu)
                    # One rounding of the output; the interpreter's to bf16 truncates.
                    rtol = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[self.layout.act]
                    torch.testing.assert_close(y[i, :n].double(), expected, rtol=rtol, atol=1e-6)
        self.state.commit(plan, self.ints(accepted))
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.seen[slot] = torch.cat([self.seen[slot], x[:, i, : accepted[i]]], 1)

    def check_windows(self):
        """conv_window at every n of every slot, bit for bit; afterwards what no window holds is NaN again."""
        R, taps = self.layout.R, self.layout.conv.width - 1
        start, count = (x.tolist() for x in self.state.cursors[:2])
        for slot, seen in self.seen.items():
            slots = self.ints([slot, -1])
            for n in range(count[slot] + 1):
                window = self.state.conv_window(slots, self.ints([n, 9]))[:, 0].cpu()
                end = seen.shape[1] - count[slot] + n
                assert torch.equal(window, seen[:, end - taps : end]), (slot, n)
            assert torch.equal(self.state.conv_window(slots)[:, 0].cpu(), seen[:, -taps:])
            dead = {r % R for r in range(R)} - {(start[slot] + i) % R for i in range(-taps, count[slot])}
            self.state.buffers.conv[:, slot, 0, list(dead)] = NAN


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(width=4, W=5, T_max=3),
        dict(width=4, W=1, T_max=1, bias=False, channels=300),  # window shorter than the filter, two blocks of channels
        dict(width=3, W=2, T_max=2, silu=False),
        dict(width=2, W=4, T_max=1, bias=False, silu=False, act=torch.bfloat16),
        dict(width=4, W=3, T_max=2, act=torch.float16),
    ],
    ids=lambda s: f"width{s['width']}-W{s['W']}-T{s['T_max']}",
)
def test_many_steps(sizes, backend):
    """Random rows, token counts, acceptance, forced flushes, folds between steps; a request replaced in the middle."""
    lines, draw = Lines(backend, **sizes), random.Random(0)
    lines.load([3, -1, 0, 1])
    for i in range(40 if backend == "torch" else 16):
        slots = draw.sample([3, 0, 1, -1, -2], draw.randint(1, 5))
        t = [draw.randint(0, lines.layout.T_max) for _ in slots]
        accepted = [draw.randint(0, n) if draw.random() < 0.5 else n for n in t]
        lines.step(slots, t, accepted, [draw.random() < 0.15 for _ in slots])
        if i % 5 == 3:
            lines.state.fold(lines.ints([draw.choice([3, 0, 1]), -1]))
        if i == 8:
            lines.load([1])
        lines.check_windows()
    assert (lines.state.cursors.flushes[[3, 0]] >= 1).all()
    assert lines.state.buffers.conv[:, [2, 4]].isnan().all(), "unused slots stay untouched"


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_decode(backend):
    """One token a row, every row, all kept: the ring wraps several times."""
    lines = Lines(backend, W=3)
    lines.load([1, 0])
    for _ in range(3 * lines.layout.R if backend == "torch" else lines.layout.R + 3):
        lines.step([0, 1], [1, 1], [1, 1], [0, 0])
        lines.check_windows()


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_follow_their_request(backend):
    """Copy and export carry the window at a ring position of their own; reset empties it; one layer loads alone."""
    lines = Lines(backend, W=4)
    lines.load([0])
    for _ in range(6):
        lines.step([0], [1], [1], [0])
    state, window = lines.state, lines.state.conv_window(lines.ints([0]))
    state.copy(lines.ints([0]), lines.ints([2]))
    state.import_(lines.ints([1]), state.export(lines.ints([0])))
    assert torch.equal(state.conv_window(lines.ints([2, 1])), window.expand(-1, 2, -1, -1))
    state.reset(lines.ints([2]))
    assert not state.conv_window(lines.ints([2])).any()
    history = lines.randn(LAYERS, 1, 3, 20).to(DEVICE)
    for layer in range(LAYERS):
        zeros = torch.zeros(1, CASE.H, CASE.V, CASE.K, device=DEVICE)
        state.load_layer(layer, lines.ints([4]), zeros, history[layer])
    assert torch.equal(state.conv_window(lines.ints([4])), history)
    assert torch.equal(state.conv_window(lines.ints([0])), window)
