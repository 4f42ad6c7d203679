"""A recipe applied to a source tree in memory: the changed files, their unified diff, and what each edit did."""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import libcst as cst

from .edits import Edit, Missing

STYLES = ("depend", "vendor")


@dataclass(frozen=True)
class Section:
    """Text at the end of a file of the checkout, with a heading that tells whether it is there."""

    file: str
    heading: str
    text: str
    what: str


@dataclass(frozen=True)
class Recipe:
    """All changes of one engine.

    Attributes:
        package: the Python package; ``distribution``: its name on PyPI.
        home: the folder of a checkout that holds the package.
        message: of the commit, its subject first.
        edits: of the package's files; several of one file in order.
        files: new files of the package, path to text.
        beside: new files of a checkout outside the package; an installed package has no place for them.
        sections: texts for the checkout's documentation, likewise.
    """

    package: str
    distribution: str
    home: str
    message: str
    edits: tuple[Edit, ...]
    files: Mapping[str, str]
    beside: Mapping[str, str]
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Source:
    """A checkout, or a folder of installed packages.

    Attributes:
        root: what the diff's paths are relative to.
        package: the package's path in it.
        checkout: whether tests and documentation have a place.
        version: as found, for messages alone.
    """

    root: Path
    package: str
    checkout: bool
    version: str


@dataclass(frozen=True)
class Step:
    """One line of the report: what is done in a file, or was found done, or has no place here."""

    file: str
    what: str
    done: str


@dataclass(frozen=True)
class Patch:
    """Nothing of it is written: ``files`` are the new texts of the files that change, ``diff`` is "" where none does."""

    files: Mapping[str, str]
    diff: str
    steps: tuple[Step, ...]


def locate(path: Path, recipe: Recipe) -> Source:
    """The engine in a checkout, in a folder of installed packages, or as its package folder; ValueError without it."""
    path = path.resolve()
    if (path / recipe.home / recipe.package / "__init__.py").is_file():
        return Source(path, f"{recipe.home}/{recipe.package}", True, _described(path))
    root = path.parent if path.name == recipe.package else path
    if (root / recipe.package / "__init__.py").is_file():
        return Source(root, recipe.package, False, _installed(root, recipe.distribution))
    raise ValueError(
        f"source: expected a checkout with {recipe.home}/{recipe.package} or a folder with {recipe.package}, got {path}"
    )


def _installed(root: Path, distribution: str) -> str:
    found = metadata.distributions(name=distribution, path=[str(root)])
    return next((one.version for one in found), "of unknown version")


def _described(root: Path) -> str:
    command = ["git", "-C", str(root), "describe", "--tags", "--always"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "of unknown version"


def make(source: Source, recipe: Recipe) -> Patch:
    """The recipe's changes to the source; LookupError names an anchor that is missing, its file and the version."""
    new: dict[str, str] = {}
    old: dict[str, str | None] = {}
    trees: dict[str, cst.Module] = {}
    steps: list[Step] = []

    def put(file: str, text: str, what: str) -> None:
        done = "already there" if text == new[file] else "changed" if old[file] is not None else "added"
        new[file] = text
        steps.append(Step(file, what, done))

    def read(file: str) -> str | None:
        if file not in new:
            path = source.root / file
            old[file] = path.read_bytes().decode() if path.is_file() else None
            new[file] = old[file] or ""
        return old[file]

    def missing(file: str, what: str) -> LookupError:
        return LookupError(f"{file}: {what} ({recipe.distribution} {source.version})")

    for edit in recipe.edits:
        file = f"{source.package}/{edit.file}"
        if read(file) is None:
            raise missing(file, f"anchor {edit.anchor}: no such file")
        try:
            trees[file] = edit(trees[file] if file in trees else cst.parse_module(new[file]))
            put(file, trees[file].code, edit.what)
        except Missing as error:
            raise missing(file, f"anchor {error}") from None
    added = {f"{source.package}/{name}": text for name, text in recipe.files.items()}
    for file, text in (added | dict(recipe.beside if source.checkout else {})).items():
        read(file)
        put(file, text, re.split(r"\n|(?<=\.) ", text.strip('"'))[0])
    for section in recipe.sections if source.checkout else ():
        if read(section.file) is None:
            raise missing(section.file, f"anchor of the section {section.heading!r}: no such file")
        there = section.heading in new[section.file].splitlines()
        put(section.file, new[section.file] if there else f"{new[section.file].rstrip()}\n\n{section.text}", section.what)
    if not source.checkout:
        left_out = [*recipe.beside, *(section.file for section in recipe.sections)]
        steps += [Step(file, "has its place in a checkout alone", "left out") for file in left_out]
    for file, text in new.items():
        if file.endswith(".py"):
            compile(text, file, "exec", dont_inherit=True)
    changed = {file: text for file, text in sorted(new.items()) if text != old[file]}
    return Patch(changed, "".join(_diff(file, old[file], text) for file, text in changed.items()), tuple(steps))


def _diff(file: str, old: str | None, new: str) -> str:
    """As git writes it."""
    head = f"diff --git a/{file} b/{file}\n" + ("new file mode 100644\n" if old is None else "")
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (old or "", new))  # of no other line break
    lines = difflib.unified_diff(before, after, "/dev/null" if old is None else f"a/{file}", f"b/{file}")
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def mail(patch: Patch, recipe: Recipe, source: Source) -> str:
    """The patch as ``git apply`` takes it and, where git knows who is at work, ``git am``."""
    told = subprocess.run(
        ["git", "-C", str(source.root), "var", "GIT_AUTHOR_IDENT"], capture_output=True, text=True, check=False
    )
    author = told.stdout.rpartition(">")[0]
    subject, _, body = recipe.message.partition("\n")
    head = f"From: {author}>\n" if author else ""
    return f"{head}Subject: [PATCH] {subject}\n\n{body.strip()}\n\n---\n{patch.diff}"
