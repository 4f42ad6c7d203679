"""Tensor parallelism: two processes over gloo, each with its heads and key groups of a layer, beside one that has all of it."""

import dataclasses

import pytest
import torch
from torch import distributed

from replayssm import Export, ReplayState
from tests.cases import FAMILY, inputs, weights
from tests.harness import relative_worst, sliced

# Value heads and key groups of the layer; with one group both ranks have a copy of it.
CASES = {"mamba2": (4, 2), "mamba2, one group": (4, 1), "gdn": (4, 2), "kda": (2, 2)}
RANKS, SLOTS, T, BOUND = 2, [2, -1, 0], 3, 3e-5
STEPS = 12


def drafts(step):
    """Tokens a row; windows hold 4."""
    return T if step % 3 == 2 else 1


def likely(o, t):
    """How many of a row's drafts stay, which all heads of its outputs decide."""
    return (1 + (o.unflatten(0, (-1, t))[:, 1:].sum((2, 3)) > 0).int().cumprod(1).sum(1)).int()


class Part:
    """What one rank has of a layer's requests; by default the whole."""

    def __init__(self, name, rank=0, ranks=1, W=4):
        H, G = CASES[name]
        case = dataclasses.replace(FAMILY[name.partition(",")[0]], H=H, G=G)
        self.whole, self.rank, self.ranks = case.layout(W=W, T_max=T), rank, ranks
        layout = dataclasses.replace(self.whole, H=H // ranks, G=max(1, G // ranks))
        generator = torch.Generator().manual_seed(0)
        self.w = self.sliced(weights(self.whole, generator))
        derived = layout.recurrence.decay == "derived"
        self.state = ReplayState(layout, 1, 3, backend="torch", A=self.w.pop("A")[None] if derived else None, debug=True)
        self.slots = torch.tensor(SLOTS, dtype=torch.int32)
        initial = torch.randn(H, len(SLOTS), layout.V, layout.K, generator=generator) * layout.K**-0.5
        mine = initial[rank * layout.H :][: layout.H].transpose(0, 1).contiguous()
        self.state.load(self.slots, mine[None])

    def sliced(self, x):
        return sliced(self.whole, x, self.rank, self.ranks)

    def step(self, number, accept=None):
        """Its heads' outputs; ``accept(o, t)`` says how many drafts of each row stay, by default as they say themselves."""
        t = drafts(number)
        x = inputs(self.whole, len(SLOTS) * t, torch.Generator().manual_seed(number))
        self.plan = self.state.plan(self.slots, t)
        o = self.state.step(0, self.plan, **self.sliced(x), **self.w)
        self.state.commit(self.plan, (accept or likely)(o, t))
        return o

    def export(self):
        return self.state.export(self.slots[self.slots >= 0])


def gather(x):
    found = [torch.empty_like(x) for _ in range(RANKS)]
    distributed.all_gather(found, x.contiguous())
    return found


def by_the_first(o, t):
    """What the first rank says, on all of them."""
    o = torch.cat(gather(o), 1)
    said = likely(o, t) if distributed.get_rank() == 0 else torch.full((len(SLOTS),), -1, dtype=torch.int32)
    distributed.broadcast(said, 0)
    return said


def one_of(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    outputs = {}
    for name in CASES:
        part, outputs[name] = Part(name, rank, RANKS), []
        for number in range(STEPS):
            outputs[name].append(torch.cat(gather(part.step(number, by_the_first)), 1))
            for one in (part.plan.rows, *part.state.cursors):
                mine, theirs = gather(one)
                assert torch.equal(mine, theirs), (name, number)
        part.export().save(folder / f"{name}.{rank}", model=name)
    torch.save(outputs, folder / f"outputs.{rank}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A folder with what both processes saw, and the requests that they exported."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(one_of, (folder,), RANKS, start_method="spawn")
    return folder


def close(x, expected):
    assert relative_worst(x, expected) < BOUND


@pytest.mark.parametrize("name", CASES)
def test_two_are_as_one(name, ranks):
    """Outputs over several folds, drafts accepted by the first rank's word; exports merge to the whole's."""
    whole = Part(name)
    expected = [whole.step(number) for number in range(STEPS)]
    for rank in range(RANKS):
        for o, one in zip(torch.load(ranks / f"outputs.{rank}")[name], expected, strict=True):
            close(o, one)
    assert min(whole.state.cursors.flushes[[0, 2]]) >= 3
    merged = Export.merge([Export.load(ranks / f"{name}.{rank}", model=name) for rank in range(RANKS)], CASES[name][1])
    one = whole.export()
    assert merged.layout == one.layout and merged.tensors.keys() == one.tensors.keys()
    assert merged.tensors["cursor.count"].any(), "exported in the midst of a window"
    for key, x in merged.tensors.items():
        if key in ("k", "v") or key.startswith("cursor."):
            assert torch.equal(x, one.tensors[key]), key
        else:
            close(x, one.tensors[key])


@pytest.mark.parametrize("name", CASES)
def test_they_go_on_at_another_degree_in_another_window(name, ranks):
    """By one rank, and by twice as many where there are heads for them."""
    whole, (H, G) = Part(name), CASES[name]
    for number in range(STEPS):
        whole.step(number)
    merged = Export.merge([Export.load(ranks / f"{name}.{rank}", model=name) for rank in range(RANKS)], G)
    degrees = [n for n in (1, 4) if H % n == 0]
    parts = {n: [Part(name, rank, n, W=7) for rank in range(n)] for n in degrees}
    for n, some in parts.items():
        for part, one in zip(some, merged.shard(n), strict=True):
            part.state.import_(part.slots[part.slots >= 0], one)
    for number in range(STEPS, STEPS + 9):
        expected = whole.step(number)
        accepted = likely(expected, drafts(number))
        for some in parts.values():
            close(torch.cat([part.step(number, lambda *_, accepted=accepted: accepted) for part in some], 1), expected)
            for part in some:
                assert torch.equal(part.plan.rows, some[0].plan.rows)
