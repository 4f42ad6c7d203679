"""`replayssm doctor`: what it runs, what it finds out, and its exit code."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("packaging")

from packaging.requirements import Requirement
from typer.testing import CliRunner

from replayssm import doctor, formats
from replayssm.cli.app import app
from replayssm.state import ReplayState


def run(*args):
    return CliRunner().invoke(app, ["doctor", "--device", "cpu", *args])


def test_everything_works_on_a_cpu():
    done = run("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"] is True and found["device"] == "cpu"
    assert [one["name"] for one in found["packages"]] == ["torch", "triton"]
    assert all(one["status"] == "works" and 0 < one["error"] < 0.3 for one in found["probes"])
    assert len(found["probes"]) == doctor.count()
    cases = {(one["family"], one["mode"], one["state"]) for one in found["probes"]}
    assert {(row.name, mode, "fp32") for row in doctor.FAMILIES for mode in doctor.MODES} <= cases
    assert {("gdn", "decode", state) for state in formats.FORMATS} <= cases
    assert set(found["engines"]) == {one.engine for one in doctor.INTEGRATIONS}


def test_a_wrong_kernel_is_found_out(monkeypatch):
    step = ReplayState.step
    monkeypatch.setattr(ReplayState, "step", lambda self, *args, **inputs: step(self, *args, **inputs).flip(1))
    done = run()
    assert done.exit_code == 1
    assert "broken" in done.output and "error against the oracle: expected below" in done.output
    assert "something does not work" in done.output


def test_wrong_states_are_found_out(monkeypatch):
    """Outputs alone would not show it."""
    exact = ReplayState.materialize
    monkeypatch.setattr(ReplayState, "materialize", lambda self, *args: exact(self, *args).flip(2))
    assert doctor.probe(doctor.GDN, "decode", "fp32", "cpu").status == "broken"


def test_what_is_not_supported_is_not_broken(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError("parents: supported is None")

    monkeypatch.setattr(ReplayState, "plan", refuse)
    done = run()
    assert done.exit_code == 0
    assert "trees: unsupported: parents: supported is None" in done.output

    def crash(self, *args, **kwargs):
        raise RuntimeError("ptxas not found")

    monkeypatch.setattr(ReplayState, "plan", crash)
    done = run()
    assert done.exit_code == 1 and "decode: broken: RuntimeError: ptxas not found" in done.output


def test_versions(monkeypatch):
    """In range, out of range, absent, and of unknown range."""
    allowed = {"torch": Requirement("torch>=2.11,<2.15"), "sglang": Requirement('sglang>=0.5.17; extra == "sglang"')}
    versions = {"torch": "2.13.0+cpu", "sglang": "0.4.0", "triton": "3.7.1"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert doctor.package("torch", allowed) == doctor.Package("torch", "2.13.0+cpu", "<2.15,>=2.11", "")
    assert doctor.package("sglang", allowed).problem == "version: supported are >=0.5.17, found 0.4.0"
    assert doctor.package("triton", allowed) == doctor.Package("triton", "3.7.1", "", "")
    assert doctor.package("flashinfer-python", allowed).problem == "not installed"
    versions["torch"] = "2.15.0"
    assert doctor.package("torch", allowed).problem == "version: supported are <2.15,>=2.11, found 2.15.0"


def test_engines(monkeypatch):
    """transformers works where it is installed; the others have no integration, installed or not."""
    done = run("--engine", "transformers", "--json")
    engines = json.loads(done.stdout)["engines"]
    assert done.exit_code == (0 if engines["transformers"]["works"] else 1)
    if engines["transformers"]["works"]:
        assert engines["transformers"]["families"] == ["mamba2", "gdn", "kda", "kda_safe"]
        assert engines["transformers"]["states"] == sorted(formats.FORMATS)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.5.20")
    sglang = doctor.Integration("no_such_engine", "sglang", families=("gdn",))
    found = doctor.engine(sglang, {}, ("fp32",))
    assert not found.works and found.families == found.states == ()
    assert found.reasons == ("this version of ReplaySSM has no integration for it",)


def test_an_integration_that_does_not_import(monkeypatch):
    def broken(name):
        raise ImportError("cannot import name 'Cache'")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "1")
    found = doctor.engine(doctor.INTEGRATIONS[0], {}, ("fp32",))
    assert found.reasons == ("its integration does not import: ImportError: cannot import name 'Cache'",)


def test_exit_code_of_an_engine_that_does_not_work(monkeypatch):
    monkeypatch.setattr(doctor, "engine", lambda one, allowed, states: doctor.Engine(
        doctor.package("no-such-distribution", {}), False, (), (), (), ("not installed",)))  # fmt: skip
    assert run().exit_code == 0
    done = run("--engine", "sglang")
    assert done.exit_code == 1 and "sglang: does not work" in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--engine", "vllm"], "engine: expected one of transformers, sglang"), (["--device", "tpu"], "device: expected cpu")],
    ids=["engine", "device"],
)
def test_bad_input_is_one_line(args, message):
    done = run(*args)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("replayssm: ") and message in line
