"""What formats of the state cost and err by: the table of "Which format to choose" in docs/precision.md.

Bytes are the layout's, errors those of results/cpu/scales.json, or half a spacing where a plain 16-bit format is read; times
those of results/h200/decode.json, where it has some.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from replayssm import Layout
from replayssm.formats import named
from replayssm.models import find

from .tables import Row, best, group, table

SCALES, HELPER = (Path(__file__).parent / "results" / name for name in ("cpu/scales.json", "h200/u_precision.json"))
MODELS = {"gdn": "Qwen3.5-4B", "kda": "Kimi-Linear-48B-A3B", "mamba2": "Nemotron-3-Nano-30B-A3B"}
WINDOW = 16
BATCH = 256  # requests of the steps whose times are shown
FORMATS: tuple[tuple[str, str | None], ...] = (
    ("fp32", None), ("bf16", None), ("fp32", "int8"), ("fp32", "e4m3"), ("fp32", "nvfp4"), ("fp16+sr", None),
    ("fp16+sr", "int8"), ("fp16+sr", "nvfp4"), ("e4m3+sr", None), ("e4m3+sr", "nvfp4"), ("nvfp4", None),
)  # fmt: skip


def committed(file: Path) -> list[Row]:
    """A committed file's rows."""
    return json.loads(file.read_text())["rows"]


def layout(name: str, state: str, read: str | None) -> Layout:
    """A served model's layer in these formats."""
    model = find(name)
    return Layout(model.recurrence, model.H, model.G, model.V, model.K, W=WINDOW, state=state, read=read)


def readout_error(state: str, read: str | None) -> str:
    """Relative error of outputs read from a state in these formats: means over families and channels, or a bound."""
    one = named(read or state, "read" if read else "state")
    if one.name == "fp32":
        return "0"
    if one.block is None:
        return f"at most {2.0 ** -(one.mbits + (0 if one.stochastic else 1)):.1e} a value"
    rows = committed(SCALES)
    errors = [row["output_error"] for row in rows if (row["format"], row["axis"], row["block"]) == (one.name, "K", one.block)]
    return f"{math.exp(sum(map(math.log, errors)) / len(errors)):.1e}" if errors else "not measured"


def speed_ups(rows: Sequence[Row]) -> dict[tuple[str, str | None], str]:
    """Per (state, read) that was measured: how many times it the best conventional fp32 step takes, by family, at best."""
    found: dict[tuple[str, str | None], dict[str, float]] = {}
    for (state, read, family), of in group(rows, "state", "read", "family").items():
        ratios = [peer[1] / row["us"] for row in of if (peer := best(row, False)) and row["batch"] == BATCH]
        if ratios:
            found.setdefault((state, read), {})[family] = max(ratios)
    return {
        formats: " / ".join(f"{of[family]:.1f}" if family in of else "-" for family in MODELS) for formats, of in found.items()
    }


def advice(decoded: Sequence[Row]) -> str:
    """The table, Markdown; with a column of times where ``decoded``, rows of decode.json, has some of formats but fp32."""
    measured = speed_ups(decoded)
    timed = any(formats in measured for formats in FORMATS[1:])
    exact = {family: layout(name, "fp32", None) for family, name in MODELS.items()}
    lines = []
    for state, read in FORMATS:
        of = {family: layout(name, state, read) for family, name in MODELS.items()}
        held = (f"{of[family].slot_bytes / exact[family].state_bytes:.2f}" for family in MODELS)
        moved = (of[family].step_bytes().replay.total / exact[family].step_bytes().conventional.total for family in MODELS)
        rounded = "yes, without bias" if named(state).stochastic else "no" if state == "fp32" else "yes, to nearest"
        shares = (" / ".join(held), " / ".join(f"{x:.2f}" for x in moved))
        times = (measured.get((state, read), "-"),) if timed else ()
        lines.append((state, read or "-", *shares, *times, readout_error(state, read), rounded))
    column = (f"times as fast, {BATCH} requests",) if timed else ()
    return table(("state", "read", "bytes held", "bytes a step", *column, "error of readouts", "state rounded by folds"), lines)
