"""GDN: the ring of corrections with its caller's bookkeeping, and the conventional step, against the oracle."""

import dataclasses
import random

import pytest
import torch

from replayssm import GDN, reference
from replayssm.integrations import flashinfer as fi
from tests.harness import BOUND, relative_worst

G, H = 1, 2


def randn(g, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=g, device="cpu").to(torch.get_default_device()).to(dtype)


def tokens(g, *lead, V, K, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """q, k, v, a and b of some tokens."""
    shapes = {"q": (G, K), "k": (G, K), "v": (H, V), "a": (H,), "b": (H,)}
    return {name: randn(g, *lead, *shape, dtype=dtype) for name, shape in shapes.items()}


class Ring:
    """A caller's pool, its three rings and its cursors by row of the batch, with exact states beside them."""

    def __init__(self, T, live, seed=0, R=32, V=16, K=16, act=torch.float32, state=torch.float32, ring=None, u=None):
        self.T, self.R, self.live, self.act, self.V, self.K = T, R, live, act, V, K
        self.g, self.random = torch.Generator().manual_seed(seed), random.Random(seed)
        S, nan, ring = max(live) + 2, float("nan"), ring or act
        self.pool = torch.full((S, H, V, K), nan, dtype=state)
        self.pool[live] = (randn(self.g, len(live), H, V, K) * K**-0.5).to(state)
        self.k = torch.full((S, G, R, K), nan, dtype=ring)
        self.u = torch.full((S, H, R, V), nan, dtype=u or ring)
        self.gsum = torch.full((S, H, R), nan)
        self.base = {slot: self.random.randrange(R) for slot in live}
        self.count = dict.fromkeys(live, 0)
        self.A_log, self.dt_bias = randn(self.g, H), randn(self.g, H) - 2
        self.exact = {slot: self.pool[slot].double() for slot in live}
        self.flushes = 0

    def after(self, slot, x, row, n):
        """The oracle's outputs and state of the first n tokens of a row."""
        token = {name: one[row, :n] for name, one in x.items()}
        return reference.decode(GDN, self.exact[slot], **token, A=-self.A_log.exp(), dt_bias=self.dt_bias)

    def step(self, slots, bound, state_bound, flush_min=None, **kwargs) -> None:
        """One call of rows in this order, its outputs and folded states against the oracle."""
        x = tokens(self.g, len(slots), self.T, V=self.V, K=self.K, dtype=self.act)
        for row, slot in enumerate(slots):
            if slot < 0:
                for one in x.values():
                    one[row] = float("nan")
        count = torch.tensor([self.count.get(slot, 0) for slot in slots], dtype=torch.int32)
        base = torch.tensor([self.base.get(slot, 0) for slot in slots], dtype=torch.int32)
        out = torch.full_like(x["v"], 9.0)
        returned = fi.gated_delta_rule_mtp_ucache_flush(
            A_log=self.A_log, dt_bias=self.dt_bias, **x, initial_state_source=self.pool,
            initial_state_indices=torch.tensor(slots, dtype=torch.int32), output=out, k_cache=self.k, u_cache=self.u,
            g_cache=self.gsum, hist_len=count, cache_base=base, flush_min=flush_min, restart_hist_on_flush=False, **kwargs,
        )  # fmt: skip
        assert returned is out
        for row, slot in enumerate(slots):
            if slot < 0:
                assert not out[row].any()
                continue
            assert relative_worst(out[row], self.after(slot, x, row, self.T)[0]) < bound
            if self.count[slot] >= (self.R // 2 - self.T + 1 if flush_min is None else flush_min):
                self.flushes += 1
                assert relative_worst(self.pool[slot].float(), self.exact[slot]) < state_bound
                self.base[slot], self.count[slot] = (self.base[slot] + self.count[slot]) % self.R, 0
            accepted = self.random.randint(self.T > 1, self.T) if self.T > 1 else 1
            if accepted:
                self.exact[slot] = self.after(slot, x, row, accepted)[1]
            self.count[slot] += accepted


@pytest.mark.parametrize("T, R", [(1, 32), (4, 32), (3, 42)])
def test_many_steps(T, R):
    """200 steps: tokens that FlashInfer has no kernel for, and rings of other sizes, too. With fp32 rings, fp32's errors."""
    run = Ring(T, [3, 0, 1], R=R)
    for i in range(200):
        slots = [3, 0, 1][: 1 + min(i, 2)] + [-1] * (i % 3 == 0)
        run.random.shuffle(slots)
        run.step(slots, 1e-4, 1e-4, flush_min=None if i % 2 else R // 2 - T - 1)
    assert run.flushes > 20


def test_kernels(backend):
    """Both backends through a flush, of one token a row and of several."""
    for T in (1, 3):
        run = Ring(T, [2, 0], R=8, seed=T)
        for _ in range(6 if T == 1 else 4):
            run.step([2, -1, 0], BOUND, BOUND)
        assert run.flushes


@pytest.mark.parametrize(
    "act, state, ring, u, bound",
    [
        (torch.bfloat16, torch.bfloat16, None, None, 0.1),
        (torch.bfloat16, torch.float32, None, torch.float32, 0.05),
        (torch.bfloat16, torch.float16, torch.float16, torch.float16, 0.05),
        (torch.float16, torch.float32, None, torch.float32, 0.01),
    ],
)
def test_dtypes(act, state, ring, u, bound):
    """FlashInfer's combinations and ours, errors relative to the outputs' rms: k is rounded, u where its ring is."""
    run = Ring(4, [0, 2], act=act, state=state, ring=ring, u=u)
    for _ in range(24):
        run.step([2, 0], bound, bound)
    assert run.flushes > 4


def test_what_the_ring_holds():
    """Normalised keys, corrections and sums of g since the checkpoint, in the rows after the window; nothing else changes."""
    run = Ring(3, [1])
    run.step([1], BOUND, BOUND)
    run.count[1] = 2
    held = [one.clone() for one in (run.k, run.u, run.gsum)]
    before = run.exact[1] = reference_state(run, 2)
    x = tokens(run.g, 1, 3, V=16, K=16)
    cursors = torch.tensor([2], dtype=torch.int32), torch.tensor([run.base[1]], dtype=torch.int32)
    fi.gated_delta_rule_mtp_ucache_flush(
        run.A_log, x["a"], run.dt_bias, 1.0, 20.0, x["q"], x["k"], x["v"], x["b"], run.pool,
        torch.tensor([1]), k_cache=run.k, u_cache=run.u, g_cache=run.gsum, hist_len=cursors[0], cache_base=cursors[1],
    )  # fmt: skip
    rows = [(run.base[1] + 2 + i) % run.R for i in range(3)]
    k = x["k"][0, :, 0] / x["k"][0, :, 0].norm(dim=-1, keepdim=True)
    assert relative_worst(run.k[1, 0, rows], k) < 1e-5
    g = -run.A_log.exp() * torch.nn.functional.softplus(x["a"][0] + run.dt_bias)
    newest = held[2][1, :, (run.base[1] + 1) % run.R]
    assert relative_worst(run.gsum[1][:, rows], (newest + g.cumsum(0)).T) < 1e-5
    state = before * torch.exp(g[0])[:, None, None]
    u = torch.sigmoid(x["b"][0, 0])[:, None] * (x["v"][0, 0] - torch.einsum("hvk,k->hv", state, k[0].double()))
    assert relative_worst(run.u[1][:, rows[0]], u) < 1e-4
    kept = [i for i in range(run.R) if i not in rows]
    for one, was in zip((run.k, run.u, run.gsum), held, strict=True):
        assert torch.equal(one[:, :, kept].nan_to_num(), was[:, :, kept].nan_to_num())
    assert [int(one) for one in cursors] == [2, run.base[1]]


def reference_state(run, n):
    """The state after the ring's first n records, as they stand there."""
    rows = [(run.base[1] + j) % run.R for j in range(n)]
    state, last = run.pool[1].double(), 0.0
    for row in rows:
        g = run.gsum[1, :, row].double()
        outer = torch.einsum("hv,k->hvk", run.u[1, :, row].double(), run.k[1, 0, row].double())
        state, last = state * torch.exp(g - last)[:, None, None] + outer, g
    return state


def test_cursors_restart_where_asked():
    """With restart_hist_on_flush the call moves the base and empties the window of rows that fold, as FlashInfer does."""
    run = Ring(1, [0, 1], R=8)
    run.step([0, 1], BOUND, BOUND)
    x = tokens(run.g, 2, 1, V=16, K=16)
    count, base = torch.tensor([1, 1], dtype=torch.int32), torch.tensor([run.base[0], run.base[1]], dtype=torch.int32)
    fi.gated_delta_rule_mtp_ucache_flush(
        A_log=run.A_log, dt_bias=run.dt_bias, **x, initial_state_source=run.pool, k_cache=run.k, u_cache=run.u,
        g_cache=run.gsum, hist_len=count, cache_base=base, flush_min=1,
    )  # fmt: skip
    assert count.tolist() == [0, 0] and base.tolist() == [(run.base[slot] + 1) % 8 for slot in (0, 1)]


@pytest.mark.parametrize("normalize", [True, False])
def test_conventional(backend, normalize):
    """T tokens of a batch's own states, and of a pool with padding, other slots for the states, and a snapshot of each."""
    g, T, V, K = torch.Generator().manual_seed(0), 2, 16, 32
    A_log, dt_bias, x = randn(g, H), randn(g, H) - 2, tokens(g, 3, T, V=V, K=K)
    pool = randn(g, 6, H, V, K) * K**-0.5
    before, row = pool.clone(), dataclasses.replace(GDN, normalize=normalize, scale=0.5)
    x["k"] *= 1 if normalize else K**-0.5

    def after(slot, i, n):
        token = {name: one[i, :n] for name, one in x.items()}
        return reference.decode(row, before[slot], **token, A=-A_log.exp(), dt_bias=dt_bias)

    options = {"scale": 0.5, "use_qk_l2norm": normalize}
    state = pool[:3].clone()
    args = (x["q"], x["k"], x["v"])
    o, returned = fi.gated_delta_rule_decode_pretranspose(*args, state, A_log, x["a"], dt_bias, x["b"], **options)
    assert returned is state
    for i in range(3):
        assert relative_worst(o[i], after(i, i, T)[0]) < BOUND and relative_worst(state[i], after(i, i, T)[1]) < BOUND
    buffer = torch.full((3, T + 1, H, V, K), 9.0)
    o, returned = fi.gated_delta_rule_decode_pretranspose(
        *args, None, A_log, x["a"], dt_bias, x["b"], **options, initial_state=pool,
        initial_state_indices=torch.tensor([4, -1, 2]), output_state_indices=torch.tensor([4, 3, 5]),
        intermediate_states_buffer=buffer[:, :T],
    )  # fmt: skip
    assert returned is pool and not o[1].any() and (buffer[1] == 9.0).all() and (buffer[:, T] == 9.0).all()
    for i, slot, to in ((0, 4, 4), (2, 2, 5)):
        assert relative_worst(o[i], after(slot, i, T)[0]) < BOUND and relative_worst(pool[to], after(slot, i, T)[1]) < BOUND
        for n in range(1, T + 1):
            assert relative_worst(buffer[i, n - 1], after(slot, i, n)[1]) < BOUND
    assert torch.equal(pool[[0, 1, 2, 3]], before[[0, 1, 2, 3]])
