"""Are two folders of results the same? Shares of the byte floor, row by row.

usage: python -m bench.compare BEFORE AFTER [--tolerance 0.05]

A share is floor over time, each by the read ceiling of its own run, so that a faster memory alone changes nothing. Prints a
table in Markdown. Exit code 1 where a share fell by more than the tolerance, a file or row of BEFORE is missing, or a
contestant of BEFORE is absent; 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm.bench.results import COMMANDS, load

KEY = ("op", "layer", "batch", "T", "state", "read", "u", "count")


@dataclass(frozen=True)
class Line:
    """One row of both; ``after`` is None where it is missing.

    Attributes:
        before, after: shares of the floor.
        lost: peers that were timed before alone.
    """

    name: str
    before: float
    after: float | None
    lost: tuple[str, ...] = ()

    def worse(self, tolerance: float) -> bool:
        """Whether it fell by more than the tolerance, or is not there."""
        return self.after is None or bool(self.lost) or self.after < self.before * (1 - tolerance)


def compare(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Line]:
    """Every row of ``before`` that has a floor, beside that of ``after``; both as ``results.load`` returns them."""
    for file in COMMANDS:
        names = KEY if file == "verify" else (*KEY, "W")  # verify has the row of the window that was fastest
        there = {_key(row, names): row for row in after.get(file, {"rows": []})["rows"]}
        for row in before.get(file, {"rows": []})["rows"]:
            if "floor_us" in row:
                other = there.get(_key(row, names))
                lost = set(row.get("peers", {})) - set(other.get("peers", {})) if other else ()
                name = " ".join((file, *(f"{key} {row[key]}" for key in names if row.get(key) is not None)))
                yield Line(name, _share(row), other and _share(other), tuple(sorted(lost)))


def table(lines: list[Line], tolerance: float) -> str:
    """The lines in Markdown, those that are worse marked."""
    rows = ["| row | share before | share after | |", "|---|---:|---:|---|"]
    for line in lines:
        after = "missing" if line.after is None else f"{line.after:.2f}"
        why = f"worse{': no ' + ', '.join(line.lost) if line.lost else ''}" if line.worse(tolerance) else ""
        rows.append(f"| {line.name} | {line.before:.2f} | {after} | {why} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, help="part of a share that it may fall by")
    given = parser.parse_args(arguments)
    try:
        lines = list(compare(load(given.before), load(given.after)))
        if not lines:
            raise ValueError(f"before: expected rows with a floor in {given.before}, got none")
    except ValueError as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 2
    print(table(lines, given.tolerance))
    return 1 if any(line.worse(given.tolerance) for line in lines) else 0


def _key(row: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in names)


def _share(row: dict[str, Any]) -> float:
    return row["floor_us"] / row["us"]


if __name__ == "__main__":
    sys.exit(main())
