"""SGLang's own attention backends over its own pool, with our kernels under them, beside the fp64 oracle."""

import copy

import pytest
import torch

pytest.importorskip("sglang")

from replayssm.reference import Ring
from tests.integrations.sglang.alone import alone

slow = pytest.mark.slow
BOUND = 1e-4


class Truth:
    """One request of a Unit in fp64: its convolution windows and its states, a token at a time."""

    def __init__(self, unit, row):
        self.unit, cache = unit, unit.pool.mamba_pool.mamba_cache
        slot, layout = int(unit.slots([row])), unit.state.layout
        conv = cache.conv[0][:, slot].double()
        self.windows = [one if unit.kda else one.T for one in conv]  # [width - 1, C]
        self.rings = []
        for i, layer in enumerate(unit.layers):
            shape = (layout.H, layout.K) if unit.kda else (layout.H,)
            ring = Ring(
                layout.recurrence, layout.W, layout.R, 1, A=-layer.A_log.detach().double().exp().reshape(-1),
                dt_bias=layer.dt_bias.detach().double().reshape(shape),
            )  # fmt: skip
            ring.load(0, cache.temporal[i, slot].double())
            self.rings.append(ring)

    def branch(self):
        """The same request, to go on differently."""
        other = copy.copy(self)
        other.windows, other.rings = list(self.windows), copy.deepcopy(self.rings)
        return other

    def token(self, inputs, n):
        """Outputs [H, V] of all layers for token n of the inputs, which is kept."""
        outputs, layout = [], self.unit.state.layout
        per_head = (layout.H, layout.K) if self.unit.kda else (layout.H,)
        for i, (layer, (mixed, a, b)) in enumerate(zip(self.unit.layers, inputs, strict=True)):
            window = torch.cat([self.windows[i], mixed[n : n + 1].double()])
            self.windows[i] = window[1:]
            x = torch.nn.functional.silu((window * layer.conv_weights.double().T).sum(0))
            q, k, v = x.split([layout.G * layout.K, layout.G * layout.K, layout.H * layout.V])
            one = {
                "q": q.view(1, layout.G, layout.K), "k": k.view(1, layout.G, layout.K), "v": v.view(1, layout.H, layout.V),
                "b": b[n : n + 1].double(), "a": a[n].double().reshape(1, *per_head),
            }  # fmt: skip
            outputs.append(self.rings[i].step(0, [one])[0])
            self.rings[i].commit(0, 1)
        return outputs

    def check(self, row, snapshot=None):
        """SGLang's convolution windows and our state are those after the tokens so far; or those in a snapshot's slot are."""
        unit, cache = self.unit, self.unit.pool.mamba_pool.mamba_cache
        slots = unit.slots([row])
        conv = cache.conv[0][:, int(slots) if snapshot is None else snapshot].double()
        states = unit.state.materialize(slots)[:, 0] if snapshot is None else cache.temporal[:, snapshot]
        for i, ring in enumerate(self.rings):
            close(conv[i] if unit.kda else conv[i].T, self.windows[i])
            close(states[i], ring.materialize(0))


def close(got, truth):
    assert float((got.double() - truth).abs().max() / truth.abs().max()) < BOUND


def decode(family):
    from tests.integrations.sglang.units import Unit

    unit = Unit(family)
    unit.begin()
    rows, steps = [2, 0, 1, 3], 10
    truth = {row: Truth(unit, row) for row in rows if row}
    for step in range(steps):
        batch = rows if step % 3 else [1, 2, 3]
        inputs = unit.tokens(len(batch))
        outputs = unit.decode(batch, inputs)
        for n, row in enumerate(batch):
            if row:
                for got, expected in zip(outputs, truth[row].token(inputs, n), strict=True):
                    close(got[n], expected)
    for row, one in truth.items():
        one.check(row)
    assert not unit.state.cursors.count[0] and int(unit.state.cursors.flushes.max()) >= 2  # slot 0 is padding


@pytest.mark.parametrize("family", ["gdn", "kda_safe", pytest.param("kda", marks=slow)])
def test_decode(family):
    """Over two windows, with padding rows, a batch that changes, and slots in no order."""
    alone(decode, family, plugins="replayssm")


def track(family):
    """Snapshots for the prefix cache, of some rows on some steps, in slots of the cache's own."""
    from tests.integrations.sglang.units import Unit

    unit = Unit(family)
    unit.begin()
    rows = [2, 0, 1]
    truth = {row: Truth(unit, row) for row in rows if row}
    for step in range(7):
        inputs, mask = unit.tokens(3), torch.tensor([step == 2, False, step in (3, 6)])
        unit.decode(rows, inputs, mamba_track_mask=mask, mamba_track_indices=torch.tensor([3, 4, 6]))
        for n, row in enumerate(rows):
            if row:
                truth[row].token(inputs, n)
            if mask[n]:
                truth[row].check(row, snapshot=[3, 4, 6][n])
                truth[row].check(row)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_snapshots_of_decode_steps(family):
    alone(track, family, plugins="replayssm")


def graph():
    """What a CUDA graph would be captured from, then the steps that it would be replayed with."""
    from tests.integrations.sglang.units import Unit

    unit = Unit("gdn")
    unit.begin()
    unit.backend.init_cuda_graph_state(4, 4)
    before = [x.clone() for x in (*unit.state.buffers, *unit.state.cursors) if x is not None]
    unit.decode([0, 0, 0, 0], unit.tokens(4), graph=True)
    after = [x for x in (*unit.state.buffers, *unit.state.cursors) if x is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    truth = {row: Truth(unit, row) for row in (1, 2, 3)}
    addresses = set()
    for step in range(8):
        rows = [[2, 3, 1, 0], [1, 2, 0, 0]][step % 2]
        inputs = unit.tokens(4)
        outputs = unit.decode(rows, inputs, graph=True)
        addresses.add(unit.backend.forward_metadata.mamba_cache_indices.data_ptr())
        for n, row in enumerate(one for one in rows if one):
            for got, expected in zip(outputs, truth[row].token(inputs, n), strict=True):
                close(got[n], expected)
    assert len(addresses) == 1  # what the graph's plan reads
    for row, one in truth.items():
        one.check(row)


def test_graph_metadata():
    alone(graph, plugins="replayssm")


# Per shape of drafts: each one's parent, first child and next sibling; paths that may be accepted.
CHAIN = ([-1, 0, 1, 2], None, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]])
TREE = ([-1, 0, 0, 1], ([1, 3, -1, -1], [-1, 2, -1, -1]), [[0], [0, 2], [0, 1, 3], [0, 1]])


def verify(family, drafts):
    """Drafts of several steps, some of them accepted, a padding row among them; then plain decoding goes on."""
    from tests.integrations.sglang.units import Unit

    parents, tree, paths = drafts
    t = len(parents)
    unit = Unit(family, drafts=t, topk=1 if tree is None else 2)
    unit.begin()
    rows = [2, 0, 1]
    truth = {row: Truth(unit, row) for row in rows if row}
    lengths = {row: 250 + row for row in rows}
    seen = 0
    for step in range(6):
        inputs = unit.tokens(len(rows) * t)
        links = None if tree is None else tuple(torch.tensor([one] * len(rows), dtype=torch.int64) for one in tree)
        outputs = unit.verify(rows, t, inputs, links)
        accepted = [paths[(step + n) % len(paths)] for n in range(len(rows))]
        for n, row in enumerate(rows):
            for node in range(t if row else 0):
                branch = truth[row].branch()
                for ancestor in path_to(parents, node):
                    expected = branch.token(inputs, n * t + ancestor)
                for got, one in zip(outputs, expected, strict=True):
                    close(got[n * t + node], one)
        track = unit.accept(rows, t, accepted, lengths)
        for n, row in enumerate(rows):
            for i, node in enumerate(accepted[n] if row else []):
                truth[row].token(inputs, n * t + node)
                if (lengths[row] + i + 1) % unit.interval == 0:
                    truth[row].check(row, track[n])
                    seen += 1
            lengths[row] += len(accepted[n])
        for row, one in truth.items():
            one.check(row)
    assert seen == 2
    inputs = unit.tokens(2)
    for n, got in enumerate(zip(*unit.decode([1, 2], inputs), strict=True)):
        for one, expected in zip(got, truth[n + 1].token(inputs, n), strict=True):
            close(one, expected)


def path_to(parents, node):
    """From a root down."""
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else []), node]


@pytest.mark.parametrize(
    "family, drafts",
    [("gdn", CHAIN), ("kda_safe", TREE), pytest.param("kda", CHAIN, marks=slow), pytest.param("gdn", TREE, marks=slow)],
)
def test_verify(family, drafts):
    alone(verify, family, drafts, plugins="replayssm")


def mamba2():
    """Nemotron-H's state update as SGLang's mixer calls it: decode steps, then drafts of which some are accepted."""
    import tempfile
    from pathlib import Path

    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    from replayssm import MAMBA2
    from replayssm.integrations.sglang.kernels import ReplaySSU
    from replayssm.integrations.sglang.layers import Layers
    from replayssm.integrations.sglang.pool import ReplayMambaPool
    from replayssm.integrations.sglang.settings import Settings
    from tests.integrations.sglang.units import arguments

    with tempfile.TemporaryDirectory() as folder:
        arguments(Path(folder))
    H, G, P, N, t, rows = 4, 2, 16, 32, 3, [2, 0, 5]
    generator = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    A, D, bias = -rand(2, H).exp(), rand(2, H), rand(2, H)
    layers = Layers(MAMBA2, H, G, P, N, weights=tuple(A.clone()), logarithms=False)
    layout = Settings(window=5).layout(MAMBA2, H, G, P, N, t, torch.float32, torch.float32)
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=H * P, n_groups=G, num_heads=H, head_dim=P, state_size=N, conv_kernel=4
    )
    dtypes = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    pool = ReplayMambaPool(
        layout=layout, layers=layers, size=7, spec_state_size=4, device="cpu", mamba_layer_ids=[3, 8],
        cache_params=Mamba2CacheParams(shape=shape, layers=[3, 8], dtype=dtypes),
        speculative_num_draft_tokens=t, speculative_eagle_topk=1,
    )  # fmt: skip
    replay, ssu, slots = pool.replay, ReplaySSU(), torch.tensor(rows, dtype=torch.int32)
    ReplaySSU.replay = replay
    pool.mamba_cache.temporal.copy_(rand(*pool.mamba_cache.temporal.shape))
    truth = {(i, n): Ring(MAMBA2, 5, 8, 1, A=A[i].double(), dt_bias=bias[i].double(), D=D[i].double())
             for i in range(2) for n, slot in enumerate(rows) if slot}  # fmt: skip
    for (i, n), ring in truth.items():
        ring.load(0, pool.mamba_cache.temporal[i, rows[n]].double())

    def run(T):
        """One step of T tokens a row; the tokens of each layer and row for the oracle."""
        lead = (len(rows), T) if T > 1 else (len(rows),)
        for i in range(2):
            replay.layer = i
            x, B, C = rand(*lead, H * P + 2 * G * N).split([H * P, G * N, G * N], -1)  # views of the convolution's output
            x, B, C = x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
            dt, out = rand(*lead, H), torch.full((*lead, H, P), float("nan"))
            ssu(
                pool.mamba_cache.temporal[i], x, dt[..., None].expand(*lead, H, P), A[i, :, None, None].expand(H, P, N), B, C,
                D[i, :, None].expand(H, P), z=None, dt_bias=bias[i, :, None].expand(H, P), dt_softplus=True,
                state_batch_indices=slots, out=out, disable_state_update=T > 1, cache_steps=T if T > 1 else None,
            )  # fmt: skip
            for n in (n for n, slot in enumerate(rows) if slot):
                x_n, B_n, C_n, dt_n = (one[n].reshape(T, *one.shape[len(lead) :]).double() for one in (x, B, C, dt))
                tokens = [
                    {"q": C_n[m : m + 1], "k": B_n[m : m + 1], "v": x_n[m : m + 1], "b": dt_n[m : m + 1]} for m in range(T)
                ]
                close(out[n].reshape(T, H, P), truth[i, n].step(0, tokens))
            assert not out[1].any()  # padding

    accepted = torch.tensor([2, 1, 3])
    for step in range(8):
        T = 1 if step < 4 else t
        run(T)
        if T > 1:
            replay.commit(len(rows), accepted, None)
        for (_, n), ring in truth.items():
            ring.commit(0, 1 if T == 1 else int(accepted[n]))
    states = replay.state.materialize(slots)
    for (i, n), ring in truth.items():
        close(states[i, n], ring.materialize(0))
    plan = replay._verified[len(rows)]
    part = replay._first(plan, 2)
    assert part is replay._first(plan, 2) and torch.equal(part.rows, plan.rows[:2]) and replay._first(plan, 3) is plan


def test_mamba2():
    alone(mamba2, plugins="replayssm")
