"""`replayssm config flashinfer`: which calls become ours, what their caller allocates, and what is refused by name."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("pydantic")

from typer.testing import CliRunner

import replayssm.cli.config as command
from replayssm.cli.app import app
from replayssm.configuration import Configuration
from replayssm.integrations.flashinfer import configuration
from replayssm.integrations.flashinfer.patch import OPS, VARIABLE


@pytest.fixture
def outcome(monkeypatch):
    monkeypatch.setattr(command, "_validate", lambda *args: None)
    return lambda *args: CliRunner().invoke(app, ["config", "flashinfer", *args])


def test_environment_alone_on_stdout(outcome):
    done = outcome("--model", "Nemotron-3-Nano-4B", "--window", "12", "--speculate", "4", "--checkpoint", "int8+sr:row")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{VARIABLE}=checkpointing_ssu,replayssm_materialize,selective_state_update\n"
    for tensor in (
        "state [S, 96, 80, 128] int8", "state_scale [S, 96, 80] float32", "x_cache [S, 96, 16, 80] bfloat16",
        "B_cache [S, 8, 16, 128] bfloat16", "dt_cache [S, 96, 16] float32", "pass rand_seed",
    ):  # fmt: skip
        assert tensor in done.stderr, tensor
    found = json.loads(outcome("--model", "Qwen3.5-4B", "--window", "16", "--u", "fp32", "--json").stdout)
    assert found["settings"] == {VARIABLE: "gated_delta_rule_mtp_ucache_flush,gated_delta_rule_decode_pretranspose"}
    notes = " ".join(found["notes"])
    assert "k_cache [S, 16, 32, 128] bfloat16; u_cache [S, 32, 32, 128] float32; g_cache [S, 32, 32] float32" in notes
    assert "initial_state_source [S, 32, 128, 128] float32" in notes


@pytest.mark.parametrize(
    "args, message",
    [
        (["--model", "Kimi-K3"], "model: supported are mamba2, gdn, got kda_safe"),
        (["--read", "int8"], "read: FlashInfer's calls have no copy to read, got 'int8'"),
        (["--checkpoint", "int8:row"], "checkpoint: supported for gdn are bf16, fp16, fp16+sr, fp32, got 'int8:row'"),
        (["--model", "Nemotron-3-Nano-4B", "--checkpoint", "int8"], "checkpoint: supported for mamba2 are"),
    ],
)
def test_refused_by_name(outcome, args, message):
    done = outcome(*([] if "--model" in args else ["--model", "Qwen3.5-4B"]), *args)
    assert (done.exit_code, done.stdout) == (2, "") and message in done.stderr


def test_flashinfer_has_the_names(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))  # it writes there when imported
    mamba = pytest.importorskip("flashinfer.mamba")
    before = mamba.checkpointing_ssu
    configuration.check(Configuration("environment", {VARIABLE: ",".join(configuration.OPS["mamba2"])}))
    assert mamba.checkpointing_ssu is before
    with pytest.raises(ValueError, match="ops: expected some of"):
        configuration.check(Configuration("environment", {VARIABLE: "checkpointing"}))
    assert {op for ops in configuration.OPS.values() for op in ops} <= OPS.keys()
