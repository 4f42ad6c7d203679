"""The state as a service: a continuous-batching engine in miniature, every request beside an undisturbed fp64 run of it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typer.testing import CliRunner

from replayssm import Export, ReplayState, eager, formats, transfer
from replayssm.cli.app import app
from replayssm.soak import STYLES, Engine, Report, Setup, walk
from tests.cases import FAMILY
from tests.harness import BACKENDS, DEVICE, GPU

EVENTS = {
    "admissions", "prefix hits", "prefill chunks", "decode steps", "chain steps", "packed steps", "tree steps", "snapshots",
    "padding rows", "tokens kept", "tokens rejected", "second commits", "faults", "aborts", "aborts within a step", "forks",
    "moves", "preemptions", "files", "resumptions", "migrations", "shards merged", "states compared", "finished",
    "request-steps",
}  # fmt: skip


def setup(name: str = "gdn", backend: str = "torch", slots: int = 5, layers: int = 2, **kwargs) -> Setup:
    case = dataclasses.replace(FAMILY[name], V=16)
    layout = case.layout(**{"W": 6, "T_max": 3} | kwargs)
    return Setup(layout, layers, slots, 3 * slots, backend=backend, device=DEVICE, tokens=24)


def clean(report: Report) -> bool:
    """Nothing beyond its bound, and something of every kind compared."""
    return not report.mismatches and all(one.compared for one in report.found.values())


# ---- walks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_walk(name):
    """Every event, a request's outputs and states those of a run of its own; a fault stays in its request."""
    report = walk(Engine(setup(name), seed=1), 1000 if name == "gdn" else 200)
    assert clean(report), report
    assert name != "gdn" or report.events.keys() == EVENTS


@pytest.mark.parametrize("name, options", [
    ("mamba2", {"state": "bf16"}), ("kda", {"state": "fp16+sr", "read": "int8"}),
    ("gdn", {"state": "e4m3+sr", "read": "nvfp4"}), ("gdn", {"act": torch.bfloat16}),
], ids=str)  # fmt: skip
def test_walk_in_other_formats(name, options):
    report = walk(Engine(setup(name, **options)), 120)
    assert clean(report), report
    assert report.found["states"].worst > 1e-5 or "state" not in options


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_walk_of_the_kernels(name, backend):
    report = walk(Engine(setup(name, backend, slots=3, layers=1)), 16, check_every=4)
    assert not report.mismatches, report


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_long_walk_of_the_kernels(name):
    report = walk(Engine(dataclasses.replace(setup(name, "triton", slots=128), debug=False, tokens=200)), 50_000)
    assert clean(report), report


@pytest.mark.parametrize("name, backend", [("gdn", "torch"), ("mamba2", "torch"), *(
    pytest.param(name, "triton", marks=pytest.mark.gpu) for name in FAMILY)])  # fmt: skip
def test_walk_of_replayed_steps(name, backend):
    """Steps and commits from graphs (on a CPU from their fixed tensors), other events between them: as without, bit for bit."""
    one, other = (
        Engine(dataclasses.replace(setup(name, backend, slots=16 if GPU else 5), debug=False, graphs=graphs), seed=2)
        for graphs in (False, True)
    )
    plain, replayed = walk(one, 4000 if GPU else 300), walk(other, 4000 if GPU else 300)
    assert clean(replayed), replayed
    assert replayed.found == plain.found
    assert replayed.events.pop("graph replays") > 50 and replayed.events == plain.events


def test_graphs_and_debug_exclude_each_other():
    with pytest.raises(ValueError, match="graphs: expected False with debug"):
        Engine(dataclasses.replace(setup(), debug=True, graphs=True))


def test_a_seed_repeats_its_walk():
    one, again, other = (walk(Engine(setup(), seed), 100) for seed in (3, 3, 4))
    assert (one.events, one.found) == (again.events, again.found)
    assert one.events != other.events


@pytest.mark.parametrize("name", ["gdn", "kda", "mamba2"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_five_walks_leave_the_same_bits(name, backend):
    """Every kernel, five times: what workers hold, and every error that was seen, bit for bit."""
    options = {"state": "fp16+sr", "read": "int8"} if name == "gdn" else {}
    first = None
    for _ in range(5):
        engine = Engine(setup(name, backend, slots=24 if backend == "triton" else 3, **options), seed=3)
        found = walk(engine, 2000 if backend == "triton" else 40).found
        held = [
            x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for one in engine.workers
            for x in (*one.buffers, *one.cursors)
            if x is not None
        ]
        first = first or (found, held)
        assert found == first[0]
        assert all(map(torch.equal, held, first[1]))


# ---- hypothesis -----------------------------------------------------------------------------------------------------


WORKER, FEW = st.integers(0, 1), st.integers(1, 3)


class EngineMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16), name=st.sampled_from(sorted(FAMILY)), W=st.integers(3, 7))
    def start(self, seed, name, W):
        self.engine = Engine(setup(name, slots=3, layers=1, W=W), seed)
        self.engine.admit(0, 2, False)

    @rule(worker=WORKER, most=FEW, hit=st.booleans())
    def admit(self, worker, most, hit):
        self.engine.admit(worker, most, hit)

    @rule(worker=WORKER, most=FEW)
    def prefill(self, worker, most):
        self.engine.prefill(worker, most)

    @rule(worker=WORKER, style=st.sampled_from(STYLES), share=st.sampled_from([0.6, 1.0]), abort=st.integers(0, 1))
    def step(self, worker, style, share, abort):
        self.engine.step(worker, style, share, abort)

    @rule(style=st.sampled_from(STYLES), times=st.integers(2, 5))
    def steps(self, style, times):
        """Without it, random calls seldom wrap a ring or leave records in it."""
        for _ in range(times):
            for worker in (0, 1):
                self.engine.step(worker, style)

    @rule(worker=WORKER, to=WORKER)
    def migrate(self, worker, to):
        self.engine.preempt(worker, 1, fold=False)
        self.engine.resume(to)

    @rule(worker=WORKER, style=st.sampled_from(STYLES))
    def fault(self, worker, style):
        self.engine.step(worker, style, fault=True)

    @rule(worker=WORKER, most=FEW, fold=st.booleans())
    def preempt(self, worker, most, fold):
        self.engine.preempt(worker, most, fold)

    @precondition(lambda self: self.engine.parked)
    @rule(worker=WORKER)
    def resume(self, worker):
        self.engine.resume(worker)

    @rule(worker=WORKER, most=FEW)
    def fork(self, worker, most):
        self.engine.fork(worker, most)

    @rule(worker=WORKER, most=FEW)
    def move(self, worker, most):
        self.engine.move(worker, most)

    @rule(worker=WORKER)
    def abort(self, worker):
        self.engine.abort(self.engine.some(self.engine.of(worker), 1))

    @rule(worker=WORKER)
    def audit(self, worker):
        self.engine.audit(worker)

    @invariant()
    def nothing_wrong(self):
        if hasattr(self, "engine"):
            wrong = {name: one for name, one in self.engine.check.found().items() if one.wrong}
            assert not wrong, wrong

    def teardown(self):
        if hasattr(self, "engine"):
            for worker in (0, 1):
                self.engine.audit(worker)
            self.nothing_wrong()


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)
TestEngineMachine = EngineMachine.TestCase


# ---- broken copies --------------------------------------------------------------------------------------------------


def _fields(names, copy):
    """transfer.copy, but for the buffers of these names."""

    def broken(src, dst, buffers, cursors):
        copy(src, dst, buffers._replace(**{name: None for name in names}), cursors)

    return broken


def _without_cursors(src, dst, buffers, cursors, copy=transfer.copy):
    copy(src, dst, buffers, cursors._replace(**{name: x.clone() for name, x in cursors._asdict().items()}))


def _commit_again(plan, accepted, cursors, commit=eager.commit):
    again = plan.clone()
    again[:, 8] = torch.where(plan[:, 0] >= 0, cursors.pending[plan[:, 0].clamp(min=0).long()], 0)
    commit(again, accepted, cursors)


def _clamped(target, slots, values, scatter=eager.scatter):
    scatter(target, slots.clamp(min=0), values)


def _all_records(self, slots, n=None, materialize=ReplayState.materialize):
    return materialize(self, slots)


def _checkpoint(self, slots, n=None, materialize=ReplayState.materialize):
    return materialize(self, slots, torch.zeros_like(slots))


def _window_of_all(self, slots, n=None, window=ReplayState.conv_window):
    return window(self, slots)


def _stale_cursor(self, slots, exported, import_=ReplayState.import_):
    import_(self, slots, exported)
    self.cursors.count[slots.long()] = 0


def _no_ring(self, slots, export=ReplayState.export):
    found = export(self, slots)
    rings = {name: torch.zeros_like(x) if name in ("k", "v") else x for name, x in found.tensors.items()}
    return dataclasses.replace(found, tensors=rings)


def _ring_rows_as_they_are(self, layout, rings=Export._rings):
    moved = rings(self, layout)
    return moved | {"cursor.start": self.tensors["cursor.start"].clamp(max=layout.R - 1)}


def _not_restarted(self, slots, keys):
    self._settle(slots)


def _cut_short(start, count, flush, accepted, R, committed=eager.committed):
    start, count = committed(start, count, flush, accepted, R)
    return start, count.clamp(max=4)


BROKEN = [
    ("a window cut short", eager, "committed", _cut_short),
    ("a cursor that is stale after a resume", ReplayState, "import_", _stale_cursor),
    ("a commit that runs twice", eager, "commit", _commit_again),
    ("padding that is clamped to slot 0", eager, "scatter", _clamped),
    ("a copy without its ring", transfer, "copy", _fields(("v", "u"), transfer.copy)),
    ("a copy without its convolution", transfer, "copy", _fields(("conv",), transfer.copy)),
    ("a copy without its cursors", transfer, "copy", _without_cursors),
    ("a snapshot of the checkpoint alone", ReplayState, "materialize", _checkpoint),
    ("a snapshot of another position", ReplayState, "materialize", _all_records),
    ("a convolution window of another position", ReplayState, "conv_window", _window_of_all),
    ("a reused slot that is not reset", ReplayState, "_restart", _not_restarted),
    ("a request that loses its ring in host memory", ReplayState, "export", _no_ring),
    ("records that stay where another window had them", Export, "_rings", _ring_rows_as_they_are),
    ("a path whose records are not moved together", eager, "compact", lambda *args, **settled: None),
]


@pytest.mark.parametrize("what, owner, name, broken", BROKEN, ids=[what for what, *_ in BROKEN])
def test_a_walk_finds(what, owner, name, broken, monkeypatch):
    """Each of these, so that a walk that finds nothing says something."""
    engine = Engine(dataclasses.replace(setup(), debug=False), seed=1)
    monkeypatch.setattr(owner, name, broken)
    try:
        report = walk(engine, 1200, check_every=4)
    except (IndexError, ValueError):  # cursors beyond the ring
        return
    assert report.mismatches, report


# ---- the command ----------------------------------------------------------------------------------------------------


SMALL = ["--steps", "60", "--slots", "4", "--layers", "1", "--value-dim", "16", "--key-dim", "16", "--device", "cpu"]


def test_command():
    done = CliRunner().invoke(app, ["soak", *SMALL, "--seed", "5"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("seed 5, ") and "no mismatch" in done.stdout
    done = CliRunner().invoke(app, ["soak", *SMALL, "--json", "--debug", "--family", "mamba2", "--dtype", "bf16"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["mismatches"] == 0
    assert found["events"]["request-steps"] >= 60 and found["found"]["outputs"]["compared"] > 60
    assert {"seed", "seconds", "layout", "backend", "device"} <= found.keys()


def test_command_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(ReplayState, "materialize", _checkpoint)
    done = CliRunner().invoke(app, ["soak", *SMALL])
    assert done.exit_code == 1 and "MISMATCHES: " in done.output


@pytest.mark.parametrize("args, message", [
    (["--family", "rwkv"], "recurrence: expected one of "),
    (["--dtype", "fp8"], "dtype: expected one of fp32, bf16, fp16, got 'fp8'"),
    (["--state", "int3"], f"state format: expected one of {list(formats.FORMATS)[:1]}"[:-1]),
    (["--steps", "0"], "steps, slots, layers: expected >= 1, got 0, 24, 2"),
    (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
    (["--backend", "jax"], "backend: expected one of "),
    (["--draft-tokens", "17"], "T_max: expected at most W = 16, got 17"),
], ids=lambda x: x[0] if isinstance(x, list) else "")  # fmt: skip
def test_bad_input_is_one_line(args, message):
    done = CliRunner().invoke(app, ["soak", *(["--device", "cpu"] if "--device" not in args else []), *args])
    assert done.exit_code == 2 and done.stderr.startswith(f"replayssm: {message}") and done.stderr.count("\n") == 1


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_of_failures_names_tests_that_exist():
    tests = Path(__file__).parent
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`", (tests.parent / "docs" / "failures.md").read_text())
    assert len(named) > 40
    for file, name in named:
        assert f"def {name}(" in (tests / file).read_text(), f"{file}::{name}"
