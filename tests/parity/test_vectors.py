"""Golden vectors: files are what the generator gives; our backends pass them; what rounds or counts otherwise does not."""

import json

import pytest
import torch
from typer.testing import CliRunner

from replayssm import eager, formats
from replayssm.cli.app import app
from replayssm.parity import implementations, vectors, within
from tests.harness import BACKENDS, DEVICE, GPU

ALL = implementations()
TORCH = [one for one in ALL if one.name == "core torch"]
KERNELS = [one for one in ALL if one.name == "core Triton"]


def test_files_hold_every_case_in_a_few_megabytes():
    sizes = 0
    for family in vectors.FILES:
        tensors, about = vectors.read(family)
        sizes += sum(x.numel() * x.dtype.itemsize for x in tensors.values())
        for T in vectors.STEPS:
            for case in vectors.CASES:
                assert f"T{T}/{case}/outputs" in tensors and about["bounds"][f"T{T}"][case]["states"] > 0
            assert int(tensors[f"T{T}/flushes"][-1].min()) >= 2, "two flushes and more"
            assert (tensors[f"T{T}/slots"] < 0).any()
        rejected = tensors["T3/t"] - tensors["T3/accepted"]
        assert rejected.max() > 0 and tensors["T3/accepted"].max() == 3
    cases = {*formats.FORMATS, *(f"{one}+sr" for one in formats.STOCHASTIC), *(f"read-{one}" for one in formats.READ)}
    assert set(vectors.CASES) == cases, "a new format is a new case: add it and write the files again"
    assert sizes < 7e6


@pytest.mark.parametrize("family", ["mamba2", "kda_safe"])
def test_files_are_what_the_generator_gives(family):
    """Inputs and cursors bit for bit; results of fp64 sums to the last bits that another machine may order otherwise."""
    tensors, about = vectors.read(family)
    made, said = vectors.generate(family)
    assert made.keys() == tensors.keys() and {**said, "bounds": 0} == {**about, "bounds": 0}
    for name, x in made.items():
        if name.count("/") == 2:
            x, expected = (one.view(torch.uint8) if one.dtype.itemsize == 1 else one for one in (x, tensors[name]))
            same = torch.isclose(x.double(), expected.double(), 1e-5, 1e-6)
            assert same.double().mean() > 0.999, name
        else:
            assert torch.equal(x, tensors[name]), name


@pytest.mark.parametrize("family", vectors.FILES)
def test_torch(family):
    found = list(vectors.check(TORCH, [family], DEVICE))
    assert len(found) == 2 * 2 * len(vectors.CASES) == vectors.total(TORCH, [family])
    assert all(within(one) and "absent" not in one for one in found), [one for one in found if not within(one)]


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_kernels(backend):
    """One case of each kind in the interpreter; ``replayssm parity --vectors`` runs all."""
    tensors, about = vectors.read("gdn")
    for case in ("e4m3+sr", "read-nvfp4"):
        found = vectors._row("core Triton", "gdn", 3, case, "fp32", tensors, about, DEVICE)
        assert within(found) and "absent" not in found, found


@pytest.mark.skipif(GPU, reason="of the interpreter")
def test_what_the_interpreter_cannot():
    tensors, about = vectors.read("gla")
    found = vectors._row("core Triton", "gla", 1, "bf16", "fp32", tensors, about, "cpu")
    assert found["absent"].endswith("by truncation, not to nearest")


@pytest.mark.gpu
@pytest.mark.slow
def test_all_of_the_kernels():
    assert all(within(one) and "absent" not in one for one in vectors.check(KERNELS, None, DEVICE))


def of(case: str, family: str = "mamba2", T: int = 1):
    tensors, about = vectors.read(family)
    return vectors._row("core torch", family, T, case, "fp32", tensors, about, DEVICE)


def test_other_draws_are_found(monkeypatch):
    assert within(of("fp16+sr"))
    monkeypatch.setattr(formats, "draws", lambda *args, draws=formats.draws: draws(args[0] + 1, *args[1:]))
    assert not within(of("fp16+sr"))


def test_rounding_to_nearest_instead_is_found(monkeypatch):
    monkeypatch.setattr(formats, "draws", lambda *args, draws=formats.draws: torch.full_like(draws(*args), 0.5))
    assert not within(of("e4m3+sr"))


def test_a_flush_on_another_step_is_found(monkeypatch):
    monkeypatch.setattr(eager, "phase", lambda slot, flushes, phases: 0 * slot)
    found = of("fp32")
    assert found["cursors_differing"] > 0 and not within(found)


def test_outputs_that_do_not_read_the_copy_are_found(monkeypatch):
    monkeypatch.setattr(eager, "_load", lambda stored, slot, one: 1.01 * one.decode(
        formats.Stored(*(None if x is None else x[slot] for x in stored))))  # fmt: skip
    assert not within(of("read-int8"))


def test_files_of_another_version_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"A": torch.ones(2)}, tmp_path / "gdn.safetensors", {"golden_vectors": "0"})
    with pytest.raises(ValueError, match="^vectors: expected version 1 in .*, got 0"):
        vectors.read("gdn", tmp_path)
    with pytest.raises(
        ValueError, match="^vectors: expected .*kda.safetensors; `python -m replayssm.parity.vectors` writes it"
    ):
        vectors.read("kda", tmp_path)


def test_command():
    done = CliRunner().invoke(app, ["parity", "--vectors", "--json", "--family", "gla", "--implementation", "core torch"])
    found = json.loads(done.stdout)
    assert (
        done.exit_code == 0
        and len(found["rows"]) == 2 * 2 * len(vectors.CASES)
        and all(one["cursors_differing"] == 0 for one in found["rows"])
    )
