"""ReplayState over an engine's tensors: its pool's strides, its double-buffered history, its batches. No engine is needed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from replayssm import GDN, MAMBA2, Layout, reference
from replayssm.integrations.trtllm.layouts import rings_in
from replayssm.integrations.trtllm.recurrent import Batch, Recurrent
from tests.cases import inputs, weights

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
ROWS = [MAMBA2, GDN]
SIZES = (4, 2, 16, 32)
LAYERS, SLOTS, HISTORY = 2, 5, 16


class Tokens:
    """Random tokens and weights of one layout."""

    def __init__(self, layout: Layout, device: str):
        self.layout, self.device, self.generator = layout, device, torch.Generator().manual_seed(0)
        self.weights = weights(layout, self.generator, device)
        derived = layout.recurrence.decay == "derived"
        self.w = {name: x for name, x in self.weights.items() if not (derived and name == "A")}

    def randn(self, *shape):
        """On the CPU's generator, so that devices see the same."""
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def draw(self, N):
        """N tokens."""
        return inputs(self.layout, N, self.generator, self.device)

    def recurrent(self, pool, history=None):
        """A state over a pool, its requests about to begin."""
        made = Recurrent(self.layout, pool, None, rows=4, history=history)
        made.restart(list(range(pool.shape[1])), brought=True)
        if made.A is not None:
            made.A.copy_(self.weights["A"])
        return made


def history(device):
    """What a manager allocates, holding another request's values."""
    H, G, V, K = SIZES
    shapes = {"old_x": (HISTORY, H, V), "old_B": (HISTORY, G, K), "old_dt": (H, HISTORY), "old_dA_cumsum": (H, HISTORY)}
    dtypes = {"old_x": torch.float32, "old_B": torch.float32}
    return SimpleNamespace(**{
        name: torch.full((LAYERS, SLOTS, 2, *shape), float("nan"), dtype=dtypes.get(name, torch.float32), device=device)
        for name, shape in shapes.items()
    })  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_engine_s_history_changes_no_bit(row, T, device):
    """Rings as views of a token-major, double-buffered history, over a pool that interleaves layers: the same outputs and
    states as in tensors of ours, whose distance from the oracle is the kernels' own."""
    layout = Layout(row, *SIZES, W=12, T_max=4, R=2 * HISTORY, act=torch.float32, order="token")
    tokens, draw = Tokens(layout, device), random.Random(0)
    memory = tokens.randn(SLOTS, LAYERS, SIZES[0], *SIZES[2:]) / 8
    theirs = tokens.recurrent(memory.transpose(0, 1), rings_in(history(device), layout))
    ours = tokens.recurrent(memory.transpose(0, 1).clone(memory_format=torch.contiguous_format))
    truth = memory.double().clone()
    for _ in range(20):
        slots = torch.tensor(draw.sample(range(SLOTS), 3), dtype=torch.int32, device=device)
        kept = [draw.randint(1, T) for _ in slots]
        steps = [tokens.draw(3 * T) for _ in range(LAYERS)]
        for of in (theirs, ours):
            of.begin(Batch(slots, 0, T))
            of.outputs = []
            for layer, x in enumerate(steps):
                of.outputs.append(of.step(layer, **x, **tokens.w))
                of.finish(layer)
            of.accept(torch.tensor(kept, device=device))
        assert all(torch.equal(a, b) for a, b in zip(theirs.outputs, ours.outputs, strict=True))
        for layer, x in enumerate(steps):
            for i, slot in enumerate(slots.tolist()):
                some = {name: one[i * T : i * T + kept[i]] for name, one in x.items()}
                o, truth[slot, layer] = reference.decode(row, truth[slot, layer], **some, **tokens.weights)
                got = ours.outputs[layer][i * T : i * T + kept[i]]
                assert float((got - o).abs().max() / o.square().mean().sqrt()) < 1e-4
    every = torch.arange(SLOTS, dtype=torch.int32, device=device)
    states = theirs.state.materialize(every)
    assert torch.equal(states, ours.state.materialize(every))
    theirs.settle(every.tolist())
    assert float((memory - truth).abs().max() / truth.square().mean().sqrt()) < 1e-4
    assert torch.equal(memory.transpose(0, 1), states)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("T", [1, 4])
def test_steps_in_a_cuda_graph(row, T):
    """Captured once per batch size, replayed over other slots, paddings and acceptances: bit for bit the eager steps."""
    layout = Layout(row, *SIZES, W=8, T_max=4, act=torch.bfloat16, order="token")
    tokens = Tokens(layout, "cuda")
    pool = tokens.randn(6, 1, *SIZES[:1], *SIZES[2:]).transpose(0, 1)
    eager, graphed = (tokens.recurrent(pool.clone()) for _ in range(2))
    slots = torch.zeros(4, dtype=torch.int32, device="cuda")
    x = tokens.draw(4 * T)

    def run(of, rows):
        of.begin(Batch(slots[:rows], 0, T))
        o = of.step(0, **{name: one[: rows * T] for name, one in x.items()}, **tokens.w)
        of.finish(0)
        return o

    graphs, outputs = {}, {}
    for rows in (1, 3, 4):
        graphed.dummies([True] * rows)
        run(graphed, rows)  # compile
        graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rows]):
            outputs[rows] = run(graphed, rows)
    draw = random.Random(0)
    for _ in range(24):
        rows = draw.choice([1, 3, 4])
        slots.copy_(torch.tensor(draw.sample(range(6), 4), dtype=torch.int32))
        dummy = [draw.random() < 0.2 for _ in range(rows)]
        for one in x.values():
            one.copy_(tokens.randn(*one.shape))
        for one in (eager, graphed):
            one.dummies(dummy)
        wanted = run(eager, rows)
        graphs[rows].replay()
        assert torch.equal(outputs[rows], wanted)
        accepted = torch.tensor([draw.randint(1, T) for _ in range(rows)], device="cuda")
        eager.accept(accepted)
        graphed.accept(accepted)
    for name, ours in graphed.state.cursors._asdict().items():
        assert torch.equal(ours, getattr(eager.state.cursors, name)), name
    assert torch.equal(graphed.state.materialize(slots), eager.state.materialize(slots))
