"""`replayssm patch sglang` on the installed SGLang: the patch applies, is complete, is formatted, and what it touches works."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)
pytest.importorskip("libcst")
pytest.importorskip("typer")

from replayssm.integrations.sglang.upstream import MODULE, recipe
from tests.integrations import patched as made
from tests.integrations.patched import git

RECIPE = recipe("depend")
PAGE = RECIPE.sections[0].file
THERE = made.edits(RECIPE, made.installed(RECIPE))
LINT = ("--select", "I", "--config", "lint.isort.known-first-party=['sglang']")
TOUCHED = sorted({edit.file for edit in THERE})


def patch(source, *args):
    return made.patch("sglang", source, *args)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return made.checkout(RECIPE, tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def patched(original, tmp_path_factory):
    return made.commit("sglang", original, tmp_path_factory.mktemp("commit"))


@pytest.fixture(scope="module")
def package(patched, tmp_path_factory):
    return made.package(RECIPE, patched, tmp_path_factory.mktemp("package"))


def test_commit(patched):
    assert git(patched, "log", "-1", "--format=%s").startswith("Add ReplaySSM decode backends")
    new = {f"python/{MODULE.replace('.', '/')}.py", *RECIPE.beside}
    assert set(made.changed(patched)) == {f"python/sglang/{file}" for file in TOUCHED} | new | {PAGE}
    assert (patched / PAGE).read_text().endswith(f"Text.\n\n{RECIPE.sections[0].text}")
    removed = [line for line in git(patched, "diff", "HEAD~").splitlines() if line.startswith("-") and line[:3] != "---"]
    assert len(removed) == 2 and all("choices=" in line for line in removed)


def test_twice_changes_nothing(patched):
    done = patch(patched)
    assert done.exit_code == 0 and done.stdout == ""
    assert done.stderr.count(": already there: ") == len(THERE) + 3 and ": changed: " not in done.stderr


def test_check_prints_no_patch(original):
    done = patch(original, "--check", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["engine"] == "sglang" and found["version"] and found["patch"] is None
    assert [step["done"] for step in found["steps"]].count("changed") == len(THERE) + 1
    assert all(step["file"] and step["what"] for step in found["steps"])


def test_missing_anchor_writes_nothing(original, tmp_path):
    root = tmp_path / "checkout"
    shutil.copytree(original, root)
    file = root / "python" / "sglang" / "srt" / "mem_cache" / "memory_pool.py"
    file.write_text(file.read_text().replace("def _init_mamba_pool", "def _make_mamba_pool"))
    done = patch(root, "--out", str(tmp_path / "out"))
    version = git(root, "describe", "--always").strip()
    assert done.exit_code == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    said = "python/sglang/srt/mem_cache/memory_pool.py: anchor HybridReqToTokenPool._init_mamba_pool: expected one"
    assert said in done.stderr and f"(sglang {version})" in done.stderr


def test_refusals(original, tmp_path):
    for args, says in (
        (("sglang", tmp_path), "source: expected a checkout with python/pyproject.toml"),
        (("sglang", original, "--style", "copy"), "style: expected one of depend, vendor, got 'copy'"),
        (("other", original), "engine: expected one of flashinfer, sglang, trtllm, got 'other'"),
    ):
        done = made.patch(*args)
        assert done.exit_code == 2 and says in done.stderr


def test_formatter_changes_nothing_more(original, patched):
    """Formatted by ruff in 88 columns, with sorted imports."""
    assert made.complaints(patched, patched, LINT) == made.complaints(original, patched, LINT)


WORKS = """
import importlib, json, pathlib, sys, unittest
from tests.integrations.sglang import cpu
sys.modules["datasets"] = cpu._Nothing("datasets")  # which SGLang's test utilities import for benchmarks
from sglang.srt.layers.attention.linear import replayssm
for name in sys.argv[3:]:
    assert importlib.import_module(name).__file__.startswith(sys.argv[1]), name
assert "replayssm.integrations.sglang.builtin" not in sys.modules
spec = importlib.util.spec_from_file_location("upstream_test", sys.argv[2])
module = importlib.util.module_from_spec(spec)
sys.modules["upstream_test"] = module
spec.loader.exec_module(module)
ran = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromModule(module))
assert ran.testsRun >= 8 and ran.wasSuccessful()

from replayssm.integrations.sglang import activate, builtin, settings
from sglang.srt.plugins.hook_registry import HookRegistry
before = dict(HookRegistry._hooks)
activate()
assert dict(HookRegistry._hooks) == before, "the plugin leaves a SGLang alone that calls us itself"
for hook in ("resolve", "size", "make_pool", "dispatch", "become", "commit", "accept", "donate", "show", "ReplaySSU"):
    assert callable(getattr(builtin, hook)), hook

from tests.integrations.sglang.test_arguments import OURS, QWEN, resolved
folder = pathlib.Path(sys.argv[1]).parent
(folder / "config.json").write_text(json.dumps(QWEN))
options = "--replayssm-window", "8", "--replayssm-checkpoint", "fp16"
assert resolved(folder, *OURS, *options) == ((True, False), {"window": 8, "checkpoint": "fp16"}, "float16")
for wrong, says in (
    ((*OURS, "--replayssm-window", "0"), "window: Input should be greater than or equal to 1"),
    ((*OURS, "--enable-linear-replayssm"), "SGLang's own ring"),
    (options, "--replayssm-window, --replayssm-checkpoint: expected --linear-attn-decode-backend replayssm"),
):
    try:
        resolved(folder, *wrong)
    except (ValueError, NotImplementedError) as error:
        assert says in str(error), error
    else:
        raise AssertionError(wrong)
"""


@pytest.mark.slow
def test_patched_package_works_without_plugin(patched, package):
    """All modules that were touched are imported from the patched package, and the test that it brings passes."""
    names = [f"sglang.{file.removesuffix('.py').replace('/', '.')}" for file in TOUCHED]
    (test,) = RECIPE.beside
    made.run(package, "-c", WORKS, str(package), str(patched / test), *names, SGLANG_PLUGINS="none")


SERVES = """
import importlib.util, pathlib, sys
assert importlib.util.find_spec("sglang").origin.startswith(sys.argv[1])
from tests.integrations.sglang.serving import serve
from tests.integrations.sglang.test_parity import OURS, WINDOW
from tests.integrations.sglang.test_stock import FEW_SLOTS, REQUESTS, expected

for folder in map(pathlib.Path, sys.argv[3:]):
    preset = folder.name.rstrip("0123456789")
    ours, seen = serve(folder, REQUESTS, *FEW_SLOTS, *OURS[preset], *WINDOW)
    assert [answer.tokens for answer in ours] == expected(preset), preset
    assert seen[0].folds >= 4, preset
    if preset == sys.argv[2]:
        off, seen = serve(folder, REQUESTS, *FEW_SLOTS)
        assert [answer.tokens for answer in off] == expected(preset) and not seen[0].folds, preset
"""


@pytest.mark.slow
def test_patched_package_serves_without_plugin(package, models):
    """SGLang's scheduler and model runner in the patched package: tokens as SGLang's own, with the backend chosen or not."""
    made.run(package, "-c", SERVES, str(package), "nemotron-h", *map(str, models.values()), SGLANG_PLUGINS="none")


@pytest.mark.slow
def test_vendored_package_serves(original, models, tmp_path):
    """The copy beside ReplaySSM itself, of which the test's own server is a part."""
    patched = made.commit("sglang", original, tmp_path, "--style", "vendor")
    copied = f"python/{MODULE.replace('.', '/')}_kernels/kernels/decode.py"
    assert copied in made.changed(patched)
    assert made.complaints(patched, patched, LINT) == made.complaints(original, patched, LINT)
    package = made.package(recipe("vendor"), patched, tmp_path)
    assert "replayssm_kernels.integrations.sglang.builtin" in (package / "srt/layers/attention/linear/replayssm.py").read_text()
    made.run(package, "-c", SERVES, str(package), "", str(models["nemotron-h"]), SGLANG_PLUGINS="none")
