"""The conformance command: without TensorRT-LLM it says so; over fakes, which are not TensorRT-LLM, it finds changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from replayssm import KDA, MAMBA2, reference
from replayssm.integrations.trtllm import conformance, contract
from replayssm.recurrence import GDN
from tests.integrations.trtllm import fakes
from tests.integrations.trtllm.serving import MANAGERS, behaviours


def test_without_tensorrt_llm_it_says_not_installed():
    """Exit code 2, which nothing may read as a pass."""
    command = [sys.executable, "-m", "replayssm.integrations.trtllm.conformance"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (2, "TensorRT-LLM is not installed: nothing was compared"), done.stderr


def _decode(row, pool, slots, **inputs):
    """The oracle over a pool, one token a row."""
    outputs = []
    for i, slot in enumerate(slots.tolist()):
        one = {name: x[i : i + 1] for name, x in inputs.items() if name in "qkvba"}
        w = {name: x for name, x in inputs.items() if name not in "qkvba"}
        o, state = reference.decode(row, pool[slot], **one, **w)
        pool[slot] = state.to(pool.dtype)
        outputs.append(o[0])
    return torch.stack(outputs).bfloat16()


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=None, state_batch_indices=None, **kwargs
):
    """The fake of the function of this name."""
    w = {"A": A[:, 0, 0], "D": D[:, 0], "dt_bias": dt_bias[:, 0]}
    kwargs["out"].copy_(_decode(MAMBA2, state, state_batch_indices, q=C, k=B, v=x, b=dt[..., 0], **w))


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale=None,
    use_qk_l2norm_in_kernel=None, cu_seqlens=None, output=None,
):  # fmt: skip
    """The fake of the function of this name."""
    x = {"q": q[0], "k": k[0], "v": v[0], "a": a, "b": b}
    return _decode(GDN, initial_state_source, initial_state_indices, **x, A=-A_log.exp(), dt_bias=dt_bias)[None]


def fused_recurrent_kda(q, k, v, g, beta, **kwargs):
    """The fake of the function of this name."""
    pool, rows = kwargs["initial_state"].clone(), torch.arange(len(q))
    x = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0], "a": g[:, 0], "b": beta[:, 0]}
    w = {"A": -kwargs["A_log"].exp(), "dt_bias": kwargs["dt_bias"].view(q.shape[2:])}
    return _decode(KDA, pool, rows, **x, **w)[:, None], pool


FUNCTIONS = (selective_state_update, fused_sigmoid_gating_delta_rule_update, fused_recurrent_kda)


def installed(form, monkeypatch, of=None, version=fakes.VERSION, **changed):
    """Fakes of a contract, whose functions are the oracle."""
    whole = behaviours(form) | {one.__name__: one for one in FUNCTIONS} | changed
    fakes.install(fakes.generate(of or contract.load(), form, whole, version), monkeypatch)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(conformance, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(conformance, "STEPS", 2)
    torch.manual_seed(0)


@pytest.mark.parametrize("form", MANAGERS)
def test_fakes_of_the_contract_conform(form, on_cpu, monkeypatch, capsys):
    installed(form, monkeypatch)
    monkeypatch.setattr(conformance, "STEPS", 17 if form == "current" else 1)  # beyond a window
    assert conformance.main() == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert f"TensorRT-LLM {fakes.VERSION}" in said and "0 differences" in said and form in said


def _without(name):
    return lambda text: text.replace(f"- name: {name}\n", f"- name: {name}_renamed\n", 1)


def _replaced(a, b):
    return lambda text: text.replace(a, b, 1)


@pytest.mark.parametrize("change, message", [
    (_without("register_auto_model"), "register_auto_model: expected in tensorrt_llm._torch.models.modeling_utils, found none"),
    (_replaced("_store_core: [core, output]", "_store_core: [core]"),
     "KimiKDALinearAttention._store_core: expected (core, output), got (self, /, core)"),
    (_replaced("[model_config, kv_cache_config, is_disagg=", "[model_config, kv_cache_config, layers, is_disagg="),
     "get_kv_cache_manager_cls: expected (model_config, kv_cache_config, is_disagg=None"),
    (_replaced("_output_gate: [x, o, onorm_g=]", "_output_gate: [o, x, onorm_g=]"),
     "_output_gate: expected (x, o, onorm_g=None), got (self, /, o, x, onorm_g=None)"),
    (_replaced("class: Qwen3NextForCausalLM", "class: Qwen3Next"), "Qwen3NextForCausalLM: expected Qwen3NextForCausalLM in"),
])  # fmt: skip
def test_fakes_of_a_changed_contract_drift(change, message, on_cpu, monkeypatch, capsys):
    """Each difference on a line of its own, and exit code 1."""
    text = (contract.files("replayssm.integrations.trtllm") / "contract.yaml").read_text()
    changed = contract.parse(change(text))
    modules = fakes.generate(changed, "current", {"model": behaviours("current")["model"]} | {f.__name__: f for f in FUNCTIONS})
    fakes.install(modules, monkeypatch)
    assert conformance.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(message in line for line in lines) == 1, lines
    assert "1 differences" in lines[1], lines


def test_another_version_is_named(on_cpu, monkeypatch, capsys):
    installed("current", monkeypatch, version="1.2.1")
    assert conformance.main() == 1
    assert "version: expected >=1.4.0rc4,<1.5, got 1.2.1" in capsys.readouterr().out


def test_steps_that_differ_are_drift(on_cpu, monkeypatch, capsys):
    """An engine that decays twice as fast."""

    def selective_state_update(
        state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=None, state_batch_indices=None, **kwargs
    ):
        w = {"A": 2 * A[:, 0, 0], "D": D[:, 0], "dt_bias": dt_bias[:, 0]}
        kwargs["out"].copy_(_decode(MAMBA2, state, state_batch_indices, q=C, k=B, v=x, b=dt[..., 0], **w))

    installed("current", monkeypatch, selective_state_update=selective_state_update)
    assert conformance.main() == 1
    said = capsys.readouterr().out
    assert "selective_state_update: expected outputs within" in said and "fused_recurrent_kda" not in said


def test_without_a_gpu_steps_are_not_passed(monkeypatch, capsys):
    installed("current", monkeypatch)
    monkeypatch.setattr(conformance, "_device", lambda: None)
    assert conformance.main() == 1
    assert "steps: expected a CUDA device to compare them on, found none" in capsys.readouterr().out
