"""`replayssm config sglang`: flags by family, refusals by name, and SGLang's own parser reading them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("pydantic")

from typer.testing import CliRunner

import replayssm.cli.config as command
from replayssm import models
from replayssm.cli.app import app
from replayssm.configuration import Choice, Configuration
from replayssm.integrations.sglang import configuration
from tests.integrations.sglang.alone import alone

NAMES = ("Qwen3.5-4B", "Kimi-K3", "GLM-5.3-Flash", "Nemotron-3-Nano-4B")


@pytest.fixture
def outcome(monkeypatch):
    """The command in this process, which must not import SGLang."""
    monkeypatch.setattr(command, "_validate", lambda *args: None)
    return lambda *args: CliRunner().invoke(app, ["config", "sglang", *args])


def test_flags(outcome):
    done = outcome("--model", "Qwen3.5-4B", "--window", "16", "--read", "int8", "--u", "fp32")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [
        "--linear-attn-decode-backend", "replayssm", "--replayssm-window", "16", "--replayssm-checkpoint", "fp32",
        "--replayssm-read", "int8", "--replayssm-u", "fp32",
    ]  # fmt: skip
    done = outcome("--model", "Nemotron-3-Nano-4B", "--checkpoint", "fp16+sr", "--window", "9", "--json")
    assert json.loads(done.stdout)["settings"] == {
        "--mamba-backend": "replayssm", "--replayssm-window": 9, "--replayssm-checkpoint": "fp16+sr",
    }  # fmt: skip


@pytest.mark.parametrize("drafts, flags", [
    ("mtp", {"--speculative-algorithm": "EAGLE", "--speculative-num-steps": 3, "--speculative-eagle-topk": 1}),
    ("ngram", {"--speculative-algorithm": "NGRAM"}),
])  # fmt: skip
def test_drafts(outcome, drafts, flags):
    done = outcome("--model", "Kimi-K3", "--speculate", "4", "--drafts", drafts, "--json")
    found = json.loads(done.stdout)
    assert found["settings"].items() >= (flags | {"--speculative-num-draft-tokens": 4}).items()
    assert any("MTP" in note for note in found["notes"]) == (drafts == "mtp")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--checkpoint", "e4m3"], "checkpoint: supported with SGLang are fp32, bf16, fp16, fp16+sr, got 'e4m3'"),
        (["--read", "int8:row"], "read: supported with SGLang are e4m3, int8, nvfp4, got 'int8:row'"),
        (["--window", "3", "--speculate", "4"], "window: expected at least the 4 tokens"),
        (["--model", "Nemotron-3-Nano-4B", "--u", "fp32"], "u: expected with the delta rule alone"),
    ],
)
def test_refused_by_name(outcome, args, message):
    done = outcome(*([] if "--model" in args else ["--model", "Qwen3.5-4B"]), *args)
    assert (done.exit_code, done.stdout) == (2, "") and message in done.stderr


def read(every: list[Configuration]) -> list[str]:
    """What SGLang says to each."""
    said = []
    for one in every:
        try:
            configuration.check(one)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_sglang_reads_them():
    pytest.importorskip("sglang")
    choices = [
        Choice(models.find(name), tokens, drafts=drafts) for name in NAMES for tokens, drafts in ((1, "mtp"), (4, "ngram"))
    ]
    every = [configuration.configure(choice) for choice in choices]
    unknown = Configuration("flags", {"--replayssm-windows": 3})
    wrong = Configuration("flags", {"--mamba-backend": "replay"})
    *said, first, second = alone(read, [*every, unknown, wrong], plugins="replayssm")
    assert said == [""] * len(every)
    assert "unrecognized arguments: --replayssm-windows 3" in first and "--mamba-backend: invalid choice: 'replay'" in second
