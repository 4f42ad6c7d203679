"""Gates, norm and epilogue against the formulas as the models' papers write them, spelled here anew in fp64."""

import dataclasses
import math

import pytest
import torch

from replayssm import GDN, GLA, KDA, KDA_SAFE, MAMBA2, Recurrence, ReplayState
from replayssm.recurrence import FAMILIES, epilogue, gates, softplus, unit
from tests.cases import FAMILY, READY, inputs
from tests.harness import BACKENDS, DEVICE

H, K, V = 3, 4, 5
# Both sides of the softplus threshold, and where log(1 + exp(x)) loses its digits or overflows.
EDGES = [-1e4, -100.0, -30.0, -7.0, -3.0, -0.25, 0.0, 0.5, 19.999, 20.0, 20.001, 88.0, 1e4]
SIGMOID_READY = Recurrence("sigmoid-ready", False, False, "sigmoid", "ready", False)


def plain_softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def plain_sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def plain_gates(row: Recurrence, b: float, a: float, A_log: float, bias: float) -> tuple[float, float]:
    """beta and g of one token and channel, spelled per family."""
    family = row.name.removesuffix("-ready")
    if family == "mamba2":
        dt = plain_softplus(b + bias)
        return dt, -math.exp(A_log) * dt
    if family == "gla":
        return 1.0, a
    if row.decay == "ready":
        return (b if row.beta == "ready" else plain_sigmoid(b)), a
    if family == "kda_safe":
        return plain_sigmoid(b), -5.0 * plain_sigmoid(math.exp(A_log) * (a + bias))
    return plain_sigmoid(b), -math.exp(A_log) * plain_softplus(a + bias)


def test_softplus_turns_linear_above_20():
    x = torch.tensor(EDGES, dtype=torch.float64)
    expected = torch.tensor([plain_softplus(e) for e in EDGES], dtype=torch.float64)
    torch.testing.assert_close(softplus(x), expected, rtol=1e-12, atol=0)
    above = x > 20
    assert torch.equal(softplus(x)[above], x[above])
    torch.testing.assert_close(softplus(x.float()).double(), expected, rtol=1e-6, atol=1e-40)  # exp(-100) is subnormal


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    "row",
    [*FAMILIES.values(), *(c.recurrence for c in READY.values()), SIGMOID_READY],
    ids=lambda r: f"{r.name}-{r.decay}",
)
def test_gates(row, bias):
    """beta [N, H] and g [N, H, KG] of every element; inputs reach both softplus branches and a shut safe gate."""
    generator = torch.Generator().manual_seed(0)
    N, KG = 40, K if row.per_channel else 1
    shape, per_head = ((N, H, K), (H, K)) if row.per_channel else ((N, H), (H,))
    b, a = (torch.randn(s, generator=generator, dtype=torch.float64) * 15 for s in ((N, H), shape))
    A_log = torch.randn(H, generator=generator, dtype=torch.float64)
    dt_bias = torch.randn(per_head, generator=generator, dtype=torch.float64) if bias else None
    beta, g = gates(
        row,
        None if row.beta == "one" else b,
        None if row.decay == "derived" else a,
        None if row.decay == "ready" else -A_log.exp(),
        dt_bias if row.biased else None,
        torch.zeros(N, H, V, dtype=torch.float64),
    )
    assert beta.shape == (N, H) and g.shape == (N, H, KG)
    for n in range(N):
        for h in range(H):
            for c in range(KG):
                where = (n, h, c) if row.per_channel else (n, h)
                one_bias = 0.0 if dt_bias is None else float(dt_bias[where[1:]])
                expected = plain_gates(row, float(b[n, h]), float(a[where]), float(A_log[h]), one_bias)
                got = (float(beta[n, h]), float(g[n, h, c]))
                assert got == pytest.approx(expected, rel=1e-12, abs=1e-300), where


def test_gates_take_low_precision_inputs_to_the_dtype_of_v():
    """bf16 gate inputs are widened first: beta and g are never rounded to bf16."""
    b, a = torch.tensor([[0.3]], dtype=torch.bfloat16), torch.tensor([[-0.7]], dtype=torch.bfloat16)
    beta, g = gates(GDN, b, a, torch.tensor([-0.9]), torch.tensor([0.1]), torch.zeros(1, 1, V))
    assert beta.dtype == g.dtype == torch.float32
    assert float(beta) == pytest.approx(plain_sigmoid(float(b)), rel=1e-6)
    assert float(g) == pytest.approx(-0.9 * plain_softplus(float(a) + 0.1), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in FAMILY.values() if c.recurrence.biased], ids=str)
def test_rings_hold_gates_to_fp32_accuracy(case, backend):
    """beta and g of both backends over the whole range of their inputs: small ones keep their digits too."""
    layout, row, N = case.layout(W=2), case.recurrence, len(EDGES)
    A_log, x = torch.linspace(-2, 1, layout.H, dtype=torch.float64), inputs(layout, N, torch.Generator().manual_seed(0))
    x |= {
        name: torch.tensor(EDGES).view(N, *[1] * (x[name].dim() - 1)).repeat(1, *x[name].shape[1:])
        for name in ("b", "a")
        if name in x
    }
    A = -A_log.exp().float().to(DEVICE)
    state = ReplayState(layout, 1, N, DEVICE, backend, A=A[None] if row.decay == "derived" else None)
    plan = state.plan(torch.arange(N, device=DEVICE))
    bias = torch.full((layout.H, layout.K) if row.per_channel else (layout.H,), 0.25, device=DEVICE)
    x = {name: one.to(DEVICE) for name, one in x.items()}
    state.step(0, plan, **x, A=None if row.decay == "derived" else A, dt_bias=bias)
    for n, edge in enumerate(EDGES):
        for h in range(layout.H):
            beta, g = plain_gates(row, edge, edge, float(A_log[h]), 0.25)
            assert float(state.buffers.beta[0, n, h, 0]) == pytest.approx(beta, rel=1e-5, abs=1e-37)
            if row.stores_g:
                stored = state.buffers.g[0, n, h, 0].double().cpu()
                torch.testing.assert_close(stored, torch.full_like(stored, g), rtol=1e-5, atol=1e-37)


def test_unit():
    """x / sqrt(|x|^2 + 1e-6) where the family normalises, x itself elsewhere; a zero vector stays zero."""
    x = torch.tensor([[3.0, 4.0], [3e-4, 4e-4], [0.0, 0.0]], dtype=torch.float64)
    for i, expected in enumerate(([3, 4], [3e-4, 4e-4], [0, 0])):
        norm = math.sqrt(sum(e * e for e in expected) + 1e-6)
        assert unit(GDN, x)[i].tolist() == pytest.approx([e / norm for e in expected], rel=1e-12)
    assert unit(MAMBA2, x) is x
    assert GDN.q_scale(64) == 0.125 and MAMBA2.q_scale(64) == 1.0 and dataclasses.replace(GLA, scale=0.3).q_scale(64) == 0.3


def test_epilogue():
    """(o + D v) silu(z): D before the gate, each alone too."""
    o, v, z = (torch.tensor([[[x]]], dtype=torch.float64) for x in (2.0, 3.0, 0.5))
    D, gate = torch.tensor([0.25]), 0.5 * plain_sigmoid(0.5)
    assert float(epilogue(o, v, D, z)) == pytest.approx((2 + 0.25 * 3) * gate, rel=1e-12)
    assert float(epilogue(o, v, D, None)) == 2.75
    assert float(epilogue(o, v, None, z)) == pytest.approx(2 * gate, rel=1e-12)
    assert epilogue(o, v, None, None) is o


def test_rows_of_the_table():
    """What the byte model, the kernels and the engines read off a row."""
    assert {r.name: (r.delta, r.per_channel, r.normalize, r.stores_g) for r in FAMILIES.values()} == {
        "mamba2": (False, False, False, False),
        "gdn": (True, False, True, True),
        "kda": (True, True, True, True),
        "kda_safe": (True, True, True, True),
        "gla": (False, True, False, True),
    }
    assert KDA_SAFE.lower_bound == -5.0 and KDA.decay == "softplus" and GLA.beta == "one"


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(beta="tanh"), ValueError, "beta: expected one of .*'sigmoid'.* got 'tanh'"),
        (dict(decay="exp"), ValueError, "decay: expected one of .*'softplus'.* got 'exp'"),
        (dict(decay="safe"), ValueError, "lower_bound: expected < 0 .* got 0.0"),
        (dict(decay="safe", lower_bound=1.0), ValueError, "lower_bound: expected < 0 .* got 1.0"),
        (dict(decay="derived", per_channel=True), NotImplementedError, "decay 'derived' .* got per_channel=True"),
        (dict(decay="derived", beta="one"), NotImplementedError, "decay 'derived' .* beta='one'"),
        (dict(beta="softplus"), NotImplementedError, "beta 'softplus' .* got decay='softplus'"),
        (dict(beta="softplus", decay="ready", per_channel=True), NotImplementedError, "beta 'softplus' .*channel=True"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)  # fmt: skip
def test_refused_combinations(change, error, message):
    with pytest.raises(error, match=f"^recurrence x: {message}"):
        dataclasses.replace(GDN, name="x", **change)
