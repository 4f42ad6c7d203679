"""KDA: decode, speculative decode, frozen verification and its commit, against the oracle."""

import dataclasses

import pytest
import torch

from replayssm import KDA, KDA_SAFE, reference
from replayssm.integrations import flashinfer as fi
from tests.harness import BOUND, relative_worst

H, V, K, S = 2, 16, 16, 7
GATES = {
    "softplus": (KDA, {"use_gate_in_kernel": True, "beta_is_logit": True}),
    "safe": (KDA_SAFE, {"use_gate_in_kernel": True, "beta_is_logit": True, "lower_bound": -5.0}),
    "ready": (dataclasses.replace(KDA, decay="ready", beta="ready"), {}),
}


def ints(*rows):
    return torch.tensor(rows, dtype=torch.int32)


class Layer:
    """A pool of states, weights and tokens of one of the ways to give gates."""

    def __init__(self, gates: str, seed: int = 0, groups: int = H):
        self.g, self.G = torch.Generator().manual_seed(seed), groups
        self.row, self.options = GATES[gates]
        self.pool = self.randn(S, H, V, K) * K**-0.5
        self.before = self.pool.clone()
        self.ready = gates == "ready"
        self.A_log, self.dt_bias = self.randn(groups), self.randn(groups, K) - 2
        self.weights = {} if self.ready else {"A_log": self.A_log, "dt_bias": self.dt_bias.flatten()}

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.g, device="cpu").to(torch.get_default_device())

    def tokens(self, *lead):
        x = {"q": self.randn(*lead, self.G, K), "k": self.randn(*lead, self.G, K), "v": self.randn(*lead, H, V)}
        g, beta = self.randn(*lead, H, K), self.randn(*lead, H)
        return x | {"g": -g.abs() / 4 if self.ready else g, "beta": beta.sigmoid() if self.ready else beta}

    def after(self, slot, x, row, n):
        """The oracle's outputs and state of some tokens' first n."""
        token = {ours: x[theirs][row][:n] for ours, theirs in zip("qkvab", ("q", "k", "v", "g", "beta"), strict=True)}
        each = H // self.G
        w = {"A": -self.A_log.exp().repeat_interleave(each), "dt_bias": self.dt_bias.repeat_interleave(each, 0)}
        return reference.decode(self.row, self.before[slot], **token, **({} if self.ready else w))

    def run(self, x, **kwargs):
        return fi.recurrent_kda(**x, **self.weights, **self.options, **kwargs)

    def unchanged(self, *written):
        kept = [slot for slot in range(S) if slot not in written]
        assert torch.equal(self.pool[kept], self.before[kept])


@pytest.mark.parametrize("gates", GATES)
def test_one_token(backend, gates):
    """In place by slots, padding among them; packed with cu_seqlens; several value heads a key group; out of zeros."""
    layer = Layer(gates, groups=1)
    x = layer.tokens(3, 1)
    o, state = layer.run(x, initial_state=layer.pool, ssm_state_indices=ints(5, -1, 2), output_final_state=True)
    assert state is layer.pool and not o[1].any()
    for row, slot in ((0, 5), (2, 2)):
        assert relative_worst(o[row], layer.after(slot, x, row, 1)[0]) < BOUND
        assert relative_worst(layer.pool[slot], layer.after(slot, x, row, 1)[1]) < BOUND
    layer.unchanged(5, 2)

    layer.pool.copy_(layer.before)
    packed = {name: one[:2].flatten(0, 1)[None] for name, one in x.items()}
    o, state = layer.run(packed, initial_state=layer.pool, cu_seqlens=ints(0, 1, 2))
    assert state is None and relative_worst(o[0, 1:], layer.after(1, x, 1, 1)[0]) < BOUND
    layer.unchanged(0, 1)

    layer.before.zero_()
    o, state = layer.run(x, output_final_state=True)
    for row in range(3):
        assert relative_worst(o[row], layer.after(0, x, row, 1)[0]) < BOUND
        assert relative_worst(state[row], layer.after(0, x, row, 1)[1]) < BOUND


@pytest.mark.parametrize("packed", [False, True])
def test_speculative_decode(backend, packed):
    """A state after every token into its slot, from what was accepted last time or from another pool; a row of padding."""
    layer, T = Layer("softplus"), 3
    x = layer.tokens(3, T)
    given = {name: one.flatten(0, 1)[None] for name, one in x.items()} if packed else x
    kwargs = {"num_spec_tokens": T - 1, "cu_seqlens": ints(0, 3, 6, 9) if packed else None}
    indices = torch.stack([ints(0, 1, 2), ints(-1, -1, -1), ints(3, 4, 5)])
    for source in (None, layer.before.flip(0).contiguous()):
        layer.pool.copy_(layer.before)
        if source is None:
            kwargs["num_accepted_tokens"] = ints(2, 1, 1)
        else:
            kwargs |= {"initial_state_source": source, "initial_state_indices": ints(2, 3, 6), "num_accepted_tokens": None}
        o, _ = layer.run(given, initial_state=layer.pool, ssm_state_indices=indices, **kwargs)
        o = o.view(3, T, H, V)
        assert not o[1].any()
        for row, first in ((0, 1), (2, 3)) if source is None else ((0, S - 1 - 2), (2, S - 1 - 6)):
            for n in range(1, T + 1):
                outputs, state = layer.after(first, x, row, n)
                assert relative_worst(layer.pool[int(indices[row, n - 1])], state) < BOUND
            assert relative_worst(o[row], outputs) < BOUND
        layer.unchanged(0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("gates", GATES)
def test_frozen_verification_and_its_commit(backend, gates):
    """Nothing but outputs and caches is written; committing n tokens gives the state after them; over several windows."""
    layer, T = Layer(gates), 3
    corrections, kg = torch.full((S, H, T + 1, V), 9.0), torch.full((S, H, T + 1, 2 * K), 9.0)
    caches = {"disable_state_update": True, "correction_cache": corrections, "kg_cache": kg}
    commit = {name: one for name, one in layer.options.items() if name != "beta_is_logit"}
    slots = ints(4, -1, 1)
    for accepted in ([2, 1, 0], [3, 3, 3]):
        x = layer.tokens(3, T)
        o, state = layer.run(x, initial_state_source=layer.pool, initial_state_indices=slots, **caches)
        assert state is None and torch.equal(layer.pool, layer.before) and not o[1].any()
        for row, slot in ((0, 4), (2, 1)):
            assert relative_worst(o[row], layer.after(slot, x, row, T)[0]) < BOUND
        raw = torch.cat([x["k"], x["g"]], -1)
        assert torch.equal(kg[[4, 1], :, :T], raw[[0, 2]].transpose(1, 2))
        assert (corrections[:, :, T] == 9.0).all() and (kg[[0, 2, 3, 5, 6]] == 9.0).all()
        fi.recurrent_kda_commit(layer.pool, corrections, kg, slots, ints(*accepted), **layer.weights, **commit)
        for row, slot in ((0, 4), (2, 1)):
            expected = layer.after(slot, x, row, accepted[row])[1] if accepted[row] else layer.before[slot]
            assert relative_worst(layer.pool[slot], expected) < BOUND
        layer.unchanged(4, 1)
        layer.before.copy_(layer.pool)


def test_frozen_verification_of_packed_rows(backend):
    """Rows of their own lengths: caches beyond them stay."""
    layer = Layer("safe")
    x = layer.tokens(1, 4)
    corrections, kg = torch.full((S, H, 3, V), 9.0), torch.full((S, H, 3, 2 * K), 9.0)
    o, _ = layer.run(
        x, initial_state_source=layer.pool, initial_state_indices=ints(6, 0), cu_seqlens=ints(0, 1, 4),
        disable_state_update=True, correction_cache=corrections, kg_cache=kg,
    )  # fmt: skip
    for slot, rows in ((6, slice(0, 1)), (0, slice(1, 4))):
        mine = {name: one[:, rows] for name, one in x.items()}
        assert relative_worst(o[0, rows], layer.after(slot, mine, 0, 3)[0]) < BOUND
    assert (corrections[6, :, 1:] == 9.0).all() and not (corrections[0] == 9.0).any()
