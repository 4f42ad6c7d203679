"""`replayssm tune`: what it chooses by a fake clock, and that its file is what launches are then looked up in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from replayssm import GDN, MAMBA2, Layout, doctor, launch, ops, records
from replayssm.layout import Inputs
from replayssm.records import Launch, Record

pytest.importorskip("typer")

from typer.testing import CliRunner

from replayssm.bench import contest, tune, work
from replayssm.cli.app import app

LAYOUT = Layout(GDN, 4, 2, 64, 32, W=4)
FAKE = "Fake GPU"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A user's empty file, and a fake name for a GPU that is not there."""
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "launches.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: FAKE)
    launch.forget()
    yield tmp_path / "launches.json"
    launch.forget()


def record(batch, chosen=None, op="decode", device=FAKE, layout=LAYOUT):
    return Record(device, op, records.sizes(layout), batch, chosen or Launch(16, 16, 2, 1, 2), 1.0, 2.0, "a fake")


def test_a_record_goes_before_the_rule(gpu):
    """By device, operation, layer without its window, and the nearest batch not above; all others by the rule."""
    one, other = Launch(32, 16, 2, 1, 2), Launch(16, 16, 1, 2, 4)
    records.add(gpu, [record(4, one), record(64, other), record(4, other, device="Another GPU"), record(4, one, op="verify")])
    assert launch.decode(LAYOUT, 1) == launch.decode(LAYOUT, 4) == launch.decode(LAYOUT, 63) == one
    assert launch.decode(LAYOUT, 64) == launch.decode(LAYOUT, 4096) == other
    assert launch.decode(replace(LAYOUT, W=9, R=0), 4) == one and launch.verify(LAYOUT, 4) == one
    for changes in ({"H": 8}, {"state": "bf16"}, {"read": "int8"}, {"act": torch.float16}, {"recurrence": MAMBA2}):
        layout = replace(LAYOUT, **changes)
        assert launch.decode(layout, 4) == launch.decode_rule(layout, 4), changes
    records.add(gpu, [record(4, other)])
    assert launch.decode(LAYOUT, 4) == one, "read once"
    launch.forget()
    assert launch.decode(LAYOUT, 4) == other and len(records.read(gpu)) == 4, "a newer record replaces"


def test_a_record_is_what_a_step_launches(gpu, monkeypatch):
    records.add(gpu, [record(1, Launch(32, 16, 2, 1, 2))])
    launched = []
    monkeypatch.setattr(ops.kernels.decode, "decode", lambda *arguments: launched.append(arguments[-1]))
    x = Inputs(*(None for _ in Inputs._fields))
    ops.step(2, 1, x, torch.zeros(2, 4, 64), LAYOUT.allocate(1, 2, "cpu"), LAYOUT, "triton")
    assert launched == [Launch(32, 16, 2, 1, 2)]


def test_without_a_gpu_or_a_file_it_is_the_rule(gpu, monkeypatch):
    assert launch.decode(LAYOUT, 4) == launch.decode_rule(LAYOUT, 4)
    assert launch.verify(LAYOUT, 4) == launch.verify_rule(LAYOUT, 4)
    records.add(gpu, [record(4)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launch.forget()
    assert launch.decode(LAYOUT, 4) == launch.decode_rule(LAYOUT, 4)


def test_the_user_s_file(monkeypatch, tmp_path):
    monkeypatch.delenv(records.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert records.path() == tmp_path / "replayssm/launches.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(records.path()) == "/home/somebody/.config/replayssm/launches.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "expected records of `replayssm tune` in"),
        ('{"records": [{"device": "a"}]}', "expected records of"),
        ("{}", "records"),
    ],
)
def test_a_file_that_is_something_else(gpu, text, message):
    gpu.write_text(text)
    with pytest.raises(ValueError, match=f"REPLAYSSM_LAUNCHES: .*{message}"):
        launch.decode(LAYOUT, 4)


def test_a_launch_that_does_not_fit_its_layer(gpu):
    for wrong, message in (
        (Launch(32, 16, SPLIT=4), "BLOCK_V, SPLIT: expected a product that divides V = 64, got 32, 4"),
        (Launch(16, 64), "BLOCK_K: expected a divisor of 32, got 64"),
        (Launch(16, 16, warps=3), "warps: expected a power of two, got 3"),
    ):
        records.add(gpu, [record(4, wrong)])
        launch.forget()
        with pytest.raises(ValueError, match=f"REPLAYSSM_LAUNCHES: decode of gdn H4 .* in {gpu}: {message}"):
            launch.decode(LAYOUT, 4)


def cost(one: Launch) -> float:
    """A fake clock with one best launch; tiles of 64 do not compile."""
    if one.BLOCK_V == 64:
        return float("inf")
    wanted = {"BLOCK_V": 32, "SPLIT": 2, "warps": 2, "stages": 1}
    return 1.0 + sum(abs(getattr(one, name).bit_length() - value.bit_length()) for name, value in wanted.items())


@pytest.mark.parametrize("T", [1, 4])
def test_the_search_finds_the_fastest_of_a_dozen(T):
    start = launch.decode_rule(LAYOUT, 256)
    tried = tune.search(cost, LAYOUT, start, T)
    assert min(tried, key=tried.__getitem__) == Launch(32, start.BLOCK_K, 2, 1, 2)
    assert 8 <= len(tried) <= 16 and next(iter(tried)) == start
    for one in tried:
        one.check(LAYOUT)
        assert one.BLOCK_K == start.BLOCK_K and (T == 1 or one.BLOCK_V >= 16 or one == start)


@pytest.fixture
def on_cpu(monkeypatch):
    """The check of outputs on the CPU."""
    monkeypatch.setattr(work.Work.__init__, "__defaults__", (*work.Work.__init__.__defaults__[:-2], "cpu", 0))
    monkeypatch.setattr(contest.error, "__defaults__", (1, 3, "cpu", None))


def test_what_is_recorded(on_cpu, monkeypatch):
    """The fastest launch whose outputs are right; the rule's where others save less than 2 %."""

    def clock(model, layout, B, T):
        return cost if B == 256 else lambda one: 1.0 if one == launch.decode_rule(layout, B) else 0.99

    ((first, tried), (second, _)) = tune.tune(None, LAYOUT, [256, 1], 1, FAKE, clock)
    assert first.launch == Launch(32, 32, 2, 1, 2) or first.launch.BLOCK_V == 32
    assert (first.us, first.rule_us) == (1.0, tried[launch.decode_rule(LAYOUT, 256)]) and first.batch == 256
    assert second.launch == launch.decode_rule(LAYOUT, 1) and second.us == second.rule_us
    wrong = first.launch
    right = tune.error

    def error(kind, *args, candidate, **kwargs):
        return 1.0 if candidate == wrong else right(kind, *args, candidate=candidate, **kwargs)

    monkeypatch.setattr(tune, "error", error)
    ((again, _),) = tune.tune(None, LAYOUT, [256], 1, FAKE, clock)
    assert again.launch != wrong and again.us > first.us
    with pytest.raises(RuntimeError, match="the rule's own launch does not run"):
        list(tune.tune(None, LAYOUT, [1], 1, FAKE, lambda *_: lambda one: float("inf")))


def test_the_command(gpu, monkeypatch):
    """With a fake measurement: what it prints is what it wrote, and what is launched from then on."""
    layout = Layout(GDN, 16, 8, 128, 128)

    def fake(model, layout, batches, T, device):
        for B in batches:
            chosen = replace(launch.decode_rule(layout, B), warps=4)
            yield Record(device, "decode", records.sizes(layout), B, chosen, 2.0, 3.0, "a fake"), {chosen: 2.0}

    monkeypatch.setattr(tune, "tune", fake)
    arguments = ["tune", "--model", "Qwen3.5-4B", "--tensor-parallel", "2", "--batch", "8", "--batch", "32"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["file"] == str(gpu) and [one["batch"] for one in found["records"]] == [8, 32]
    assert launch.decode(layout, 8).warps == 4 and launch.decode(layout, 8) != launch.decode_rule(layout, 8)
    shown = CliRunner().invoke(app, arguments).stdout
    assert "Qwen3.5-4B" in shown and "1.50" in shown and str(gpu) in shown.replace("\n", "")


def test_doctor_says_what_was_measured_where(gpu):
    assert doctor.launches("NVIDIA H200") == "by rules measured on NVIDIA H200"
    text = "by rules measured on NVIDIA H200, not measured on this one: `replayssm tune` does that"
    assert doctor.launches(FAKE) == text
    records.add(gpu, [record(4), record(4, device="another")])
    assert doctor.launches(FAKE) == f"{text}; 1 records of its own in {gpu}"
    gpu.write_text("[")
    assert "REPLAYSSM_LAUNCHES: expected records" in doctor.launches(FAKE)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "gpt-2"], "model: expected one of"),
        (["--model", "Qwen3.5-4B", "--batch", "0"], "batch: expected >= 1, got 0"),
        (["--model", "Qwen3.5-4B", "--tensor-parallel", "3"], "tensor-parallel: expected a divisor"),
        (["--model", "Qwen3.5-4B", "--format", "fp3"], "state format: expected one of"),
        (["--model", "Qwen3.5-4B", "--tokens", "40"], "T_max: supported are 1 ... 32 tokens a row, got 40"),
        pytest.param(["--model", "Qwen3.5-4B"], "tune: expected a CUDA GPU, and torch finds none",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line(args, message):
    done = CliRunner().invoke(app, ["tune", *args])
    assert done.exit_code == 2 and done.stdout == "", done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("replayssm: ") and message in line
