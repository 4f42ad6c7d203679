"""The documents: a site without broken links, figures that are drawn, commands that exist, and results that can be compared."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from replayssm.bench import compare, results

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "integrations").glob("*/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its code, whose brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def test_site_is_built(tmp_path):
    """Strict: every link and anchor between pages, and every page in the navigation."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {page.stem for page in tmp_path.glob("*.html")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_repository(page):
    for link in LINK.findall(prose(page)):
        if not link.startswith(("http", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_tests_that_are_named_exist():
    every: dict[str, str] = {}
    for path in (*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "integrations").rglob("test_*.py")):
        every[path.name] = every.get(path.name, "") + path.read_text()
    for page in PAGES:
        for file, _, name in re.findall(r"\b(test_\w+\.py)(::(test_\w+))?", page.read_text()):
            assert file in every, f"{page.name}: {file}"
            assert f"def {name}(" in every[file] or not name, f"{page.name}: {file}::{name}"


def test_architecture_lists_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "core").iterdir():
        if path.name[0] not in "._" and (path.is_dir() or path.suffix == ".py"):
            assert f"`{path.name}{'/' * path.is_dir()}`" in text, path.name


def test_workflows_run_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                ran |= set(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    assert ran == targets - {".venv"}


def test_drawn_figures_are_svg():
    for name in ("ring", "modules"):
        assert ElementTree.parse(ROOT / "docs" / "figures" / f"{name}.svg").getroot().tag.endswith("svg")


def test_commands_exist():
    pytest.importorskip("typer")
    from replayssm.cli.app import app

    known = {one.name or one.callback.__name__ for one in app.registered_commands} | {one.name for one in app.registered_groups}
    for page in PAGES:
        for name in re.findall(r"^(?:\.venv/bin/)?replayssm ([a-z]+)|`replayssm ([a-z]+)", page.read_text(), re.MULTILINE):
            assert "".join(name) in known, f"{page.name}: replayssm {''.join(name)}"


def test_results_are_the_same_as_themselves(capsys):
    assert compare.main([str(results.COMMITTED)] * 2) == 0
    table = capsys.readouterr().out
    assert "worse" not in table and "| decode layer Qwen3.5-4B batch 256 T 1 state fp32 u float16 W 16 | " in table


def test_results_that_are_worse():
    before = results.load()
    after = copy.deepcopy(before)
    slower, fewer, _, gone = after["decode"]["rows"][:4]
    slower["us"] *= 1.1
    fewer["peers"].popitem()
    after["decode"]["rows"].remove(gone)
    after["verify"]["rows"][0]["us"] *= 1.04  # within the tolerance
    del after["verify"]["rows"][1]["peers"]
    lines = list(compare.compare(before, after))
    worse = [i for i, line in enumerate(lines) if line.worse(0.05)]
    decoded = len(before["decode"]["rows"])
    assert worse == [0, 1, 3, decoded + 1]
    assert lines[3].after is None and len(lines[1].lost) == 1
    assert compare.table(lines, 0.05).count("worse") == 4


def test_folders_that_cannot_be_compared(tmp_path, capsys):
    assert compare.main([str(tmp_path / "none"), str(tmp_path)]) == 2
    assert compare.main([str(tmp_path), str(tmp_path)]) == 2
    assert "bench.compare: before: expected rows" in capsys.readouterr().err
