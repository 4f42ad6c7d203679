"""`replayssm bench sglang` without SGLang: measuring, comparing, models' shapes, what is refused and written."""

import json
import time

import pytest
import torch

from replayssm.bench.sglang import launch, meter, modes, shapes


def test_comparison():
    def answer(tokens, gaps):
        return {"tokens": tokens, "likeliest": [[0.0, -gap] for gap in gaps], "cached": 2, "retracted": 1}

    stock = [answer([1, 2, 3], [1, 1, 1]), answer([1, 2, 3], [1, 0.01, 1]), answer([1, 2, 3], [1, 1, 1])]
    ours = [answer([1, 2, 3], []), answer([1, 5, 3], []), answer([1, 2, 4], [])]
    assert launch.compared(stock, ours, 0.1) == {
        "requests": 3, "equal": 1, "parted": 1, "wrong": 1, "tokens": 3 + 1 + 2, "cached": [6, 6], "retracted": [3, 3],
    }  # fmt: skip
    shorter = launch.compared(stock[:1], [answer([1, 2], [])], 0.1)
    assert shorter["wrong"] == 1, "an answer that ends early is not a tie"


def test_busy_time_counts_once_what_overlaps():
    assert meter.union([(0, 10), (5, 10), (30, 5), (31, 1)]) == 15 + 5
    assert meter.union([]) == 0


def test_meter_waits_for_a_full_batch():
    made = iter(range(0, 1000, 10))
    one = meter.Meter(4, settle=2, steps=5, profiled=1, generated=lambda: next(made), device="cpu")
    for iteration in range(3):
        one(iteration, 3)
    for iteration in range(one.iterations):
        assert one.wall_ms is None or iteration > one.settle + one.steps
        one(iteration, 4)
    assert one.wall_ms > 0 and one.tokens_per_s == pytest.approx(10 / (one.wall_ms * 5 / 1e3))


@pytest.mark.parametrize("name", shapes.MODELS)
def test_shapes_are_the_served_models(name, tmp_path):
    """What our own reader makes of the configurations is what core knows of the models."""
    from replayssm.models import MODELS, find

    found, known = find(str(shapes.write(name, tmp_path))), MODELS[name]
    for field in ("recurrence", "H", "G", "V", "K", "layers", "attention"):
        assert getattr(found, field) == getattr(known, field), field


def test_no_native_replay_for_mamba2(tmp_path):
    folder = shapes.write("Nemotron-3-Nano-4B", tmp_path)
    with pytest.raises(ValueError, match="no native_replay for Mamba-2"):
        modes.options(modes.NATIVE, folder, False)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_in_processes_of_its_own_and_its_failure(tp, tmp_path, monkeypatch):
    """Result lines come one by one, the rest goes to the log; a failure says where to look, and no rank stays behind."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sglang.py").write_text("import sys; sys.exit('no sglang here')")
    job = launch.parity(shapes.write("Qwen3.5-4B", tmp_path / "model"), modes.STOCK, [1], 4, 64, "float32", tp=tp)
    with pytest.raises(RuntimeError, match="exit code 1.*no sglang here" if tp == 1 else "exit code 1.*process . terminated"):
        list(launch.run(job, modes.STOCK, site, tmp_path / "log"))
    monkeypatch.setattr(launch, "MARK", "")
    (site / "sglang.py").write_text("print(7)\nimport os\nos._exit(0)")
    assert list(launch.run(job, modes.STOCK, site, tmp_path / "log")) == [7] * tp


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it would measure")
def test_commands_refuse_what_they_cannot_do(tmp_path):
    from typer.testing import CliRunner

    from replayssm.cli.app import app

    for arguments, said in (
        (["speed", "--model", "GPT"], "model: expected one of Qwen3.5-4B"),
        (["speed", "--mode", "fast"], "mode: expected one of stock"),
        (["parity", "--dtype", "fp8"], "dtype: expected one of float32"),
        (["speed", "--tp", "2"], "expected a CUDA GPU"),
        (["speed", "--tp", "2", "--side-by-side"], "tp: expected 1 with --side-by-side"),
        (["parity", "--tp", "2", "--separate"], "separate: expected neither --tp nor --speculative"),
    ):
        done = CliRunner().invoke(app, ["bench", "sglang", *arguments, "--out", str(tmp_path / "out.json")])
        assert done.exit_code == 2 and said in done.stderr
    assert not list(tmp_path.iterdir())


def test_rows_are_written_as_measured_and_not_measured_again(tmp_path):
    from replayssm.cli.bench_sglang import _Results

    path = tmp_path / "out.json"
    results = _Results(path, {"device": "none"})
    results.add({"model": "a", "batch": 1, "mode": "ours", "speculative": False, "ms_per_step": 1.5})
    results.add({"model": "a", "batch": 1, "mode": "ours", "speculative": True, "tp": 2, "ms_per_step": 1.0})
    written = json.loads(path.read_text())["rows"]
    assert "speculative" not in written[0] and "tp" not in written[0] and written[1]["tp"] == 2
    again, run = _Results(path, {}), {"model": "a", "batch": 1, "mode": "ours", "speculative": False, "tp": 1}
    assert again.has(run) and again.has(run | {"speculative": True, "tp": 2})
    for other in ({"batch": 2}, {"tp": 2}, {"speculative": True}):
        assert not again.has(run | other)


def test_processes_that_share_a_gpu_wait_for_all_and_measure_alone(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from replayssm.bench.sglang.turns import Turns

    begun, inside = [], []

    def measure(number):
        one = Turns(str(tmp_path), number, 4)
        if number == 3:
            return one.ready()  # failed
        one.wait(0.01)
        begun.append(len(list(tmp_path.glob("ready-*"))))
        for _ in range(3):
            with one.alone():
                inside.append(number)
                time.sleep(0.01)
                assert inside.pop() == number and not inside

    with ThreadPoolExecutor() as pool:
        list(pool.map(measure, range(4)))
    assert begun == [4] * 3


def test_a_process_that_fails_is_remembered(tmp_path):
    from replayssm.cli.bench_sglang import _Results

    def rows():
        yield {"batch": 1}
        raise RuntimeError("out of memory")

    results = _Results(tmp_path / "out.json", {})
    assert not results.failed and list(results.guarded(rows())) == [{"batch": 1}] and results.failed
