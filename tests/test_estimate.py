"""Estimates: bytes by hand, times from given measurements, and `replayssm plan` as a user starts it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from replayssm import Layout, devices, models, schedule
from replayssm.bench import results
from replayssm.bench.peers import replays
from replayssm.calibration import Calibration
from replayssm.estimate import Deployment, estimate

H200 = devices.find("h200")
QWEN = models.find("Qwen3.5-4B")


@pytest.fixture(scope="module")
def committed():
    return Calibration.of(results.load(), replays)


def row(layer="Qwen3.5-4B", batch=64, us=100.0, peers=None, **other):
    layout = models.find(layer).layout(W=16)
    traffic = layout.step_bytes()
    floor = batch * (traffic.replay.total + traffic.io.total) / 4e12 * 1e6
    return {"family": layout.recurrence.name, "layer": layer, "batch": batch, "T": 1, "W": 16, "state": "fp32", "read": None,
            "floor_us": floor, "us": us, "peers": peers or {}} | other  # fmt: skip


def calibrated(*rows):
    header = {"device": H200.device, "date": "2030-01-01", "commit": "abc", "read_ceiling": 4e12}
    return Calibration.of({"decode": {"header": header, "rows": list(rows)}}, replays)


def test_committed_rows_come_back(committed):
    """The measured layers, batches and window: the estimate is the measurement."""
    for one in results.load()["decode"]["rows"]:
        formats = {"state": one["state"]} | ({"read": one["read"]} if one["read"] else {})
        of = Deployment(models.find(one["layer"]), H200, one["batch"], 0, window=one["W"], formats=formats)
        replay = estimate(of, committed).ways[-1]
        assert replay.recurrent.us / of.model.layers == pytest.approx(one["us"])
        assert replay.recurrent.share == pytest.approx(one["floor_us"] / one["us"])
        assert replay.recurrent.bytes / of.model.layers == pytest.approx(one["bytes"])
        assert replay.recurrent.measured


def test_other_results_are_no_steps(committed):
    others = {
        "materialize": {"header": {}, "rows": [row(op="fold", count=8, us=1.0)]},
        "drift": {"header": {}, "rows": [{"model": "m"}]},
    }
    assert Calibration.of(results.load() | others, replays) == committed


def test_bytes_and_memory_by_hand():
    found = estimate(Deployment(QWEN, H200, 64, 1000, window=16), calibrated(row()))
    conventional, replay = found.ways
    S, io = 32 * 128 * 128 * 4, 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    assert conventional.recurrent.bytes == 24 * 64 * (2 * S + io)
    assert found.attention.bytes == 64 * 8 * 4 * 512 * 2 * 1000
    assert found.attention.us == pytest.approx(found.attention.bytes / 4e6)
    assert (conventional.state, conventional.kv) == (24 * S, 8 * 4 * 512 * 2 * 1000)
    channels = 2 * 16 * 128 + 32 * 128
    assert conventional.conv == 24 * 3 * channels * 2
    layout = QWEN.layout(W=16, R=19)
    assert (replay.state, replay.conv) == (24 * layout.slot_bytes, 24 * 19 * channels * 2)
    free = 0.9 * H200.memory - QWEN.weights
    assert conventional.fits == free // conventional.memory and replay.fits == free // replay.memory
    assert (conventional.kept, replay.kept) == (1, 1)
    assert replay.step_us == replay.recurrent.us + found.attention.us
    slow = estimate(Deployment(QWEN, H200, 64, 1000, window=16, other_us=500), calibrated(row())).ways[-1]
    assert slow.step_us == replay.step_us + 500 and slow.tokens_per_second == pytest.approx(64e6 / slow.step_us)


def test_speculation():
    """T states and convolution inputs more a request where states are written; times per token that stays."""
    conventional, speculating, replay = estimate(Deployment(QWEN, H200, 64, 1000, 4, 0.5), calibrated(row())).ways
    assert speculating.kept == replay.kept == 1 + 0.5 + 0.25 + 0.125
    assert (speculating.state, speculating.conv * 3) == (5 * conventional.state, conventional.conv * (3 + 4))
    found = estimate(Deployment(QWEN, H200, 64, 1000, 4, 0.5), calibrated(row()))
    assert found.faster["conventional"]["step"] == pytest.approx(conventional.step_us * replay.kept / replay.step_us)
    ratio = speculating.recurrent.us / replay.recurrent.us
    assert found.faster["conventional, speculating"]["recurrent"] == pytest.approx(ratio)


def test_window_of_least_bytes(committed):
    for tokens, acceptance in ((1, 1.0), (4, 0.75), (8, 0.3)):
        found = estimate(Deployment(QWEN, H200, 8, 0, tokens, acceptance), committed)
        layouts = [QWEN.layout(W=W, T_max=tokens) for W in range(tokens, 65)]
        totals = {layout.W: layout.step_bytes(tokens, acceptance).replay.total for layout in layouts}
        assert found.window == found.best_window == min(totals, key=totals.__getitem__)
    assert schedule.best_window(QWEN.layout(), tokens=1) == schedule.best_window(QWEN.layout())
    assert estimate(Deployment(QWEN, H200, 8, 0, window=7), committed).window == 7


def test_attention_takes_over_where_it_says(committed):
    for name in ("Qwen3.5-27B", "GLM-5.3-Flash"):
        of = Deployment(models.find(name), H200, 16, 100, kv_bytes=1)
        for i, (way, context) in enumerate(estimate(of, committed).takes_over.items()):
            there = estimate(Deployment(of.model, H200, 16, round(context), kv_bytes=1), committed)
            assert there.attention.us == pytest.approx(there.ways[i].recurrent.us, rel=1e-3), (name, way)
    none = models.from_config({"model_type": "mamba2"})
    assert set(estimate(Deployment(none, H200, 1, 100), committed).takes_over.values()) == {None}


def test_conventional_steps_are_the_best_conventional_peers():
    rows = [row(batch=B, us=100.0, peers={"a": 250.0 * B, "b": 200.0 * B, "c replay": 1.0}) for B in (8, 64)]
    conventional, replay = estimate(Deployment(QWEN, H200, 64, 0, window=16), calibrated(*rows)).ways
    assert conventional.recurrent.us == pytest.approx(24 * 200 * 64) and conventional.recurrent.measured
    assert replay.recurrent.us == pytest.approx(24 * 100)


def test_conventional_steps_have_no_read_copy():
    """Replay with one is not measured, the conventional steps beside it are, whichever way replay read there."""
    for read in (None, "e4m3"):
        calibration = calibrated(row(us=100.0, peers={"a": 250.0}, read=read))
        of = Deployment(QWEN, H200, 64, 0, window=16, formats={"read": "int8"})
        conventional, replay = estimate(of, calibration).ways
        assert conventional.recurrent.measured and not replay.recurrent.measured
        assert conventional.recurrent.us == pytest.approx(24 * 250)


def test_between_and_beyond_measured_batches():
    """Between two points a power law; below the first its time; beyond the last its share."""
    calibration = calibrated(row(batch=4, us=30.0), row(batch=64, us=120.0))

    def us(batch):
        return estimate(Deployment(QWEN, H200, batch, 0, window=16), calibration).ways[-1].recurrent.us / 24

    assert us(16) == pytest.approx(math.sqrt(30 * 120))
    assert us(1) == pytest.approx(30) and us(640) == pytest.approx(1200)
    text = " ".join(estimate(Deployment(QWEN, H200, 1, 0, window=16), calibration).basis)
    assert "state fp32; not measured below 4 requests, where they are taken to take as long." in text


def test_small_batches_of_what_was_measured_at_large_ones_alone(committed):
    """Verification and formats fall as steps of one token do, and the output says that this is an assumption."""
    decode = [row(batch=B, us=us, peers={"a": 2 * us}) for B, us in ((1, 5.0), (16, 20.0), (256, 200.0))]
    several = row(batch=256, us=300.0, peers={"a": 900.0}, T=4)
    several["floor_us"] = decode[2]["floor_us"]
    other = row(batch=256, us=100.0, read="e4m3", floor_us=decode[1]["floor_us"])

    def found(batch, tokens=1, **formats):
        of = Deployment(QWEN, H200, batch, 0, tokens, window=16, formats=formats)
        return estimate(of, calibrated(*decode, several, other))

    def us(estimate):
        return estimate.ways[-1].recurrent.us / 24

    large, small = found(256, 4), found(1, 4)
    assert us(small) < 300 * us(found(32)) / 200 and us(small) >= 300 / 200 * 5.0
    assert not small.ways[-1].recurrent.measured and not small.ways[1].recurrent.measured
    assumed = "not measured below 256 requests, where they are taken to fall as steps of one token do"
    assert " ".join(small.basis).count(assumed) == 2, "replay and conventional steps of 4 tokens"
    assert assumed not in " ".join(large.basis) + " ".join(found(1).basis)
    assert us(found(1, read="e4m3")) == pytest.approx(100 / 20 * 5.0) and assumed in " ".join(found(1, read="e4m3").basis)
    assert found(1).ways[-1].recurrent.measured


def test_the_nearest_window_counts():
    rows = [row(batch=64, us=us, W=W) for W, us in ((16, 100.0), (32, 50.0), (8, 400.0))]
    for order in (rows, rows[::-1]):
        for window, us in ((16, 100.0), (30, 50.0), (4, 400.0)):
            curve = calibrated(*order).curve(QWEN, True, 1, "fp32", None, window)
            assert [point.us for point in curve.points] == [us]


def test_what_is_not_measured_says_so():
    found = estimate(Deployment(QWEN, devices.find("h100"), 64, 0, window=16), calibrated(row()))
    conventional, replay = found.ways
    assert not conventional.recurrent.measured and not replay.recurrent.measured
    assert conventional.recurrent.share == pytest.approx(replay.recurrent.share, rel=0.3)
    text = " ".join(found.basis)
    assert "NVIDIA H100 80GB HBM3: not measured" in text
    assert "Conventional steps of 1 token: not measured for this family" in text
    fast = estimate(Deployment(QWEN, H200, 640, 0, window=16), calibrated(row())).ways[-1].recurrent.us
    slow = estimate(Deployment(QWEN, devices.find("h100"), 640, 0, window=16), calibrated(row())).ways[-1].recurrent.us
    assert slow / fast == pytest.approx(4.8 / 3.35)
    half = estimate(Deployment(QWEN, H200, 64, 0, formats={"state": "bf16"}), calibrated(row()))
    assert "not measured as asked" in " ".join(half.basis) and not half.ways[-1].recurrent.measured


def test_nearest_layer_and_family():
    rows = [row("Qwen3.5-4B", us=1000.0), row("Nemotron-3-Super-120B-A12B", us=500.0), row("Kimi-Linear-48B-A3B", us=700.0)]
    calibration = calibrated(*rows)
    for name, layer in (("Qwen3-Next-80B-A3B", 0), ("Nemotron-3-Ultra-550B-A55B", 1), ("Kimi-K3", 2)):
        curve = calibration.curve(models.find(name), True, 1, "fp32", None, 16)
        assert [point.layer for point in curve.points] == [rows[layer]["layer"]]


def test_tensor_parallel_halves_what_is_shared(committed):
    one, two = (estimate(Deployment(QWEN, H200, 64, 1000, window=16, ranks=ranks), committed) for ranks in (1, 2))
    assert two.ways[0].recurrent.bytes * 2 == one.ways[0].recurrent.bytes
    assert two.attention.bytes * 2 == one.attention.bytes and two.ways[0].state * 2 == one.ways[0].state


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"batch": 0}, "batch: expected >= 1, got 0"), ({"context": -1}, "context: expected >= 0, got -1"),
     ({"acceptance": 0.0}, "acceptance: expected above 0, at most 1, got 0.0"), ({"ranks": 3}, "tensor-parallel: expected"),
     ({"window": 2, "tokens": 4}, "T_max: expected at most W = 2")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_deployments_that_cannot_be(changes, message, committed):
    with pytest.raises(ValueError, match=message):
        estimate(Deployment(**{"model": QWEN, "gpu": H200, "batch": 1, "context": 0} | changes), committed)


def test_results_that_say_nothing():
    with pytest.raises(ValueError, match="results: expected those of `replayssm bench decode`, got none"):
        Calibration.of({}, replays)


# ---- the command -----------------------------------------------------------------------------------------------------------


def plan(*args):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from replayssm.cli.app import app

    return CliRunner().invoke(app, ["plan", *args])


@pytest.mark.parametrize("name", models.MODELS)
def test_plan_of_every_model(name):
    done = plan("--model", name, "--gpu", "b200", "--speculate", "4", "--tensor-parallel", "8")
    assert done.exit_code == 0, done.output
    for words in ("states and ring", "requests that fit", "NVIDIA B200: not measured", "replay against conventional", "kept"):
        assert words in done.output, words


def test_plan_as_json(committed):
    done = plan("--model", "qwen3.5-4b", "--batch", "32", "--context", "2000", "--weights", "100", "--checkpoint", "bf16",
                "--read", "int8", "--other-us", "1000", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    of = Deployment(QWEN, H200, 32, 2000, formats={"state": "bf16", "read": "int8"}, acceptance=0.75, other_us=1000)
    found = estimate(of, committed)
    assert answer["ways"][-1]["step_us"] == found.ways[-1].step_us
    assert answer["faster"] == found.faster and answer["basis"] == list(found.basis)
    layout = QWEN.layout(W=found.window, R=found.window + 3, state="bf16", read="int8")
    assert answer["ways"][-1]["state"] == 24 * layout.slot_bytes
    assert answer["ways"][0]["fits"] == (0.9 * H200.memory - 100e9) // found.ways[0].memory


def test_plan_of_a_config_and_its_figure(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba2"}')
    done = plan("--model", str(path), "--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 0, done.output
    assert "never" in done.output and "?" in done.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--gpu", "tpu"], "gpu: expected one of a100, h100"), (["--model", "gpt-2"], "model: expected one of"),
     (["--checkpoint", "fp3"], "expected one of"), (["--read", "fp16"], "read format: expected one of"),
     (["--window", "0"], "W: expected >= 1, got 0")],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line(args, message):
    done = plan(*([] if args[0] == "--model" else ["--model", "Qwen3.5-4B"]), *args)
    assert done.exit_code == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("replayssm: ") and message in line


def test_layout_says_what_a_fold_moves():
    layout = Layout("mamba2", 2, 1, 16, 16, W=4, state="fp16")
    S, record = 2 * 16 * 16 * 2, (16 + 2 * 16) * 2 + 2 * 4
    assert layout.fold_traffic(3) == layout.fold_traffic(3, "fp16")
    assert (layout.fold_traffic(3).read, layout.fold_traffic(3).written) == (S + 3 * record, S)
    assert layout.fold_traffic(0, "fp32").written == 2 * S
    copied = replace(layout, read="int8")
    assert (copied.fold_traffic(3).read, copied.fold_traffic(3).written) == (S + 3 * record, S + 2 * 16 * (16 + 4))
    assert copied.fold_traffic(3, "fp32") == layout.fold_traffic(3, "fp32")
