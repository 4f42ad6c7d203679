"""An engine's checkout made of its installed package, the commit of ``replayssm patch`` on it, and the package as patched."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from typer.testing import CliRunner

from replayssm.cli.app import app
from replayssm.patches.edits import Edit
from replayssm.patches.recipe import Recipe, Source, locate

ROOT = Path(__file__).parents[2]
AS_SOMEONE = ("-c", "user.name=n", "-c", "user.email=e@x")


def git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", root, *args], check=True, capture_output=True, text=True).stdout


def installed(recipe: Recipe) -> Path:
    """The installed package, which is not imported."""
    return Path(importlib.util.find_spec(recipe.package).origin).parent


def edits(recipe: Recipe, package: Path) -> list[Edit]:
    """Those that apply to this version."""

    def here(edit: Edit | None) -> Iterable[Edit]:
        while edit is not None and not (package / edit.file).is_file():
            edit = edit.otherwise
        return () if edit is None else (edit,)

    return [edit for one in recipe.edits for edit in here(one)]


def checkout(recipe: Recipe, root: Path) -> Path:
    """A repository with the files that a patch touches, as installed; of documentation a first line."""
    package = installed(recipe)
    for file in {"__init__.py", *(edit.file for edit in edits(recipe, package))}:
        to = root / recipe.home / recipe.package / file
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / file, to)
    for section in recipe.sections:
        (root / section.file).parent.mkdir(parents=True, exist_ok=True)
        (root / section.file).write_text("Text.\n")
    (root / recipe.mark).touch()
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, *AS_SOMEONE, "commit", "-qm", "all")
    return root


def patch(engine: str, source: Path, *args: str):
    """What the command does."""
    return CliRunner().invoke(app, ["patch", engine, "--source", str(source), *args])


def commit(engine: str, original: Path, root: Path, *args: str) -> Path:
    """A copy of the checkout with the patch as git takes it; the checkout stays as it is."""
    file = root / "replayssm.patch"
    done = patch(engine, original, "--out", str(file), *args)
    assert done.exit_code == 0, done.output
    assert git(original, "status", "--porcelain") == ""
    git(original, "apply", "--check", str(file))
    shutil.copytree(original, root / "patched")
    git(root / "patched", *AS_SOMEONE, "am", str(file))
    return root / "patched"


def changed(root: Path) -> list[str]:
    """Files of the last commit."""
    return git(root, "diff", "--name-only", "HEAD~").split()


def package(recipe: Recipe, patched: Path, root: Path) -> Path:
    """The installed package with the commit's files in the place of its own."""
    source: Source = locate(patched, recipe)
    ours = [Path(file).relative_to(source.package) for file in changed(patched) if file.startswith(f"{source.package}/")]
    _linked(installed(recipe), root / recipe.package, ours)
    for file in ours:
        to = root / recipe.package / file
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(patched / source.package / file, to)
    return root / recipe.package


def _linked(source: Path, to: Path, without: Iterable[Path]) -> None:
    """Links to what the source holds but some files, whose folders are real ones."""
    to.mkdir()
    for one in source.iterdir():
        below = [Path(*file.parts[1:]) for file in without if file.parts[0] == one.name]
        if below and one.is_dir():
            _linked(one, to / one.name, [file for file in below if file.parts])
        elif not below and one.name != "__pycache__":
            (to / one.name).symlink_to(one)


def run(package: Path, *command: str, **environment: str) -> None:
    """Runs Python where the package comes before the installed one; fails with all that it said."""
    search = os.pathsep.join(filter(None, (str(package.parent), str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=package.parent,
        env=os.environ | {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def complaints(root: Path, patched: Path, lint: Sequence[str], columns: int = 88) -> tuple[list[str], list[str]]:
    """What ruff would change in a checkout's files of the commit, and what else it says of them, wherever it is."""
    here = [str(root / file) for file in changed(patched) if file.endswith(".py") and (root / file).exists()]

    def ruff(*command: str) -> list[str]:
        options = ["--isolated", "--no-cache", "--line-length", str(columns)]
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *options, *here], capture_output=True, text=True)
        assert done.returncode < 2, done.stderr
        return done.stdout.splitlines()

    formatted = ruff("format", "--diff")
    linted = ruff("check", "--output-format", "concise", *lint)
    changes = [line for line in formatted if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    return changes, sorted(line.partition(": ")[2] for line in linted if ": " in line)
