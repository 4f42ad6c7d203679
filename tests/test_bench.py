"""The benchmark without a GPU: its contestants' outputs, its rows and their figures, what it says of peers that are absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.abc import MetaPathFinder

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from replayssm import GDN, MAMBA2, Layout, ReplayState
from replayssm.bench import check, contest, decode, host, materialize, peers, results, stage, verify, work
from replayssm.bench.contest import Ours, Plain, Unflushed
from replayssm.bench.precision import Precision
from replayssm.cli.app import app
from replayssm.models import Model

TINY = {"tiny-gdn": Model(GDN, 2, 1, 16, 16, 3), "tiny-mamba2": Model(MAMBA2, 2, 1, 16, 16, 3)}


class Wrong(Ours):
    """Takes head 0 for head 1."""

    name = "wrong"

    def step(self, *args):
        return super().step(*args).flip(1)


class Broken(Ours):
    name = "broken replay"

    def __init__(self, work, candidate=None):
        raise ModuleNotFoundError("No module named 'broken'")


class Steady(Ours):
    name = "steady"


@pytest.fixture
def on_cpu(monkeypatch):
    """Measures tiny layers on the CPU: a work's default device is the CPU and a graph is one eager run of 1000 us."""

    def eager(run, replays):
        run()
        return 1000.0, 10.0

    monkeypatch.setattr(contest, "graph_us", eager)
    monkeypatch.setattr(materialize, "graph_us", eager)
    monkeypatch.setattr(work.Work.__init__, "__defaults__", (*work.Work.__init__.__defaults__[:-2], "cpu", 0))
    monkeypatch.setattr(contest.error, "__defaults__", (1, 3, "cpu", None))
    monkeypatch.setattr(materialize.error, "__defaults__", (3, "cpu"))
    monkeypatch.setattr(work, "COLD_BYTES", 1)
    for name, model in TINY.items():
        monkeypatch.setitem(work.MODELS, name, model)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_our_outputs_and_a_wrong_contestants(name, T):
    """Fresh states, more steps than a window, drafts rejected at random: ours within bf16's rounding, wrong heads far off."""
    layout = TINY[name].layout(W=4, T_max=T)
    assert contest.error(Ours, layout, T, device="cpu") < 5e-3
    assert contest.error(Wrong, layout, T, device="cpu") > 0.5


def layouts(name, *formats, windows=(4,)):
    return decode.layouts(name, Precision.parse(formats), windows)


def test_rows(on_cpu, monkeypatch):
    monkeypatch.setitem(decode.DECODE, "gdn", (Wrong, Broken, Steady))
    checks: dict = {}
    (row,) = decode.rows("tiny-gdn", [2], layouts("tiny-gdn", "fp32"), 1e12, True, 1, checks)
    for key, kind in {
        "family": str, "layer": str, "batch": int, "T": int, "W": int, "state": str, "u": str, "us": float, "floor_us": float,
        "bytes": float, "share": float, "peers": dict, "ratio": dict, "absent": dict, "launch": str, "us_no_flush": float,
    }.items():  # fmt: skip
        assert isinstance(row[key], kind), key
    assert row["read"] is None
    layers, groups = 3, 1
    assert row["us"] == pytest.approx(1000 / (4 * layers * groups))
    assert row["us_no_flush"] == pytest.approx(1000 / (layers * groups))
    model = TINY["tiny-gdn"].layout(W=4).step_bytes()
    assert row["bytes"] == 2 * (model.replay.total + model.io.total)
    assert row["floor_us"] == pytest.approx(row["bytes"] / 1e6)
    assert row["share"] == pytest.approx(row["floor_us"] / row["us"])
    assert row["peers"] == {"steady": row["us"]} and row["ratio"] == {"steady": 1.0} and row["peers_state"] == "fp32"
    assert "computes something else" in row["absent"]["wrong"]
    assert row["absent"]["broken replay"] == "ModuleNotFoundError: No module named 'broken'"
    assert checks["tiny-gdn, peers"]["steady"] < 5e-3 and checks["tiny-gdn, fp32, u float16, W = 4"]["replayssm"] < 5e-3
    json.dumps(row)


def test_rows_of_formats(on_cpu, monkeypatch):
    """A row for each format and window, beside peers with fp32 states, which are measured once for all."""
    made = []

    class Counted(Steady):
        def __init__(self, work, candidate=None):
            made.append((work.layout.state, work.layout.read, work.layout.W))
            super().__init__(work, candidate)

    monkeypatch.setitem(decode.DECODE, "mamba2", (Counted,))
    monkeypatch.setitem(work.MODELS, "tiny-mamba2", replace(TINY["tiny-mamba2"], K=32))
    checks: dict = {}
    of = layouts("tiny-mamba2", "bf16", "fp16+sr/nvfp4", windows=(2, 4))
    rows = list(decode.rows("tiny-mamba2", [2], of, 1e12, True, 1, checks))
    assert [(row["state"], row["read"], row["W"]) for row in rows] == [
        ("bf16", None, 2), ("bf16", None, 4), ("fp16+sr", "nvfp4", 2), ("fp16+sr", "nvfp4", 4)
    ]  # fmt: skip
    assert made == [("fp32", None, 2)] * 2, "checked once, timed once"
    for row, layout in zip(rows, of, strict=True):
        assert row["peers"] == {"steady": pytest.approx(1000 / (2 * 3))}
        ring, io = layout.read_bytes * (layout.W - 1) / 2 + layout.record_bytes, layout.step_bytes().io.total
        copy = layout.copy_bytes or layout.state_bytes
        assert (
            row["floor_no_flush_us"] == pytest.approx(2 * (copy + ring + io) / 1e6)
            and row["floor_no_flush_us"] < row["floor_us"]
        )
    assert len({results.identity(row) for row in rows}) == 4
    assert 1e-2 < checks["tiny-mamba2, fp16+sr/nvfp4, W = 4"]["replayssm"] < 0.2


def test_our_own_error_ends_the_run(on_cpu, monkeypatch):
    """An error that the format does not explain: absolutely, and against the same formats without kernels."""
    with monkeypatch.context() as wrong:
        wrong.setattr(Ours, "step", lambda self, *args: self.out.fill_(1.0))
        with pytest.raises(
            RuntimeError, match="gdn, state fp32, T = 1: our own outputs are off by .*, at most 1.0e-02 is right"
        ):
            list(decode.rows("tiny-gdn", [2], layouts("tiny-gdn", "fp32"), 1e12, False, 1, {}))
    step = Ours.step
    monkeypatch.setattr(Plain, "step", step, raising=False)
    monkeypatch.setattr(Ours, "step", lambda self, *args: step(self, *args).mul_(1.01))
    with pytest.raises(RuntimeError, match=r"at most 3\.\de-03"):
        list(decode.rows("tiny-gdn", [2], layouts("tiny-gdn", "fp32"), 1e12, False, 1, {}))


def test_unflushed_steps_find_the_same(on_cpu, monkeypatch):
    """Every phase of a window but its last; nothing flushes, nothing moves."""
    layout, seen = TINY["tiny-gdn"].layout(W=4), []

    class Watched(Unflushed):
        def end(self, i, g):
            seen.append(self.plan.rows[:, [2, 4]].clone())
            super().end(i, g)

    contest.timed(Watched, work.Work(layout, 1, 8, steps=3), replays=1)
    for rows in seen:
        assert rows[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and not rows[:, 1].any()
    assert len(seen) == 3


def test_formats_by_name():
    assert Precision.parse(["fp32", "fp16+sr/nvfp4"], ["fp16", "bf16"]) == [
        Precision("fp32", None, "fp16"), Precision("fp32", None, "bf16"),
        Precision("fp16+sr", "nvfp4", "fp16"), Precision("fp16+sr", "nvfp4", "bf16"),
    ]  # fmt: skip
    several = decode.layouts("Qwen3.5-4B", Precision.parse(["fp32/int8"], ["fp32", "bf16"]), [16, 32])
    assert [(one.u, one.W) for one in several] == [(u, W) for u in (torch.float32, torch.bfloat16) for W in (16, 32)]
    without = decode.layouts("Nemotron-3-Nano-4B", Precision.parse(["fp32"], ["fp32", "bf16"]), [16])
    assert len(without) == 1, "no helper without the delta rule"


def test_rows_are_kept_on_the_same_machine_alone(tmp_path):
    path, machine = tmp_path / "decode.json", {"device": "a", "commit": "b", "date": "today"}
    assert results.kept(path, machine) is None
    path.write_text(json.dumps({"header": machine | {"date": "yesterday", "read_ceiling": 1.0}, "rows": []}))
    assert results.kept(path, machine)["header"]["read_ceiling"] == 1.0
    with pytest.raises(ValueError, match=f"keep: expected commit 'c' in {path}, as here, got 'b'"):
        results.kept(path, machine | {"commit": "c"})


def test_what_is_compiled_ahead_is_what_a_step_launches():
    """In a process without the interpreter, whose kernels are no compiler's input."""
    code = (
        "from replayssm.bench import decode, warm; from replayssm.bench.precision import Precision\n"
        "(layout,) = decode.layouts('Nemotron-3-Nano-4B', Precision.parse(['fp16+sr/nvfp4']), [16])\n"
        "print(*(f'{one.kernel.__name__}:{one.grid[0]}' for one in warm.launches(layout, 64)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = [one.split(":")[0] for one in ran.stdout.split()]
    assert found == [
        "_materialize_kernel",
        "_plan_kernel",
        "_materialize_kernel",
        "_decode_kernel",
        "_commit_kernel",
        "_commit_kernel",
    ]
    assert f"_decode_kernel:{64 * 96}" in ran.stdout


@pytest.mark.parametrize("T", [1, 2])
def test_what_is_timed_advances_and_flushes(on_cpu, monkeypatch, T):
    """A timing's steps append and fold as a decode does: every request flushes, one token a step once in a whole cycle."""
    layout, flushes = TINY["tiny-gdn"].layout(W=4, T_max=T), []

    class Watched(Ours):
        def end(self, i, g):
            flushes.append(self.plan.rows[:, 4].clone())
            super().end(i, g)

    contest.timed(Watched, work.Work(layout, 1, 8, T, steps=layout.W), replays=1)
    folds = torch.stack(flushes[-layout.W :]).sum(0)
    assert bool((folds == 1).all()) if T == 1 else bool((folds >= 1).all()), folds


def test_cursors_that_peers_take_ready_made():
    """They move as ours do on the device, over the same accepted tokens."""
    layout = Layout(GDN, 1, 1, 16, 16, W=4, T_max=2)
    one = work.Work(layout, 1, 8, T=2, steps=9, staggered=False, device="cpu")
    ours = Ours(one)
    for i, (start, count, flush) in enumerate(contest.schedule(one, layout.W, layout.R)):
        assert torch.equal(start, ours.state.cursors.start) and torch.equal(count, ours.state.cursors.count), i
        ours.begin(i, 0)
        assert torch.equal(flush, ours.plan.rows[:, 4]), i
        ours.end(i, 0)


def test_drafts_stay_until_the_first_that_does_not():
    one = work.Work(Layout(GDN, 1, 1, 16, 16, W=8, T_max=4), 1, 50, T=4, steps=100, device="cpu")
    assert one.accepted.min() == 1 and one.accepted.max() == 4
    assert one.accepted.double().mean() == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3, rel=0.02)


class _Hidden(MetaPathFinder):
    """A finder of packages that says there is none of them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}")


def test_every_peer_not_staged_is_absent_with_its_reason(on_cpu, monkeypatch):
    """Without what `stage` fetches, each says which project it misses; engines that are installed are hidden here."""
    engines = _Hidden("sglang", "vllm", "flashinfer", "fla")
    monkeypatch.setattr(sys, "meta_path", [engines, *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] in engines.names]:
        monkeypatch.delitem(sys.modules, name)
    for family, kinds in peers.DECODE.items():
        name = f"tiny-{family}" if f"tiny-{family}" in TINY else None
        if name is None:
            continue
        for kind, reason in check.check(kinds, TINY[name].layout(W=4)).items():
            project = kind.split()[0]
            assert reason == f"ModuleNotFoundError: No module named '{project}'", (kind, reason)


def test_replaying_peers_are_named_as_such():
    names = {kind.name for kinds in peers.DECODE.values() for kind in kinds}
    assert {name for name in names if peers.replays(name)} == {
        "vllm replay",
        "sglang replay",
        "flashinfer checkpointing_ssu (one kernel)",
        "flashinfer checkpointing_ssu (two kernels)",
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["decode", "--layer", "gpt-2"], "layer: expected one of Qwen3.5-4B, Kimi-Linear-48B-A3B"),
        (["decode", "--keep"], "keep: expected --out, the file to add to"),
        (["decode", "--batch", "0"], "batch, tokens, window: expected >= 1, got 0"),
        (["stage", "--arch", "hopper"], "arch: expected two numbers as in '9.0', got 'hopper'"),
        (["stage", "--python", "3"], "python: expected two numbers as in '9.0', got '3'"),
        (["stage", "--cuda", "/nonexistent"], "cuda: expected a CUDA toolkit's root with bin/nvcc, got /nonexistent"),
        pytest.param(["decode"], "expected a CUDA GPU, and torch finds none",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["bench", *args])
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("replayssm: ") and message in line
    assert not list(tmp_path.iterdir())


def test_objects_for_the_measured_mamba2_layers():
    assert stage.mamba2_objects([1]) == [
        {"V": 64, "K": 128, "heads_per_group": 16, "groups": 8, "T": 1},
        {"V": 80, "K": 128, "heads_per_group": 12, "groups": 8, "T": 1},
    ]


def test_verify_rows(on_cpu, monkeypatch):
    monkeypatch.setitem(verify.VERIFY, "gdn", (Steady,))
    monkeypatch.setitem(verify.DECODE, "gdn", (Steady, Broken))
    monkeypatch.setattr(verify, "TOKENS", (1, 2))
    monkeypatch.setattr(verify, "STEPS", 5)
    checks: dict = {}
    rows = list(verify.rows(["tiny-gdn"], [2], [1, 2], [2, 16], 1e12, True, 1, checks))
    assert [row["T"] for row in rows] == [1, 2]
    for row in rows:
        assert row["us"] == pytest.approx(1000 / (5 * 3)) and row["W"] == 2 and set(row["windows"]) == {"2", "16"}
        assert row["one_step_us"] == pytest.approx(1000 / (16 * 3)) and row["one_step"] == {"steady": row["one_step_us"]}
        model = verify.layout("tiny-gdn", 2).step_bytes(row["T"], 0.75)
        assert row["bytes"] == 2 * (model.replay.total + model.io.total)
    assert [row["peers"] for row in rows] == [{}, {"steady": rows[1]["us"]}]
    assert set(checks) == {"tiny-gdn, T = 1", "tiny-gdn, T = 2"}
    json.dumps(rows)


def test_host_rows(on_cpu, monkeypatch):
    """A row for each call of each kind of step; every measured round is of whole steps, whose commits are counted."""
    monkeypatch.setattr(host, "STEPS", 2)
    commits = []
    monkeypatch.setattr(ReplayState, "commit", lambda self, *args: commits.append(args[2] is not None))
    rows = list(host.rows(["tiny-gdn"], [2], 3, device="cpu"))
    assert [(row["kind"], row["T"], row["call"]) for row in rows] == [
        (kind, T, call) for kind, T in (("decode", 1), ("verify", 4), ("tree", 4)) for call in ("plan", "step", "commit")
    ]
    assert commits == 2 * 8 * [False] + 8 * [True]
    assert all(0 < row["us"] <= row["us_90"] and row["allocations"] == 0 for row in rows)
    json.dumps(rows)


def test_materialize_rows(on_cpu, monkeypatch):
    """Both operations at every count, over the floor of what they read and write; live slots stay as they are."""
    checks: dict = {}
    rows = list(materialize.rows(["tiny-mamba2"], [2], ["bf16"], 4, [0, 3], 1e12, 1, checks))
    assert [(row["op"], row["count"]) for row in rows] == [
        ("materialize", 0), ("fold", 0), ("materialize", 3), ("fold", 3)
    ]  # fmt: skip
    S, record = 2 * 16 * 16 * 2, (16 + 2 * 16) * 2 + 2 * 4  # H V K bf16; k and v bf16, beta fp32
    for row in rows:
        written = 2 * S if row["op"] == "materialize" else S
        assert row["bytes"] == 2 * 3 * (S + row["count"] * record + written), row["op"]
        assert row["floor_us"] == pytest.approx(row["bytes"] / 1e6) and row["us"] == 1000.0
        assert row["share"] == pytest.approx(row["floor_us"] / 1000)
    errors = checks["tiny-mamba2, bf16"]
    assert errors["materialize"] < 1e-6 < errors["fold"] < 1e-2
    json.dumps(rows)


@pytest.mark.parametrize("state", materialize.ERROR_BOUND)
@pytest.mark.parametrize("name", TINY)
def test_states_in_every_format(name, state):
    """They start as values of the format, so that they are exact until a fold rounds them, once."""
    model = replace(TINY[name], K=32)  # two blocks of nvfp4
    found = materialize.error(model.layout(W=4, state=state), device="cpu")
    assert found["materialize"] < 1e-6 and found["fold"] < materialize.ERROR_BOUND[state] / 2
    one = work.Work(model.layout(W=4, state=state), 2, 2, staggered=False, device="cpu")
    assert not torch.equal(one.states_of(0), one.states_of(1))
    if one.layout.format.block is None:
        assert torch.equal(one.states()[1].float(), one.states_of(1))
    else:
        with pytest.raises(NotImplementedError, match="expected a format without scales"):
            one.states()


def test_our_own_wrong_states_end_the_run(on_cpu, monkeypatch):
    monkeypatch.setattr(materialize, "oracle", lambda work: (None, torch.ones(work.B, 2, 16, 16)))
    with pytest.raises(RuntimeError, match="tiny-gdn, state fp32: our own states are off by"):
        list(materialize.rows(["tiny-gdn"], [2], ["fp32"], 4, [1], 1e12, 1, {}))
