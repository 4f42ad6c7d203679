"""Edits of one Python file's syntax tree, each anchored on a dotted name; an edit that is there already changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import matchers as m

EMPTY = cst.Module([])
BETWEEN = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


class Missing(LookupError):
    """The anchor of an edit is not in the source; its argument says which."""


@dataclass(frozen=True)
class Edit:
    """One change of one file.

    Attributes:
        file: relative to the engine's package.
        anchor: dotted name of a class, function or assignment in it.
        what: a sentence for the report.
        change: the anchor's node to its new one, or to the same where nothing is to do; raises Missing.
        imports: ``from module import name`` lines that the change needs.
        otherwise: the edit in its stead where the file is not there, as in another version of the engine.
        optional: whether a version without the file needs no edit.
    """

    file: str
    anchor: str
    what: str
    change: Callable[[Any], Any]
    imports: tuple[str, ...] = ()
    otherwise: Edit | None = None
    optional: bool = False

    def __call__(self, tree: cst.Module) -> cst.Module:
        """The module with the change; Missing without exactly one anchor."""
        search = _Search(self.anchor.split("."), self.change)
        changed = tree.visit(search)
        if search.found != 1:
            raise Missing(f"{self.anchor}: expected one definition, got {search.found}")
        for line in self.imports:
            changed = _import(changed, line)
        return changed


class _Search(cst.CSTTransformer):
    """Goes down a dotted name's path and nowhere else."""

    def __init__(self, path: list[str], change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.path, self.change, self.found = path, change, 0
        self.inside: list[cst.CSTNode] = []  # as much of the path

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Module | cst.IndentedBlock | cst.SimpleStatementLine):
            return True
        if _name(node) != self.path[len(self.inside)]:
            return False
        self.inside.append(node)
        return len(self.inside) < len(self.path)

    def on_leave(self, original: Any, updated: Any) -> Any:
        if not self.inside or self.inside[-1] is not original:
            return updated
        anchor = len(self.inside) == len(self.path)
        self.inside.pop()
        self.found += anchor
        return self.change(updated) if anchor else updated


def _name(node: cst.CSTNode) -> str | None:
    match node:
        case cst.ClassDef() | cst.FunctionDef():
            return node.name.value
        case cst.AnnAssign(target=cst.Name(value=name)) | cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
            return name
    return None


def code(node: cst.CSTNode) -> str:
    """A node's source."""
    return EMPTY.code_for_node(node).strip()


def expect(node: cst.CSTNode | None, *kinds: type[cst.CSTNode]) -> None:
    if not isinstance(node, kinds):
        raise Missing(f"{' or '.join(kind.__name__ for kind in kinds)}: expected, got {node and code(node)}")


# ---- changes -----------------------------------------------------------------------------------------------------------


def fields(text: str) -> Callable[[cst.ClassDef], cst.ClassDef]:
    """Add the text's assignments behind the last one of a class, those whose names it does not have."""

    def change(node: cst.ClassDef) -> cst.ClassDef:
        expect(node, cst.ClassDef)
        old = list(node.body.body)
        has = {_name(one.body[0]): i for i, one in enumerate(old) if isinstance(one, cst.SimpleStatementLine)}
        new = [one for one in statements(text) if _name(one.body[0]) not in has]
        at = 1 + max((i for name, i in has.items() if name), default=len(old) - 1)
        return node.with_deep_changes(node.body, body=[*old[:at], *new, *old[at:]]) if new else node

    return change


def choice(value: str) -> Callable[[cst.AnnAssign], cst.AnnAssign]:
    """Add a value to the ``choices=`` of a field's annotation."""

    def change(node: cst.AnnAssign) -> cst.AnnAssign:
        expect(node, cst.AnnAssign)
        found = m.findall(node.annotation, m.Arg(keyword=m.Name("choices")))
        if len(found) != 1:
            raise Missing(f"choices= of {code(node.target)}: expected one, got {len(found)}")
        old = cst.ensure_type(found[0], cst.Arg).value
        if any(cst.ensure_type(one, cst.SimpleString).evaluated_value == value for one in m.findall(old, m.SimpleString())):
            return node
        return node.with_changes(annotation=node.annotation.deep_replace(old, _with_choice(old, value)))

    return change


def _with_choice(old: cst.BaseExpression, value: str) -> cst.BaseExpression:
    element = cst.Element(cst.SimpleString(f'"{value}"'))
    if isinstance(old, cst.BinaryOperation) and isinstance(old.right, cst.List):
        return old.with_changes(right=_with_choice(old.right, value))
    if not isinstance(old, cst.List):
        return cst.BinaryOperation(old, cst.Add(), cst.List([element]))
    return old.with_changes(elements=extended(old.elements, element))


def entry(key: str, value: str) -> Callable[[cst.AnnAssign | cst.Assign], cst.AnnAssign | cst.Assign]:
    """Add an item to the dictionary that is assigned."""

    def change(node: Any) -> Any:
        expect(node, cst.Assign, cst.AnnAssign)
        expect(node.value, cst.Dict)
        if any(m.matches(one, m.DictElement(key=m.SimpleString(f'"{key}"'))) for one in node.value.elements):
            return node
        element = cst.DictElement(cst.SimpleString(f'"{key}"'), cst.parse_expression(value))
        return node.with_deep_changes(node.value, elements=extended(node.value.elements, element))

    return change


def extended(elements: Any, new: Any, between: cst.Comma = BETWEEN) -> list[Any]:
    """With one more element, which ends and is set off as those before it are; ``between``: behind one that is alone."""
    if not elements:
        return [new]
    *others, last = elements
    return [*others, last.with_changes(comma=others[-1].comma if others else between), new.with_changes(comma=last.comma)]


def decorated(expression: str) -> Callable[[cst.FunctionDef], cst.FunctionDef]:
    """Add a decorator, innermost."""

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        expect(node, cst.FunctionDef)
        if any(code(one.decorator) == expression for one in node.decorators):
            return node
        return node.with_changes(decorators=[*node.decorators, cst.Decorator(cst.parse_expression(expression))])

    return change


def statement(text: str, first: bool = False) -> Callable[[cst.FunctionDef], cst.FunctionDef]:
    """Add a statement at the end of a function, or before its first one; a docstring stays in front."""

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        expect(node, cst.FunctionDef)
        old = node.body.body
        if any(code(one) == text for one in old):
            return node
        at = len(old) if not first else int(node.get_docstring() is not None)
        return node.with_deep_changes(node.body, body=[*old[:at], *statements(text), *old[at:]])

    return change


def statements(text: str) -> list[Any]:
    return list(cst.parse_module(text).body)


# ---- imports -----------------------------------------------------------------------------------------------------------


def _import(tree: cst.Module, line: str) -> cst.Module:
    """Where isort puts it, among the imports of the same package, those from "." as one."""
    module = line.split()[1]
    body = list(tree.body)
    if any(code(one) == line for one in body):
        return tree
    new = statements(line)[0]
    top = next((i for i, one in enumerate(body) if isinstance(one, cst.ClassDef | cst.FunctionDef)), len(body))
    of = {i: name for i, one in enumerate(body[:top]) if (name := _module(one)) is not None}
    ours = [i for i, name in of.items() if name.split(".")[0] == module.split(".")[0]]
    before = [i for i in ours if of[i] <= module]
    if before:
        at = before[-1] + 1
    elif ours:
        at = ours[0]
        new = new.with_changes(leading_lines=body[at].leading_lines)
        body[at] = body[at].with_changes(leading_lines=[])
    else:
        at = max((i for i, one in enumerate(body[:top]) if m.matches(one, IMPORT)), default=-1) + 1
        new = new.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return tree.with_changes(body=[*body[:at], new, *body[at:]])


IMPORT = m.SimpleStatementLine(body=[m.Import() | m.ImportFrom()])


def _module(node: cst.CSTNode) -> str | None:
    """Of a ``from`` import, its dots included."""
    if not m.matches(node, m.SimpleStatementLine(body=[m.ImportFrom()])):
        return None
    source = node.body[0]  # type: ignore[attr-defined]
    return "." * len(source.relative) + (code(source.module) if source.module else "")
