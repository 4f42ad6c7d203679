"""docs/parity.md from the committed results of ``replayssm parity``: a matrix per machine and number format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from replayssm.parity import within

from .tables import Row, group, header, table

PAGE, FILES = "parity.md", "parity*.json"
BEGIN, END = "<!-- report: parity -->", "<!-- report: end -->"
BARE = f"# Parity\n\n{BEGIN}\n{END}\n"


def load(folder: Path) -> dict[str, Row]:
    """Per machine's folder the ``{"header": ..., "rows": [...]}`` of its files together.

    Raises:
        ValueError: a file that is none, or files of one folder that differ in more than their date.
    """
    found: dict[str, Row] = {}
    for path in sorted(folder.glob(f"*/{FILES}")):
        try:
            one = json.loads(path.read_text())
        except ValueError as failed:
            raise ValueError(f"results: expected JSON in {path}: {failed}") from None
        if not isinstance(one, dict) or "rows" not in one:
            raise ValueError(f"results: expected an object with header and rows in {path}")
        whole = found.setdefault(path.parent.name, {"header": one["header"], "rows": []})
        if one["header"] | {"date": 0} != whole["header"] | {"date": 0}:
            raise ValueError(f"results: expected {whole['header']} in {path} as in the files beside it, got {one['header']}")
        whole["rows"] += one["rows"]
    return found


def fill(page: str, found: dict[str, Row]) -> str:
    """The page with all matrices between its markers; ValueError where it has none."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{PAGE}: expected one pair of markers {BEGIN} and {END}")
    text = "\n\n".join(_machine(name, one) for name, one in found.items()) or "*Not run yet: `replayssm parity` writes it.*"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page)


def _machine(name: str, found: Row) -> str:
    rows = found["rows"]
    ours = [row for row in rows if not row["native"] and "absent" not in row]
    summary = (
        f"{len(ours)} results of ours, {sum(not within(row) for row in ours)} beyond their bounds; "
        f"{sum(row['tokens'] for row in ours)} greedy tokens, {sum(row['tokens_differing'] for row in ours)} differ."
    )
    head = found["header"]
    sizes = "served models' heads and dimensions" if head.get("served") else "small heads and dimensions"
    about = f"Window {head.get('window')}, layers {head.get('layers')}, {sizes}."
    parts = [f"### {name}", header(head, "replayssm parity"), f"{about} {summary}"]
    for (act, state, read), some in group(rows, "act", "state", "read").items():
        formats = f"activations {act}, state {state}" + (f", read {read}" if read else "")
        alone = [row for row in some if row["scenario"] != "migration"]
        for native, whose in ((False, "ours"), (True, "native kernels")):
            parts += [f"#### {whose.capitalize()}, {formats}", *_matrix([row for row in alone if row["native"] == native])]
        parts += _migrations([row for row in some if row["scenario"] == "migration"], formats)
    return "\n\n".join(parts)


def _matrix(rows: Sequence[Row]) -> list[str]:
    """Family and scenario by implementation."""
    if not rows:
        return ["*None run.*"]
    reasons: dict[str, str] = {}
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = []
    for (family, scenario), some in group(rows, "family", "scenario").items():
        cells = {row["implementation"]: _cell(row, reasons) for row in some}
        if any(not cell.startswith("[") for cell in cells.values()):
            bound = f"{some[0]['output_bound']:.0e} / {some[0]['state_bound']:.0e}"
            lines.append((f"{family}, {scenario}", bound, *(cells.get(name, "") for name in names)))
    return [table(("", "bound", *names), lines), *_notes(reasons)]


def _migrations(rows: Sequence[Row], formats: str) -> list[str]:
    """From and to by family, of those pairs that ran."""
    ran = [row for row in rows if "absent" not in row]
    if not ran:
        return []
    families = list(dict.fromkeys(row["family"] for row in ran))
    lines = []
    for (one, other), some in group(ran, "implementation", "to").items():
        cells = {row["family"]: _cell(row, {}) for row in some}
        lines.append((f"{one} → {other}", *(cells.get(family, "") for family in families)))
    return [f"#### Migrations, {formats}", table(("", *families), lines)]


def _cell(row: Row, reasons: dict[str, str]) -> str:
    if "absent" in row:
        return f"[{reasons.setdefault(row['absent'], chr(ord('a') + len(reasons)))}]"
    state = "-" if row["state_error"] is None else f"{row['state_error']:.0e}"
    text = f"{row['output_error']:.0e} / {state}"
    if "lossless_error" in row:
        text += f"; {row['lossless_error']:.0e}"
    if row["tokens_differing"]:
        text += f"; {row['tokens_differing']} tokens"
    return text if within(row) else f"**{text}**"


def _notes(reasons: dict[str, str]) -> Iterable[str]:
    if reasons:
        yield "\n".join(f"- [{letter}] not available: {reason}" for reason, letter in reasons.items())
