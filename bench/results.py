"""The committed results: which files there are, and what is said of one that is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]
COMMITTED = Path(__file__).parent / "results/h200"
# What tells one row from another, as far as a file's rows have it.
IDENTITY = ("op", "family", "layer", "batch", "T", "W", "state", "read", "u", "count")
# Per file, without .json: what writes it.
COMMANDS = {
    "decode": "replayssm bench decode",
    "verify": "replayssm bench verify",
    "materialize": "replayssm bench materialize",
    "drift": "replayssm drift",
    "sglang": "replayssm bench sglang speed",
}


def load(folder: Path = COMMITTED) -> Results:
    """Per name of COMMANDS its file's ``{"header": ..., "rows": [...]}``, absent ones left out.

    Raises:
        ValueError: no folder, a file that is not JSON, or one without rows.
    """
    if not folder.is_dir():
        raise ValueError(f"results: expected a folder with {', '.join(f'{name}.json' for name in COMMANDS)}, got {folder}")
    found: Results = {}
    for name in COMMANDS:
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                found[name] = json.loads(path.read_text())
            except ValueError as failed:
                raise ValueError(f"results: expected JSON in {path}: {failed}") from None
            if not isinstance(found[name], dict) or "rows" not in found[name]:
                raise ValueError(f"results: expected an object with header and rows in {path}")
    return found


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row.get(name) for name in IDENTITY)


def kept(path: Path, machine: dict[str, Any]) -> dict[str, Any] | None:
    """What the file has, to be added to by a run on this machine (``timing.machine``); None where there is no file.

    Raises:
        ValueError: rows of another device, another software or another commit.
    """
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    head = found["header"]
    for name, value in machine.items():
        if name != "date" and head.get(name) != value:
            raise ValueError(f"keep: expected {name} {value!r} in {path}, as here, got {head.get(name)!r}")
    return found
