"""A recipe applied to a source tree in memory: the changed files, their unified diff, and what each edit did."""

from __future__ import annotations

import difflib
import functools
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

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
        mark: a file of every checkout that a folder of installed packages does not have.
        message: of the commit, its subject first.
        edits: of the package's files; several of one file in order.
        files: new files of the package, path to text.
        beside: new files of a checkout outside the package; an installed package has no place for them.
        sections: texts for the checkout's documentation, likewise.
    """

    package: str
    distribution: str
    home: str
    mark: str
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
    """One line of the report: what is done in a file, or was found done, or has no place here or in this version."""

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
    inside = (PurePosixPath(recipe.home) / recipe.package).as_posix()
    if (path / recipe.mark).is_file() and (path / inside / "__init__.py").is_file():
        return Source(path, inside, True, _described(path))
    root = path.parent if path.name == recipe.package else path
    if (root / recipe.package / "__init__.py").is_file():
        return Source(root, recipe.package, False, _installed(root, recipe.distribution))
    raise ValueError(
        f"source: expected a checkout with {recipe.mark} and {inside} or a folder with {recipe.package}, got {path}"
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
    work = _Work(source, recipe.distribution)
    for edit in recipe.edits:
        work.edit(edit)
    added = {f"{source.package}/{name}": text for name, text in recipe.files.items()}
    for file, text in (added | dict(recipe.beside if source.checkout else {})).items():
        work.put(file, text, re.split(r"\n|(?<=\.) ", text.strip('"'))[0])
    for section in recipe.sections if source.checkout else ():
        work.extend(section)
    left_out = () if source.checkout else (*recipe.beside, *(section.file for section in recipe.sections))
    work.steps += [Step(file, "has its place in a checkout alone", "left out") for file in left_out]
    changed = {file: text for file, text in sorted(work.new.items()) if text != work.old(file)}
    for file, text in changed.items():
        if file.endswith(".py"):
            compile(text, file, "exec", dont_inherit=True)
    return Patch(changed, "".join(_diff(file, work.old(file), text) for file, text in changed.items()), tuple(work.steps))


class _Work:
    """The files so far, and what was done in them."""

    def __init__(self, source: Source, distribution: str) -> None:
        self.source, self.engine = source, f"{distribution} {source.version}"
        self.new: dict[str, str] = {}
        self.trees: dict[str, cst.Module] = {}
        self.steps: list[Step] = []
        self.old = functools.cache(self._read)

    def _read(self, file: str) -> str | None:
        path = self.source.root / file
        return path.read_bytes().decode() if path.is_file() else None

    def put(self, file: str, text: str, what: str) -> None:
        there = self.new.get(file, self.old(file))
        done = "already there" if text == there else "changed" if self.old(file) is not None else "added"
        self.new[file] = text
        self.steps.append(Step(file, what, done))

    def edit(self, edit: Edit) -> None:
        """The edit, or the one of a version that has no such file."""
        file = f"{self.source.package}/{edit.file}"
        text = self.old(file)
        if text is None and edit.otherwise is not None:
            self.edit(edit.otherwise)
        elif text is None and edit.optional:
            self.steps.append(Step(file, edit.what, "not in this version"))
        elif text is None:
            raise self._missing(file, f"anchor {edit.anchor}: no such file")
        else:
            try:
                self.trees[file] = edit(self.trees[file] if file in self.trees else cst.parse_module(text))
            except Missing as error:
                raise self._missing(file, f"anchor {error}") from None
            self.put(file, self.trees[file].code, edit.what)

    def extend(self, section: Section) -> None:
        text = self.old(section.file)
        if text is None:
            raise self._missing(section.file, f"anchor of the section {section.heading!r}: no such file")
        there = section.heading in text.splitlines()
        self.put(section.file, text if there else f"{text.rstrip()}\n\n{section.text}", section.what)

    def _missing(self, file: str, what: str) -> LookupError:
        return LookupError(f"{file}: {what} ({self.engine})")


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
