"""Parity: every scenario on our implementations within bounds, broken ones beyond them, absent ones with their reason."""

import dataclasses
import json
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from replayssm.cli.app import app
from replayssm.parity import SCENARIOS, Entry, Ours, Problem, cells, implementations, row, rows, scenario, within
from replayssm.parity.implementation import Kernels, Pages
from replayssm.parity.scenarios import PADDING, Snapshot
from tests.cases import FAMILY
from tests.harness import BACKENDS, DEVICE

TORCH, PAGES, KERNELS = Entry("torch", Ours), Entry("pages", Pages), Entry("Triton", Kernels)


def problem(name: str = "verify", family: str = "gdn", layers: int = 2, **options) -> Problem:
    layout = FAMILY[family].layout(W=4, **options)
    return Problem(layout, scenario(name, 4), layers, DEVICE)


def alone(problem: Problem, entry: Entry):
    return row(problem, entry, entry)


def names_of(found):
    return {(one["scenario"], one["implementation"], one.get("to")) for one in found}


@pytest.mark.parametrize("family", FAMILY)
def test_every_scenario(family):
    """Outputs, states, tokens, lossless rejection, and migrations both ways, of two layouts of the torch backend."""
    found = list(rows([TORCH, PAGES], [FAMILY[family].layout(W=4)], device=DEVICE))
    assert len(found) == 2 * len(SCENARIOS) == len(names_of(found))
    for one in found:
        assert "absent" not in one and within(one), one
        assert one["tokens"] > 10 and 0 < one["state_error"] and one["state_bound"] < 2e-6 and one["output_bound"] < 5e-6
        assert (one["scenario"] == "rejection") == ("lossless_error" in one)


@pytest.mark.parametrize("options", [
    {"act": torch.bfloat16}, {"state": "bf16"}, {"state": "fp16+sr", "read": "int8"}, {"read": "nvfp4"},
], ids=str)  # fmt: skip
def test_other_formats(options):
    for one in rows([TORCH], [FAMILY["kda"].layout(W=4, **options)], ["verify", "snapshot", "preemption"], device=DEVICE):
        assert within(one) and "absent" not in one, one


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_kernels(backend):
    """What the torch backend decodes half way goes on in the kernels."""
    layout = dataclasses.replace(FAMILY["gdn"], V=16).layout(W=4)
    found = row(Problem(layout, scenario("migration", 4), 1, DEVICE), TORCH, KERNELS)
    assert within(found) and "absent" not in found, found


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY)
def test_every_scenario_of_the_kernels(family):
    for one in rows([TORCH, KERNELS], [FAMILY[family].layout(W=4)], device=DEVICE):
        assert within(one) and "absent" not in one, one


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_scripts_are_the_same_and_do_what_they_say():
    made = {name: scenario(name, 8) for name in SCENARIOS}
    assert made == {name: scenario(name, 8) for name in SCENARIOS}
    assert {name for name, one in made.items() if one.uniform} == {"decode", "verify", "rejection"}
    accepted = {n for step in made["verify"].steps for n in step.accepted}
    assert accepted == {1, 2, 3, 4}
    batching = made["batching"].steps
    assert any(PADDING in step.rows for step in batching) and any(0 in step.t for step in batching)
    assert any(0 in step.accepted and max(step.t) for step in batching)
    snapshots = [one for one in made["snapshot"].events if isinstance(one, Snapshot)]
    assert len(snapshots) == 3 and any(one.back for one in snapshots)


def test_inputs_of_a_step():
    """Kept tokens are the request's next ones; rejected drafts are others; NaN where no token is."""
    one = problem("batching")
    position = [0] * 3
    for number, step in enumerate(one.scenario.steps):
        x = one.inputs(number, position)["v"]
        for i, (r, t, n) in enumerate(zip(step.rows, step.t, step.accepted, strict=True)):
            assert x[:, i, t:].isnan().all() and x[:, i, :t].isfinite().all()
            if r != PADDING:
                assert torch.equal(x[:, i, :n], one.tokens["v"][:, r, position[r] : position[r] + n])
                position[r] += n


# ---- broken implementations -----------------------------------------------------------------------------------------


class AllStay(Ours):
    """Rejected drafts are kept."""

    def step(self, rows, t, accepted, x):
        return super().step(rows, t, t, x)


class Rounded(Ours):
    """Beta goes through bf16."""

    def step(self, rows, t, accepted, x):
        beta = torch.sigmoid(x["b"]).bfloat16().to(x["b"].dtype)
        return super().step(rows, t, accepted, x | {"b": torch.logit(beta)})


class CheckpointAlone(Ours):
    """A prefix is the checkpoint without its ring."""

    def snapshot(self, request, back):
        slots = self.of([request])
        return self.state.materialize(slots, torch.zeros_like(slots))[:, 0]


class NotTheSlot(Ours):
    """A request that comes back finds what is in its slot."""

    def enter(self, request, exported):
        self.at[request] = self.free.pop(0)


class PaddingSpeaks(Ours):
    """Rows of padding are not zero."""

    def step(self, rows, t, accepted, x):
        o = super().step(rows, t, accepted, x)
        o[:, [i for i, one in enumerate(rows) if one == PADDING]] = 1
        return o


@pytest.mark.parametrize("kind, name", [
    (AllStay, "verify"), (AllStay, "rejection"), (AllStay, "batching"), (Rounded, "decode"), (CheckpointAlone, "snapshot"),
    (NotTheSlot, "preemption"), (PaddingSpeaks, "batching"),
], ids=lambda x: x if isinstance(x, str) else x.__name__)  # fmt: skip
def test_what_is_broken_is_beyond(kind, name):
    found = alone(problem(name), Entry("broken", kind))
    assert "absent" not in found and not within(found), found


def test_tokens_differ_where_outputs_do():
    found = alone(problem("verify"), Entry("broken", AllStay))
    assert found["tokens_differing"] > found["tokens"] / 4


def test_rejection_is_compared_with_its_own_plain_decoding():
    """A path whose verification errs within its output bound, but not as its decoding does, is found where it exceeds it."""

    class Other(Ours):
        def step(self, rows, t, accepted, x):
            return super().step(rows, t, accepted, x) * (1 + 1e-4 * (max(t) > 1))

    found = alone(problem("rejection"), Entry("other", Other))
    assert found["lossless_error"] == pytest.approx(1e-4, rel=0.1) and not within(found)


# ---- what is absent -------------------------------------------------------------------------------------------------


def test_absent_with_its_reason():
    class None_(Ours):
        def __init__(self, problem):
            raise NotImplementedError("it cannot")

    found = alone(problem(), Entry("none", None_))
    assert found["absent"] == "it cannot" and within(found) and "output_error" not in found
    shims = [one for one in implementations() if one.name.endswith("shim")]
    assert len(shims) == 3
    natives = [one for one in implementations() if one.native]
    assert {"SGLang ReplaySSM", "vLLM ReplaySSM", "flash-linear-attention", "transformers"} <= {one.name for one in natives}
    assert cells([TORCH, PAGES, *natives], "migration") == [(TORCH, PAGES), (PAGES, TORCH)]


PACKAGES = {"SGLang": "sglang", "vLLM": "vllm", "FlashInfer": "flashinfer", "flash-linear-attention": "fla"}


def test_natives_without_their_packages():
    for one in implementations():
        package = PACKAGES.get(one.name.split()[0])
        if one.native and package and find_spec(package) is None:
            for name, family in (("decode", "gdn"), ("decode", "mamba2"), ("snapshot", "mamba2")):
                assert alone(problem(name, family), one)["absent"]


# ---- natives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2"])
def test_transformers_reference_functions(family):
    """In fp32 they are within bounds; with 16-bit activations beta or dt is rounded before it enters the state, a finding."""
    pytest.importorskip("transformers")
    (entry,) = (one for one in implementations() if one.name == "transformers")
    found = alone(problem("decode", family), entry)
    assert found["native"] and within(found) and found["state_error"] > 0, found
    found = alone(problem("decode", family, act=torch.bfloat16), entry)
    assert not within(found) and 1e-4 < found["state_error"] < 1e-2, found


# ---- the command ----------------------------------------------------------------------------------------------------


SMALL = ["parity", "--device", "cpu", "--window", "4", "--family", "gdn", "--dtype", "fp32", "--layers", "1"]


def test_command(tmp_path):
    args = [*SMALL, "--scenario", "decode", "--scenario", "migration", "--implementation", "core torch"]
    done = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "parity.json")])
    assert done.exit_code == 0, done.output
    assert "ours: 4 results, 0 beyond bounds" in done.stdout and "core torch -> core torch, pages" in done.stdout
    written = json.loads((tmp_path / "parity.json").read_text())
    assert written["header"]["torch"] == torch.__version__ and len(written["rows"]) == 4
    done = CliRunner().invoke(app, [*SMALL, "--json", "--scenario", "rejection", "--implementation", "transformers"])
    (found,) = json.loads(done.stdout)["rows"]
    assert done.exit_code == 0 and found["absent"].startswith("it has no kernel for gdn with T > 1")


def test_command_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(Ours, "step", _all_stay)
    done = CliRunner().invoke(app, [*SMALL, "--scenario", "verify", "--implementation", "core torch"])
    assert done.exit_code == 1 and "BEYOND" in done.stdout


def _all_stay(self, rows, t, accepted, x, step=Ours.step):
    return step(self, rows, t, t, x)


@pytest.mark.parametrize("args, message", [
    (["--family", "rwkv"], "family: expected one of mamba2, gdn"),
    (["--scenario", "nap"], "scenario: expected one of decode, verify"),
    (["--dtype", "fp8"], "dtype: expected one of fp32, bf16, fp16, got 'fp8'"),
    (["--implementation", "llama"], "implementation: expected the begin of one of core torch"),
    (["--window", "3"], "window: expected at least 4, got 3"),
    (["--peers", "nowhere"], "peers: expected a folder"),
    (["--vectors", "--implementation", "transformers"], "implementation: expected one of core torch, core Triton for vectors"),
], ids=lambda x: x[0] if isinstance(x, list) else "")  # fmt: skip
def test_bad_input_is_one_line(args, message):
    done = CliRunner().invoke(app, [*SMALL, *args])
    assert done.exit_code == 2 and done.stderr.startswith(f"replayssm: {message}") and done.stderr.count("\n") == 1
