"""`replayssm patch sglang` on the installed SGLang: the patch applies, is complete, is formatted, and what it touches works."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)
pytest.importorskip("libcst")
pytest.importorskip("typer")

from typer.testing import CliRunner

from replayssm.cli.app import app
from replayssm.integrations.sglang.upstream import DOCS, EDITS, MODULE, recipe

ROOT = Path(__file__).parents[3]
INSTALLED = Path(importlib.util.find_spec("sglang").origin).parent
PAGE = recipe("depend").sections[0].file
EVERY = [*EDITS, *(edit.otherwise for edit in EDITS if edit.otherwise)]
THERE = [edit for edit in EDITS if (INSTALLED / edit.file).is_file()]
THERE += [edit.otherwise for edit in EDITS if edit.otherwise and edit not in THERE]
TOUCHED = sorted({edit.file for edit in THERE})


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkout with the files that a patch touches."""
    root = tmp_path_factory.mktemp("checkout")
    for file in ("__init__.py", *TOUCHED):
        to = root / "python" / "sglang" / file
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / file, to)
    (root / PAGE).parent.mkdir(parents=True)
    (root / PAGE).write_text("---\ntitle: Attention\n---\nText.\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "all")
    return root


@pytest.fixture(scope="module")
def patched(original, tmp_path_factory):
    """The same with the patch applied by git."""
    out = tmp_path_factory.mktemp("patch") / "replayssm.patch"
    done = patch(original, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert git(original, "status", "--porcelain") == ""
    git(original, "apply", "--check", str(out))
    root = tmp_path_factory.mktemp("patched") / "checkout"
    shutil.copytree(original, root)
    git(root, "-c", "user.name=n", "-c", "user.email=e@x", "am", str(out))
    return root


def git(root, *args):
    return subprocess.run(["git", "-C", root, *args], check=True, capture_output=True, text=True).stdout


def patch(source, *args):
    return CliRunner().invoke(app, ["patch", "sglang", "--source", str(source), *args])


def test_commit(patched):
    assert git(patched, "log", "-1", "--format=%s").startswith("Add ReplaySSM decode backends")
    changed = set(git(patched, "diff", "--name-only", "HEAD~").split())
    new = {f"python/{MODULE.replace('.', '/')}.py", *recipe("depend").beside}
    assert changed == {f"python/sglang/{file}" for file in TOUCHED} | new | {PAGE}
    assert (patched / PAGE).read_text().endswith(f"Text.\n\n{DOCS}")
    removed = [line for line in git(patched, "diff", "HEAD~").splitlines() if line.startswith("-") and line[:3] != "---"]
    assert len(removed) == 2 and all("choices=" in line for line in removed)


def test_documentation_lists_every_file():
    text = (ROOT / "docs" / "patches.md").read_text()
    assert all(f"`{file}`" in text for file in (*(edit.file for edit in EVERY), *recipe("depend").files, PAGE))


def test_twice_changes_nothing(patched):
    done = patch(patched)
    assert done.exit_code == 0 and done.stdout == ""
    assert done.stderr.count(": already there: ") == len(THERE) + 3 and ": changed: " not in done.stderr


def test_check_prints_no_patch(original):
    done = patch(original, "--check")
    assert done.exit_code == 0 and done.stdout == "" and done.stderr.count(": changed: ") == len(THERE) + 1


def test_json(original):
    done = patch(original, "--json", "--check")
    found = json.loads(done.stdout)
    assert found["engine"] == "sglang" and found["version"] and found["patch"] is None
    assert {step["done"] for step in found["steps"]} and all(step["file"] and step["what"] for step in found["steps"])


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
        (("sglang", "--source", str(tmp_path)), "source: expected a checkout with python/sglang"),
        (("sglang", "--source", str(original), "--style", "copy"), "style: expected one of depend, vendor, got 'copy'"),
        (("sglang", "--source", str(original), "--style", "vendor"), "style: supported for sglang is depend, got 'vendor'"),
        (("other", "--source", str(original)), "engine: expected one of sglang, got 'other'"),
    ):
        done = CliRunner().invoke(app, ["patch", *args])
        assert done.exit_code == 2 and says in done.stderr


def test_formatter_changes_nothing_more(original, patched):
    """In 88 columns and with sorted imports, as SGLang: what a formatter would change is what it would have changed before."""
    files = [line for line in git(patched, "diff", "--name-only", "HEAD~").split() if line.endswith(".py")]

    def complaints(root):
        ruff = [sys.executable, "-m", "ruff"]
        here = [root / file for file in files if (root / file).exists()]
        formatted = subprocess.run([*ruff, "format", "--isolated", "--diff", *here], capture_output=True, text=True)
        options = ["--isolated", "--no-cache", "--select", "I", "--config", "lint.isort.known-first-party=['sglang']"]
        sorted_ = subprocess.run(
            [*ruff, "check", *options, "--output-format", "concise", *here], capture_output=True, text=True
        )
        assert formatted.returncode < 2 and sorted_.returncode < 2, formatted.stderr + sorted_.stderr
        changes = [line for line in formatted.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        return changes, [line.partition(": ")[2] for line in sorted_.stdout.splitlines() if ": I" in line]

    assert complaints(patched) == complaints(original)


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


@pytest.fixture(scope="module")
def package(patched, tmp_path_factory):
    """The installed package with the patched files in the place of its own; what Python is told to prefer it."""
    package = tmp_path_factory.mktemp("package") / "sglang"
    shutil.copytree(INSTALLED, package, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    for file in git(patched, "diff", "--name-only", "HEAD~").split():
        if file.startswith("python/"):
            to = package.parent / Path(file).relative_to("python")
            to.unlink(missing_ok=True)
            shutil.copy(patched / file, to)
    return package


def without_plugin(package, script, *args):
    """Runs the script with the patched package and no plugin."""
    search = os.pathsep.join(filter(None, (str(package.parent), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": search, "SGLANG_PLUGINS": "none", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script, str(package), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_patched_package_works_without_plugin(patched, package):
    """All modules that were touched are imported from the patched package, and the test that it brings passes."""
    names = [f"sglang.{file.removesuffix('.py').replace('/', '.')}" for file in TOUCHED]
    (test,) = recipe("depend").beside
    without_plugin(package, WORKS, patched / test, *names)


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
    without_plugin(package, SERVES, "nemotron-h", *models.values())
