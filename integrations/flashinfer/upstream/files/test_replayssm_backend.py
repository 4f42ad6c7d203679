"""backend="replayssm" of the recurrent decode calls against the recurrence in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
from flashinfer.kda import recurrent_kda
from flashinfer.mamba import checkpointing_ssu, selective_state_update

pytest.importorskip("replayssm")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, GROUPS, DIM, DSTATE = 3, 4, 2, 32, 64
SLOTS = [4, 0, 2]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


class Mamba:
    """Weights of one layer, and its recurrence token by token."""

    def __init__(self):
        self.A = -torch.rand(HEADS) - 0.5
        self.D = torch.randn(HEADS)
        self.dt_bias = torch.randn(HEADS) - 2
        self.state = torch.randn(len(SLOTS) + 2, HEADS, DIM, DSTATE) * DSTATE**-0.5
        self.expected = self.state.clone()

    def weights(self):
        return {
            "A": self.A[:, None, None].expand(HEADS, DIM, DSTATE),
            "D": self.D[:, None].expand(HEADS, DIM),
            "dt_bias": self.dt_bias[:, None].expand(HEADS, DIM),
        }

    def inputs(self, tokens):
        x = torch.randn(BATCH, tokens, HEADS, DIM)
        dt = torch.randn(BATCH, tokens, HEADS)
        B, C = torch.randn(2, BATCH, tokens, GROUPS, DSTATE) * DSTATE**-0.5
        return x, dt, B, C

    def step(self, row, x, dt, B, C, tokens):
        """Outputs of a row's first tokens; the state of its slot after them."""
        state = self.expected[SLOTS[row]].clone()
        dt = F.softplus(dt[row] + self.dt_bias)
        B, C = (one[row].repeat_interleave(HEADS // GROUPS, 1) for one in (B, C))
        outputs = []
        for t in range(tokens):
            update = dt[t, :, None, None] * x[row, t][..., None] * B[t][:, None]
            state = state * torch.exp(self.A * dt[t])[:, None, None] + update
            y = (state @ C[t][..., None])[..., 0]
            outputs.append(y + self.D[:, None] * x[row, t])
        return torch.stack(outputs), state


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [4, 20])
def test_checkpointing_ssu(tokens, window):
    layer, rows = Mamba(), window + tokens
    slots = layer.state.shape[0]
    x_cache = torch.zeros(slots, HEADS, rows, DIM)
    B_cache = torch.zeros(slots, GROUPS, rows, DSTATE)
    dt_cache = torch.zeros(slots, HEADS, rows)
    start, prev = torch.zeros(2, slots, dtype=torch.int32)
    for step in range(12):
        x, dt, B, C = layer.inputs(tokens)
        out = torch.empty_like(x)
        returned = checkpointing_ssu(
            layer.state,
            x_cache,
            B_cache,
            dt_cache,
            start,
            prev,
            x,
            dt[..., None].expand(*dt.shape, DIM),
            B=B,
            C=C,
            out=out,
            dt_softplus=True,
            state_batch_indices=torch.tensor(SLOTS, dtype=torch.int32),
            backend="replayssm",
            **layer.weights(),
        )
        assert returned is out
        for row, slot in enumerate(SLOTS):
            accepted = 1 + (step + row) % tokens
            close(out[row], layer.step(row, x, dt, B, C, tokens)[0])
            _, layer.expected[slot] = layer.step(row, x, dt, B, C, accepted)
            if prev[slot] + tokens > window:
                start[slot] = (start[slot] + prev[slot]) % rows
                prev[slot] = 0
            prev[slot] += accepted


def test_selective_state_update():
    layer = Mamba()
    x, dt, B, C = (one[:, 0] for one in layer.inputs(1))
    out = selective_state_update(
        layer.state,
        x,
        dt[..., None].expand(*dt.shape, DIM),
        B=B,
        C=C,
        dt_softplus=True,
        state_batch_indices=torch.tensor(SLOTS, dtype=torch.int32),
        backend="replayssm",
        **layer.weights(),
    )
    for row, slot in enumerate(SLOTS):
        given = (one[:, None] for one in (x, dt, B, C))
        expected, state = layer.step(row, *given, 1)
        close(out[row], expected[0])
        close(layer.state[slot], state)


def delta_rule(state, q, k, v, decay, beta):
    """One token of every head; decay is one number a head or one a channel."""
    q, k = (F.normalize(one, dim=-1)[..., None] for one in (q, k))
    state = state * decay
    update = beta[..., None] * (v - (state @ k)[..., 0])
    state = state + update[..., None] @ k.mT
    return (state @ q)[..., 0] * q.shape[-2] ** -0.5, state


def test_gated_delta_rule_decode():
    q, k = torch.randn(2, BATCH, 1, HEADS, DSTATE)
    v = torch.randn(BATCH, 1, HEADS, DIM)
    a, b = torch.randn(2, BATCH, 1, HEADS)
    A_log, dt_bias = torch.randn(2, HEADS)
    state = torch.randn(BATCH, HEADS, DIM, DSTATE) * DSTATE**-0.5
    decay = torch.exp(-A_log.exp() * F.softplus(a[:, 0] + dt_bias))[..., None, None]
    expected, after = delta_rule(
        state, q[:, 0], k[:, 0], v[:, 0], decay, b[:, 0].sigmoid()
    )
    out, returned = gated_delta_rule_decode_pretranspose(
        q, k, v, state, A_log, a, dt_bias, b, backend="replayssm"
    )
    assert returned is state
    close(out[:, 0], expected)
    close(state, after)


def test_recurrent_kda():
    q, k = torch.randn(2, BATCH, 1, HEADS, DSTATE)
    v = torch.randn(BATCH, 1, HEADS, DIM)
    g = -torch.rand(BATCH, 1, HEADS, DSTATE)
    beta = torch.rand(BATCH, 1, HEADS)
    state = torch.randn(BATCH, HEADS, DIM, DSTATE) * DSTATE**-0.5
    decay = torch.exp(g[:, 0])[..., None, :]
    expected, after = delta_rule(state, q[:, 0], k[:, 0], v[:, 0], decay, beta[:, 0])
    out, _ = recurrent_kda(q, k, v, g, beta, initial_state=state, backend="replayssm")
    close(out[:, 0], expected)
    close(state, after)


def test_prefill_is_refused():
    q = torch.randn(1, 5, HEADS, DSTATE)
    with pytest.raises(NotImplementedError, match="prefill"):
        recurrent_kda(q, q, q, -q.abs(), q[..., 0].sigmoid(), backend="replayssm")


def test_unknown_backend():
    with pytest.raises(ValueError, match="Unknown backend: other"):
        checkpointing_ssu(*[None] * 12, backend="other")
