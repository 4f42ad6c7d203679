"""A function that hands its call to another one where an argument names that backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import libcst as cst
from libcst import matchers as m

from .edits import Missing, code, expect, extended, statements

ARGUMENT = "backend"


def dispatched(value: str, to: str, takes: Collection[str], doc: str) -> Callable[[cst.FunctionDef], cst.FunctionDef]:
    """Let ``backend=value`` return what ``to`` returns for the other arguments, by name.

    A function without the argument gets it, with "auto" as default and the one other value; in an annotation with Literal
    the value is added.

    Args:
        to: an expression, called with the arguments.
        takes: the arguments that it knows; Missing names one that it does not.
        doc: what the function's docstring says of the value.
    """

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        expect(node, cst.FunctionDef)
        lists = node.params
        parameters = [*lists.posonly_params, *lists.params, *lists.kwonly_params]
        names = [one.name.value for one in parameters if one.name.value != ARGUMENT]
        unknown = [name for name in names if name not in takes]
        if unknown:
            raise Missing(
                f"{node.name.value}: expected the parameters {', '.join(sorted(takes))}, got {', '.join(unknown)} too"
            )
        had = ARGUMENT in [one.name.value for one in parameters]
        branch = _branch(value, to, names, alone=not had)
        if any(code(one).startswith(f'if {ARGUMENT} == "{value}":') for one in node.body.body):
            return node
        at = int(node.get_docstring() is not None)
        body = [*node.body.body[:at], *branch, *node.body.body[at:]]
        if at:
            body[0] = _documented(body[0], value, doc)
        changed = node.with_changes(params=_with_literal(lists, value) if had else _with_argument(lists))
        return changed.with_deep_changes(changed.body, body=body)

    return change


def _branch(value: str, to: str, names: list[str], alone: bool) -> list[Any]:
    arguments = "".join(f"        {name}={name},\n" for name in names)
    text = f'if {ARGUMENT} == "{value}":\n    return {to}(\n{arguments}    )\n'
    if alone:
        text += f'if {ARGUMENT} != "auto":\n    raise ValueError(f"Unknown backend: {{{ARGUMENT}}}")\n'
    return statements(text)


def _with_argument(lists: cst.Parameters) -> cst.Parameters:
    """A last argument, by keyword where some are by keyword alone."""
    new = statements(f'def f({ARGUMENT}: str = "auto"): ...')[0].params.params[0]
    which = "kwonly_params" if lists.kwonly_params else "params"
    star = [lists.star_arg.comma] if isinstance(lists.star_arg, cst.ParamStar) else []
    return lists.with_changes(**{which: extended(getattr(lists, which), new, *star)})


def _with_literal(lists: cst.Parameters, value: str) -> cst.Parameters:
    (parameter,) = m.findall(lists, m.Param(name=m.Name(ARGUMENT)))
    for literal in m.findall(parameter, m.Subscript(value=m.Name("Literal"))):
        element = cst.SubscriptElement(cst.Index(cst.SimpleString(f'"{value}"')))
        values = extended(cst.ensure_type(literal, cst.Subscript).slice, element)
        lists = cst.ensure_type(lists.deep_replace(literal, literal.with_changes(slice=values)), cst.Parameters)
    return lists


# ---- the docstring -----------------------------------------------------------------------------------------------------


def _documented(line: Any, value: str, doc: str) -> Any:
    """Beside what is said of the argument; else as the last parameter; else as a paragraph at the end."""
    old = line.body[0].value
    lines = old.value.split("\n")
    head = next((i for i, one in enumerate(lines) if re.match(rf"\s*{ARGUMENT}\s*:", one)), None)
    sections = [i - 1 for i, one in enumerate(lines) if i and re.fullmatch(r"\s*-+", one)]
    first = next((k for k, i in enumerate(sections) if lines[i].strip() == "Parameters"), None)
    margin = " " * min((_indent(one) for one in lines[1:] if one.strip()), default=0)
    said = [f'``"{value}"`` {doc[0]}', *doc[1:]]
    if head is not None:
        at = _end(lines, head)
        inner = " " * max(_indent(lines[head]) + 4, _indent(lines[at - 1]))
        new = [inner + one for one in said]
    elif first is not None:
        after = sections[first + 1] if first + 1 < len(sections) else len(lines) - 1
        at = after - next(k for k in range(after) if lines[after - 1 - k].strip())
        new = [
            f"{margin}{ARGUMENT} : str",
            f'{margin}    Backend to use: "auto" or "{value}".',
            *(f"{margin}    {one}" for one in said),
        ]
    else:
        at = len(lines) - 1
        new = ["", *(margin + one for one in said)]
    text = "\n".join([*lines[:at], *new, *lines[at:]])
    return line.deep_replace(old, old.with_changes(value=text))


def _end(lines: list[str], head: int) -> int:
    """Behind the last line that is indented deeper than an entry's first."""
    deeper = head + 1
    for i in range(head + 1, len(lines)):
        if lines[i].strip() and _indent(lines[i]) <= _indent(lines[head]):
            break
        deeper = i + 1 if lines[i].strip() else deeper
    return deeper


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
