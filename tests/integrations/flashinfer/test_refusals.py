"""What differs from FlashInfer on purpose: refused by name, with nothing written, instead of misread or ignored."""

import pytest
import torch

from replayssm.integrations import flashinfer as fi
from tests.integrations.flashinfer import test_gdn, test_kda
from tests.integrations.flashinfer.harness import Mamba


def step(**change):
    """A valid call of checkpointing_ssu but for one change; raises what it raises, after looking for writes."""
    run = Mamba(2, 4, [0, 1], H=2, G=1, V=16, K=16)
    x = run.inputs(2, 2)
    kwargs = run.pool | run.as_given(x) | {"out": torch.full_like(x["x"], 9.0), "dt_softplus": True}
    kwargs |= {"ring_start": run.start, "prev_num_accepted_tokens": run.prev}
    kwargs |= placed(change, kwargs)
    before = {name: one.clone() for name, one in kwargs.items() if isinstance(one, torch.Tensor)}
    try:
        fi.checkpointing_ssu(**kwargs)
    finally:
        for name, one in before.items():
            assert torch.equal(one.nan_to_num(), kwargs[name].nan_to_num()), name


def placed(change: dict, given: dict | None = None) -> dict:
    """A change's tensors where the test's are; what a change makes of a given argument."""
    made = {name: value(given[name]) if callable(value) else value for name, value in change.items()}
    on = torch.get_default_device()
    return {name: one.to(on) if isinstance(one, torch.Tensor) else one for name, one in made.items()}


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(B=lambda x: x.half()), ValueError, r"B: expected \[2, 2, 1, 16\] torch.float32, got .* torch.float16"),
        (dict(x_cache=lambda x: x.bfloat16()), ValueError, r"v: expected .* torch.float32, got .* torch.bfloat16"),
        (dict(dt=lambda x: x.contiguous()), ValueError, r"dt: expected one value a head, expanded \(stride 0 in dim\)"),
        (dict(A=lambda x: x.contiguous()), ValueError, "A: expected one value a head, expanded"),
        (dict(state=lambda x: x.double()), NotImplementedError, "state: supported are .* got torch.float64"),
        (dict(state=lambda x: x.to(torch.int8)), ValueError, "state_scale: expected one fp32 value a row .* got None"),
        (dict(state_scale=torch.zeros(3, 2, 16)), ValueError, "state_scale: expected None for a state of torch.float32"),
        (
            dict(rand_seed=torch.tensor([1])),
            ValueError,
            "rand_seed: expected None for a state of torch.float32, which rounds to",
        ),
        (
            dict(rand_seed=torch.tensor([1]), state=lambda x: x.bfloat16()),
            ValueError,
            "rand_seed: expected None for a state of torch.bfloat16",
        ),
        (dict(ring_start=lambda x: x.long()), ValueError, r"ring_start: expected \[3\] torch.int32, got .* torch.int64"),
        (dict(algorithm="fast"), ValueError, "algorithm: expected one of .* got 'fast'"),
        (dict(algorithm="two-kernel"), ValueError, "cb_scaled, cumAdt_vec, cb_old: expected all of them, got none for"),
        (dict(cb_old=torch.zeros(1)), ValueError, "expected all of them or none, got none for cb_scaled, cumAdt_vec"),
        (dict(max_seqlen=2), ValueError, "max_seqlen: expected with cu_seqlens and only then, got 2"),
        (dict(x_cache=lambda x: x[:, :, :3]), ValueError, r"x_cache: expected at least 2 T = 4 rows"),
        (dict(state_batch_indices=torch.tensor([0.0, 1.0])), ValueError, r"state_batch_indices: expected \[2\] torch.int32"),
        (dict(state=lambda x: x.transpose(2, 3)), ValueError, "state: expected contiguous"),
    ],
)
def test_checkpointing_ssu(change, error, message):
    with pytest.raises(error, match=message):
        step(**change)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(state_batch_indices=torch.tensor([0, 3])), r"state_batch_indices: expected slots below 3 .* got \[0, 3\]"),
        (dict(state_batch_indices=torch.tensor([0, -2])), "expected slots below 3 or pad_slot_id = -1"),
        (dict(state_batch_indices=torch.tensor([1, 1])), "state_batch_indices: expected each live slot once"),
        (dict(ring_start=torch.tensor([0, 6, 0], dtype=torch.int32)), "ring_start: expected 0 ... 5"),
        (
            dict(prev_num_accepted_tokens=torch.tensor([5, 0, 0], dtype=torch.int32)),
            "prev_num_accepted_tokens: expected 0 ... 4",
        ),
    ],
)
def test_ranges_in_debug_mode(change, message, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        step(**change)


def test_indices_are_never_clamped(backend):
    """Every negative slot is padding, beside any pad_slot_id: no state changes, outputs are 0."""
    run = Mamba(1, 3, [0, 1], H=2, G=1, V=16, K=16)
    x, before = run.inputs(3, 1), {name: one.clone() for name, one in run.pool.items()}
    out = torch.full_like(x["x"], 9.0)
    for pad in (-1, 0, -7):
        fi.checkpointing_ssu(
            **run.pool, ring_start=run.start, prev_num_accepted_tokens=run.prev, **run.as_given(x), out=out, dt_softplus=True,
            state_batch_indices=torch.tensor([-1, max(pad, -1), -7]), pad_slot_id=pad,
        )  # fmt: skip
        assert not out.any()
        assert all(torch.equal(one.nan_to_num(), run.pool[name].nan_to_num()) for name, one in before.items())


def update(**change):
    run = Mamba(1, 1, [0], H=2, G=1, V=16, K=16)
    x = run.as_given(run.inputs(2, 2))
    fi.selective_state_update(**{"state": run.pool["state"], "cache_steps": 2} | x | change)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(disable_state_update=True, dst_state_batch_indices=torch.tensor([0, 1])), "disable_state_update: expected False"),
        (
            dict(intermediate_states_buffer=torch.zeros(2, 2, 2, 16, 16)),
            "intermediate_state_indices: expected .* got None: FlashInfer's documentation means the batch row then",
        ),
        (
            dict(intermediate_states_buffer=torch.zeros(2, 1, 2, 16, 16), intermediate_state_indices=torch.tensor([0, 1])),
            "intermediate_states_buffer: expected contiguous with at least 2 steps",
        ),
        (
            dict(intermediate_states_buffer=torch.zeros(2, 2, 2, 16, 16, dtype=torch.float16)),
            "intermediate_states_buffer: expected .* torch.float32, got .* torch.float16",
        ),
        (dict(backend="triton"), "backend: expected one of"),
        (dict(rand_seed=torch.tensor([1])), "rand_seed: expected None for a state of torch.float32"),
    ],
)
def test_selective_state_update(change, message):
    with pytest.raises(ValueError, match=message):
        update(**placed(change))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=lambda x: x.repeat(1, 3, 1, 1)), ValueError, "q: expected at most 4 tokens a row with a ring of 8 rows, got 6"),
        (dict(flush_min=4), ValueError, r"flush_min: expected 1 ... 3 with 2 tokens a row, got 4"),
        (dict(use_qk_l2norm_in_kernel=False), ValueError, r"use_qk_l2norm_in_kernel: expected one of \[True\]"),
        (dict(softplus_beta=2.0), ValueError, r"softplus_beta: expected one of \[1.0\], got 2.0"),
        (dict(output_state_indices=torch.tensor([0])), NotImplementedError, "output_state_indices: supported is None"),
        (dict(stochastic_rounding="lcg"), NotImplementedError, "stochastic_rounding: supported are 'philox'"),
        (dict(stochastic_rounding="philox"), ValueError, "rand_seed: expected .* got None"),
        (
            dict(stochastic_rounding="philox", rand_seed=torch.tensor([1])),
            ValueError,
            "rand_seed: expected None for a state of torch.float32",
        ),
        (dict(k_cache=lambda x: x.half()), ValueError, "k_cache: expected .* torch.float32, got .* torch.float16"),
        (dict(k_cache=None), ValueError, "k_cache: expected a tensor, got None"),
        (dict(hist_len=lambda x: x.long()), ValueError, "hist_len: expected .* torch.int32"),
        (dict(cache_base=None), ValueError, "cache_base: expected .* with restart_hist_on_flush"),
    ],
)
def test_ucache(change, error, message):
    run = test_gdn.Ring(2, [0], R=8)
    x = test_gdn.tokens(run.g, 1, 2, V=16, K=16)
    cursors = {name: torch.zeros(1, dtype=torch.int32) for name in ("hist_len", "cache_base")}
    kwargs = x | cursors | {"k_cache": run.k, "u_cache": run.u, "g_cache": run.gsum, "initial_state_source": run.pool}
    kwargs |= {"A_log": run.A_log, "dt_bias": run.dt_bias} | placed(change, kwargs)
    with pytest.raises(error, match=message):
        fi.gated_delta_rule_mtp_ucache_flush(**kwargs)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(backend="triton"), ValueError, "backend: expected one of"),
        (dict(lower_bound=-5.0), ValueError, "lower_bound: expected < 0 with use_gate_in_kernel"),
        (dict(use_gate_in_kernel=True), ValueError, r"A_log: expected \[H\] with use_gate_in_kernel, got None"),
        (dict(num_spec_tokens=3), ValueError, "num_spec_tokens: expected >= 1 and one less than a row's tokens, got 3 for 1"),
        (dict(disable_state_update=True), ValueError, "initial_state: expected a pool with disable_state_update"),
        (dict(ssm_state_indices=torch.tensor([0, 1])), ValueError, "initial_state: expected a pool with ssm_state_indices"),
        (dict(correction_cache=torch.zeros(1)), ValueError, "correction_cache, kg_cache: expected both or neither"),
        (dict(state_checkpoints=torch.zeros(1)), NotImplementedError, "recurrent_kda: supported are one token a row"),
    ],
)
def test_recurrent_kda(change, error, message):
    layer = test_kda.Layer("ready")
    with pytest.raises(error, match=message):
        fi.recurrent_kda(**layer.tokens(2, 1), **placed(change))


def test_scratch():
    """FlashInfer's sizes, for any window."""
    shapes = [tuple(x.shape) for x in fi.allocate_checkpointing_ssu_scratch(3, 4, 1, 20, torch.bfloat16, "cpu")]
    assert shapes == [(3, 4, 32, 8), (3, 4, 16), (3, 4, 32, 12)]
    with pytest.raises(ValueError, match="max_window: expected >= 1, got 0"):
        fi.allocate_checkpointing_ssu_scratch(3, 4, 1, 0, torch.bfloat16, "cpu")
