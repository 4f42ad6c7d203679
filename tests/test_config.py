"""`replayssm config`, as a user starts it: what is printed, what is refused, and what the engine's own parser says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("pydantic")
yaml = pytest.importorskip("yaml")

from typer.testing import CliRunner

from replayssm.cli.app import app
from replayssm.configuration import Configuration
from replayssm.integrations.trtllm.settings import Settings, settings_of

KIMI = {"num_heads": 32, "head_dim": 128, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
ENGINE = """
from typing import Any
from pydantic import BaseModel, ConfigDict

class TorchLlmArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    model_kwargs: dict[str, Any]
    kv_cache_config: dict[str, Any]
"""


def replayssm(*args: str, path: str = "") -> subprocess.CompletedProcess:
    start = "from replayssm.cli import main; main()"
    search = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    environment = os.environ | ({"PYTHONPATH": search} if search else {})
    command = [sys.executable, "-c", start, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def outcome(*args: str):
    return CliRunner().invoke(app, ["config", *args])


@pytest.fixture
def engine(tmp_path):
    """A folder that holds an installed TensorRT-LLM of one version, whose arguments are those of ENGINE."""
    (tmp_path / "tensorrt_llm" / "llmapi").mkdir(parents=True)
    (tmp_path / "tensorrt_llm" / "llmapi" / "llm_args.py").write_text(ENGINE)
    about = tmp_path / "tensorrt_llm-1.4.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.4.0\n")
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text('__version__ = "1.4.0"\n')
    return tmp_path


def test_yaml_alone_on_stdout():
    done = replayssm(
        "config", "trtllm", "--model", "Nemotron-3-Nano-4B", "--speculate", "4", "--read", "int8", "--window", "20"
    )
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    assert settings_of(found["model_kwargs"]) == Settings(mode="require", window=20, checkpoint="fp32", read="int8")
    assert found["kv_cache_config"] == {"mamba_ssm_cache_dtype": "float32"}
    assert found["speculative_config"] == {"decoding_type": "MTP", "max_draft_len": 3}
    assert "trtllm is not installed here" in done.stderr and "(MTP)" in done.stderr
    assert "--window 16" not in done.stderr


def test_json_and_a_config_of_hugging_face(tmp_path):
    path = tmp_path / "config.json"
    about = {"model_type": "kimi_linear", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": KIMI}
    path.write_text(json.dumps(about | {"architectures": ["KimiLinearForCausalLM"]}))
    done = outcome("trtllm", "--model", str(tmp_path), "--checkpoint", "bf16", "--window", "9", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["engine"], found["form"], found["validated"]) == ("trtllm", "yaml", None)
    assert yaml.safe_load(found["text"]) == found["settings"]
    assert found["settings"]["model_kwargs"]["replayssm"] == {"mode": "require", "window": 9, "checkpoint": "bf16"}
    assert found["settings"]["kv_cache_config"] == {"mamba_ssm_cache_dtype": "bfloat16"}
    path.write_text(json.dumps(about))
    assert "model: supported are the architectures" in outcome("trtllm", "--model", str(tmp_path)).stderr


def test_composite_models_take_settings_as_text_config():
    found = json.loads(outcome("trtllm", "--model", "Qwen3.5-4B", "--json").stdout)["settings"]["model_kwargs"]
    assert settings_of(found).mode == "require" and list(found) == ["text_config"]


def test_window_is_that_of_plan():
    for more in ((), ("--speculate", "8", "--acceptance", "0.5"), ("--read", "nvfp4")):
        args = ("--model", "Kimi-Linear-48B-A3B", "--json", *more)
        planned = json.loads(CliRunner().invoke(app, ["plan", *args]).stdout)["window"]
        found = json.loads(outcome("trtllm", *args).stdout)["settings"]["model_kwargs"]["replayssm"]
        assert found["window"] == planned


def test_with_drafts_the_window_fits_the_engine_s_history():
    """Its two halves of 16 rows hold the window and the step's tokens."""
    args = ("trtllm", "--model", "Nemotron-3-Super-120B-A12B", "--speculate", "6", "--json")
    found = json.loads(outcome(*args).stdout)
    assert found["settings"]["model_kwargs"]["replayssm"]["window"] == 26 and "--window 16" in found["notes"][-1]
    assert "window: expected at most 26" in outcome(*args, "--window", "27").stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["vllm"], "engine: expected one of sglang, trtllm, flashinfer, got 'vllm'"),
        (["trtllm", "--model", "gpt-2"], "model: expected one of Qwen3.5-4B"),
        (["trtllm", "--model", "GLM-5.3-Flash"], "got 'Glm5NextForConditionalGeneration'"),
        (["trtllm", "--checkpoint", "nvfp4"], "checkpoint: Input should be 'auto', 'fp32'"),
        (["trtllm", "--checkpoint", "fp64"], "state format: expected one of"),
        (["trtllm", "--model", "Kimi-K3", "--checkpoint", "fp16+sr"], "checkpoint: TensorRT-LLM keeps Kimi's states"),
        (["trtllm", "--read", "bf16"], "read format: expected one of ['e4m3', 'int8', 'nvfp4'], got 'bf16'"),
        (["trtllm", "--u", "fp32"], "u: not offered with TensorRT-LLM, got 'fp32'"),
        (["trtllm", "--u", "fp8"], "u: expected one of fp32, bf16, fp16, got 'fp8'"),
        (["trtllm", "--model", "Nemotron-3-Nano-4B", "--u", "fp32"], "u: expected with the delta rule alone"),
        (["trtllm", "--window", "3", "--speculate", "4"], "window: expected at least the 4 tokens of a step, got 3"),
        (["trtllm", "--speculate", "0"], "tokens: expected >= 1, got 0"),
        (["trtllm", "--speculate", "40"], "T_max: supported are 1 ... 32"),
        (["trtllm", "--speculate", "4", "--drafts", "ngram"], "drafts: supported with TensorRT-LLM is mtp"),
        (["trtllm", "--drafts", "medusa"], "drafts: expected one of mtp, ngram, got 'medusa'"),
        (["trtllm", "--acceptance", "2"], "acceptance: expected above 0, at most 1, got 2.0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_by_name(args, message):
    done = outcome(*args[:1], *([] if "--model" in args else ["--model", "Qwen3.5-4B"]), *args[1:])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("replayssm: ") and message in line


def test_the_installed_engine_reads_it(engine):
    args = ("config", "trtllm", "--model", "Nemotron-3-Nano-4B", "--json")
    done = replayssm(*args, path=str(engine))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["validated"] == "1.4.0"
    done = replayssm(*args, "--speculate", "4", path=str(engine))  # this one has no speculative_config
    assert (done.returncode, done.stdout) == (1, "")
    assert "replayssm: trtllm 1.4.0: " in done.stderr and "speculative_config" in done.stderr
    (engine / "tensorrt_llm" / "__init__.py").write_text('__version__ = "1.3.0"\n')
    done = replayssm(*args, path=str(engine))
    assert done.returncode == 1 and "TensorRT-LLM 1.3.0: supported are" in done.stderr


def test_without_the_extra():
    start = "import sys; sys.modules['yaml'] = None; from replayssm.cli import main; main()"
    command = [sys.executable, "-c", start, "config", "trtllm", "--model", "Qwen3.5-4B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == "replayssm: yaml is not installed; pip install 'replayssm[cli]'"


def test_help_has_an_example():
    done = outcome("--help")
    assert done.exit_code == 0 and "replayssm config sglang --model" in done.output


def test_forms():
    assert Configuration("flags", {"--a": 1, "--b": "x"}).text == "--a 1 --b x"
    assert Configuration("environment", {"A": "1,2", "B": "x"}).text == "A=1,2\nB=x"
