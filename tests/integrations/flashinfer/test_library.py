"""The calls as ops: what they write is declared, torch.compile sees one op a call."""

import inspect
import math

import pytest
import torch

from replayssm.integrations import flashinfer as fi
from replayssm.integrations.flashinfer import kda, library, mamba
from tests.harness import DEVICE
from tests.integrations.flashinfer import test_gdn, test_kda
from tests.integrations.flashinfer.harness import Mamba

NAMES = {
    "checkpointing_ssu": fi.checkpointing_ssu,
    "selective_state_update": fi.selective_state_update,
    "gated_delta_rule_mtp_ucache_flush": fi.gated_delta_rule_mtp_ucache_flush,
    "gated_delta_rule_decode_pretranspose": fi.gated_delta_rule_decode_pretranspose,
    "recurrent_kda_decode": kda.recurrent_kda_decode,
    "recurrent_kda_commit": fi.recurrent_kda_commit,
}
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the checks run the plain torch backend")


def two_rows():
    run = Mamba(2, 4, [0, 1], H=2, G=1, V=16, K=16)
    for name in ("x_cache", "B_cache", "dt_cache"):
        run.pool[name] = run.randn(*run.pool[name].shape)
    run.pool["state"] = run.randn(*run.pool["state"].shape)
    run.prev += torch.tensor([3, 1, 0], dtype=torch.int32)  # the first folds
    x = run.inputs(2, 2)
    return run, run.as_given(x) | {"out": torch.zeros_like(x["x"]), "dt_softplus": True}


def calls(name):
    """Arguments of a call that writes all it may write, and some of one that leaves optional ones out."""
    g = torch.Generator().manual_seed(0)
    if name == "checkpointing_ssu":
        run, x = two_rows()
        cursors = {"ring_start": run.start, "prev_num_accepted_tokens": run.prev}
        yield run.pool | cursors | x
        yield run.pool | cursors | x | {"state_batch_indices": torch.tensor([1, -1]), "rand_seed": None, "pad_slot_id": 0}
    elif name == "selective_state_update":
        run, x = two_rows()
        snapshots = torch.zeros(2, 2, 2, 16, 16)
        common = {"state": run.pool["state"], "cache_steps": 2} | x
        yield common | {"intermediate_states_buffer": snapshots, "intermediate_state_indices": torch.tensor([1, 0])}
        yield common | {"disable_state_update": True}
    elif name == "gated_delta_rule_mtp_ucache_flush":
        run = test_gdn.Ring(2, [0, 1], R=8)
        for one in (run.pool, run.k, run.u, run.gsum):
            one.copy_(test_gdn.randn(g, *one.shape))
        x = test_gdn.tokens(g, 2, 2, V=16, K=16)
        for restart in (True, False):
            yield x | {
                "A_log": run.A_log, "dt_bias": run.dt_bias, "initial_state_source": run.pool, "k_cache": run.k,
                "u_cache": run.u, "g_cache": -run.gsum.abs(), "hist_len": torch.tensor([3, 1], dtype=torch.int32),
                "cache_base": torch.tensor([6, 0], dtype=torch.int32), "output": torch.zeros_like(x["v"]),
                "restart_hist_on_flush": restart,
            }  # fmt: skip
    elif name == "gated_delta_rule_decode_pretranspose":
        x = test_gdn.tokens(g, 2, 2, V=16, K=16)
        common = x | {"A_log": test_gdn.randn(g, 2), "dt_bias": test_gdn.randn(g, 2), "output": torch.zeros_like(x["v"])}
        yield common | {"state": test_gdn.randn(g, 2, 2, 16, 16)}
        pool = test_gdn.randn(g, 3, 2, 16, 16)
        buffer = torch.zeros(2, 2, 2, 16, 16)
        indices = {"initial_state_indices": torch.tensor([2, -1]), "intermediate_states_buffer": buffer}
        yield common | {"state": None, "initial_state": pool} | indices
    else:
        layer = test_kda.Layer("softplus")
        caches = torch.zeros(test_kda.S, 2, 2, 16), torch.zeros(test_kda.S, 2, 2, 32)
        if name == "recurrent_kda_commit":
            yield {
                "checkpoint_state": layer.pool, "correction_cache": caches[0], "kg_cache": caches[1] + 0.1,
                "state_indices": torch.tensor([1, 0]), "accept_lens": torch.tensor([2, 0]), "use_gate_in_kernel": True,
            } | layer.weights  # fmt: skip
            return
        nothing = dict.fromkeys(inspect.signature(kda.recurrent_kda_decode).parameters)
        x = layer.tokens(2, 2)
        common = nothing | x | layer.weights | {"initial_state": layer.pool, "output": torch.zeros_like(x["v"])}
        common |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "beta_is_logit": True}
        yield common | {"disable_state_update": False, "num_spec_tokens": 1}
        yield common | {"disable_state_update": True, "correction_cache": caches[0], "kg_cache": caches[1]}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, monkeypatch):
    """Schema, fake function and dispatch; between its calls each op writes all it declares."""
    # opcheck copies tensors without their strides, and one value a head is told by those.
    monkeypatch.setattr(mamba, "one_per_token", lambda name, x: x[..., 0])
    monkeypatch.setattr(mamba, "one_per_head", lambda name, x, shape: None if x is None else x[(..., *[0] * (x.dim() - 1))])
    op, changed = getattr(torch.ops.replayssm, name).default, set()
    declared = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for kwargs in calls(name):
        torch.library.opcheck(op, (), kwargs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
        before = {n: one.clone() for n, one in kwargs.items() if isinstance(one, torch.Tensor)}
        op(**kwargs)
        changed |= {n for n, one in before.items() if not torch.equal(one, kwargs[n])}
    optional = {"state_scale", "intermediate_state_scales"}  # of scaled states, which the checks cannot compare
    assert declared - optional <= changed <= declared


def test_every_op_is_checked():
    defined = {name.rpartition("::")[2] for name in library._library._op_defs}
    assert defined == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "recurrent_kda_commit"])
def test_compiled_calls_equal_eager(name):
    """One graph, an op for the call, outputs allocated where the caller gives none; the same bits in all tensors."""
    out = "out" if name in ("checkpointing_ssu", "selective_state_update") else "output"
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        kwargs = next(iter(calls(name)))
        if name != "checkpointing_ssu":
            kwargs[out] = None
        function = NAMES[name]

        def step(given, function=function):
            returned = function(**given)
            return returned[0] * 2 if isinstance(returned, tuple) else returned * 2

        if compiled:
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        results.append((step(kwargs), kwargs))
    (one, given), (other, theirs) = results
    assert torch.equal(one, other) and not math.isnan(float(one.sum()))
    for key, value in given.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, theirs[key]), key
    torch._dynamo.reset()
