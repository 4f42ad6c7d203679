"""This package's own modules as a package inside an engine's: those that an entry imports, under new names."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec, resolve_name
from pathlib import Path, PurePosixPath

import libcst as cst
from libcst import matchers as m

OURS = __package__.rpartition(".")[0]
HEAD = """# SPDX-License-Identifier: Apache-2.0
# From ReplaySSM, where it is linted; made by `replayssm patch --style vendor`.
# ruff: noqa
"""
CALL = "    return importlib.import_module(PACKAGE)\n"


def placed(style: str, seam: str, entry: str, into: str, columns: int, data: Sequence[str] = ()) -> tuple[str, dict[str, str]]:
    """The text of the engine's file that imports PACKAGE, and the files of the package that comes with it.

    With style "depend" the package is ``entry``, which the file says how to install, and there are none; with "vendor" it is
    its copy in ``into`` (``vendored``).
    """
    if style == "depend":
        return seam, {}
    head, found, _ = seam.partition("    try:\n    " + CALL)
    assert found and f'"{entry}"' in head, seam
    copied = vendored(entry, into, columns, data)
    text = head.replace(f'"{entry}"', f'"{into}{entry[len(OURS) :]}"') + CALL
    engine, _, folder = into.partition(".")
    seam = _formatted({"seam.py": text}, columns, engine)["seam.py"]
    return seam, {f"{folder.replace('.', '/')}/{path}": one for path, one in copied.items()}


def vendored(entry: str, into: str, columns: int, data: Sequence[str] = ()) -> dict[str, str]:
    """Texts by path in the new package, whose dotted name is ``into``.

    Names of modules and of torch ops begin with ``into`` in the place of our name, so that both may be in one process.

    Args:
        entry: the module that the engine imports; with it all that it imports of ours.
        columns: of the engine's lines.
        data: further files, relative to this package.

    Raises:
        NotImplementedError: without ruff, which formats the copies; ModuleNotFoundError: there is no such entry.
    """
    if find_spec("ruff") is None:
        raise NotImplementedError("style vendor: expected ruff, which formats the copies, got none; pip install ruff")
    if _source(entry) is None:
        raise ModuleNotFoundError(f"entry: expected a module of {OURS}, got {entry}")
    modules = _closure(entry).values()
    texts = {path: HEAD + (_renamed(text, into) if OURS in text else text) for path, text in modules}
    texts = _formatted(texts, columns, into.partition(".")[0])
    return texts | {path: _file(PurePosixPath(path)).read_text() for path in data}


def _closure(entry: str) -> dict[str, tuple[str, str]]:
    """Path and text of each module, that of packages above them included."""
    found: dict[str, tuple[str, str]] = {}
    todo = [entry]
    while todo:
        name = todo.pop()
        if name in found or (source := _source(name)) is None:
            continue
        found[name] = source
        todo += [name.rpartition(".")[0], *_imports(name, *source)]
    return found


def _source(name: str) -> tuple[str, str] | None:
    """None of another package's module, and of a name that is none."""
    if name.partition(".")[0] != OURS:
        return None
    path = PurePosixPath(*name.split(".")[1:])
    for one in (path / "__init__.py", path.with_suffix(".py") if path.name else path / "__init__.py"):
        if (file := _file(one)).is_file():
            return str(one), file.read_text()
    return None


def _file(path: PurePosixPath) -> Traversable:
    """A file of this package; installed in place, its ``integrations`` lie in a folder of their own."""
    part = "integrations"
    if path.parts[0] == part:
        return resources.files(f"{OURS}.{part}").joinpath(*path.parts[1:])
    return resources.files(OURS).joinpath(*path.parts)


def _imports(name: str, path: str, text: str) -> Iterator[str]:
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{one.name}" for one in node.names)


def _renamed(text: str, into: str) -> str:
    return cst.parse_module(text).visit(_Renamed(into)).code


class _Renamed(cst.CSTTransformer):
    """Absolute imports of ours, and the namespace of torch ops."""

    def __init__(self, into: str) -> None:
        super().__init__()
        self.into, self.ops = into, into.replace(".", "_")

    def leave_ImportFrom(self, original: cst.ImportFrom, updated: cst.ImportFrom) -> cst.ImportFrom:
        if updated.relative or updated.module is None:
            return updated
        name = cst.Module([]).code_for_node(updated.module)
        if name.partition(".")[0] != OURS:
            return updated
        module = cst.parse_expression(self.into + name[len(OURS) :])
        return updated.with_changes(module=cst.ensure_type(module, cst.Attribute))

    def leave_Attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.Attribute:
        ops = m.Attribute(value=m.Attribute(value=m.Name("torch"), attr=m.Name("ops")), attr=m.Name(OURS))
        return updated.with_changes(attr=cst.Name(self.ops)) if m.matches(updated, ops) else updated

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        library = m.Call(func=m.Attribute(attr=m.Name("Library")), args=[m.Arg(m.SimpleString(f'"{OURS}"')), m.ZeroOrMore()])
        if not m.matches(updated, library):
            return updated
        first = updated.args[0].with_changes(value=cst.SimpleString(f'"{self.ops}"'))
        return updated.with_changes(args=[first, *updated.args[1:]])

    def leave_FormattedStringText(
        self, original: cst.FormattedStringText, updated: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        return updated.with_changes(value=updated.value.replace(f"{OURS}::", f"{self.ops}::"))


def _formatted(texts: dict[str, str], columns: int, engine: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_text(text)
        common = ["--isolated", "--no-cache", "--quiet", "--line-length", str(columns)]
        sort = ["--select", "I", "--fix", "--config", f"lint.isort.known-first-party=['{engine}']"]
        for command in (["check", *common, *sort], ["format", *common]):
            subprocess.run([sys.executable, "-m", "ruff", *command, folder], check=True)
        return {path: (Path(folder) / path).read_text() for path in texts}
