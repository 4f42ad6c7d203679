"""`replayssm patch flashinfer` on the installed FlashInfer: the patch applies, is complete, and the new backend computes."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

if importlib.util.find_spec("flashinfer") is None:
    pytest.skip("flashinfer-python is not installed", allow_module_level=True)
pytest.importorskip("libcst")
pytest.importorskip("typer")

from replayssm.integrations.flashinfer.upstream import FUNCTIONS, recipe
from tests.integrations import patched as made
from tests.integrations.patched import git

RECIPE = recipe("depend")
TOUCHED = {file for file, *_ in FUNCTIONS.values()}
TEST, PAGE = next(iter(RECIPE.beside)), RECIPE.sections[0].file

IGNORED = "E402,E501,E731,E741,E902,F403,F405,B019,B020,B023,SIM102,SIM103,SIM108,SIM118"
LINT = ("--select", "E,F,B,SIM", "--ignore", IGNORED, "--config", "lint.per-file-ignores={'__init__.py'=['F401']}")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return made.checkout(RECIPE, tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def patched(original, tmp_path_factory):
    return made.commit("flashinfer", original, tmp_path_factory.mktemp("commit"))


def test_commit(patched):
    assert set(made.changed(patched)) == {f"flashinfer/{file}" for file in (*TOUCHED, *RECIPE.files)} | {TEST, PAGE}
    assert (patched / PAGE).read_text() == f"Text.\n\n{RECIPE.sections[0].text}"
    removed = [line for line in git(patched, "diff", "HEAD~").splitlines() if line.startswith("-") and line[:3] != "---"]
    assert all("Literal[" in line for line in removed), removed


def test_twice_changes_nothing(patched):
    done = made.patch("flashinfer", patched)
    assert done.exit_code == 0 and done.stdout == ""
    assert done.stderr.count(": already there: ") == len(FUNCTIONS) + 3 and ": changed: " not in done.stderr


def test_formatter_and_linter_change_nothing_more(original, patched):
    """As FlashInfer's pyproject.toml has it; lines may be long, names as in formulas, imports anywhere."""
    assert made.complaints(patched, patched, LINT) == made.complaints(original, patched, LINT)


def test_an_argument_that_we_do_not_know_writes_nothing(original, tmp_path):
    root = tmp_path / "checkout"
    shutil.copytree(original, root)
    file = root / "flashinfer/mamba/selective_state_update.py"
    text = file.read_text()
    at = text.index("    cache_steps: int", text.index("\ndef selective_state_update("))
    file.write_text(f"{text[:at]}    future: int = 0,\n{text[at:]}")
    done = made.patch("flashinfer", root, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and not (tmp_path / "out").exists()
    assert "selective_state_update.py: anchor selective_state_update: expected the parameters A, B, " in done.stderr
    assert ", got future too (flashinfer-python " in done.stderr


def computes(style, patched, root, before="pass"):
    """The test that the patch brings passes in the patched package."""
    package = made.package(recipe(style), patched, root)
    shutil.copy(patched / TEST, root)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(root), str(root / "test_replayssm_backend.py")]
    script = f"import sys; {before}; import pytest; sys.exit(pytest.main({options!r}))"
    made.run(package, "-c", script, FLASHINFER_WORKSPACE_BASE=str(root))


def test_patched_package_computes(patched, tmp_path):
    computes("depend", patched, tmp_path)


@pytest.mark.slow
def test_vendored_package_computes(original, tmp_path):
    """Where there is no ReplaySSM but the copy; FlashInfer's formatter leaves the copy as it is."""
    patched = made.commit("flashinfer", original, tmp_path, "--style", "vendor")
    assert "flashinfer/replayssm_kernels/kernels/decode.py" in made.changed(patched)
    assert made.complaints(patched, patched, LINT) == made.complaints(original, patched, LINT)
    computes("vendor", patched, tmp_path, "sys.modules['replayssm'] = None")
