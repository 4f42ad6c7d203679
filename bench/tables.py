"""Committed results as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from replayssm.recurrence import FAMILIES as RECURRENCES

from .peers import replays
from .sglang.modes import MODES, NATIVE, OURS, STOCK

FAMILIES = {"gdn": "Gated DeltaNet", "kda": "KDA", "mamba2": "Mamba-2"}
PEERS = ("best conventional / ours", "best replaying / ours")
Row = dict[str, Any]


def group(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Rows by the values of these keys, in their order."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def best(row: Row, replaying: bool) -> tuple[str, float] | None:
    """(name, microseconds) of a row's fastest peer that writes the state every step, or of the fastest that does not."""
    peers = {name: us for name, us in row.get("peers", {}).items() if replays(name) == replaying}
    return min(peers.items(), key=lambda peer: peer[1]) if peers else None


def exact(rows: Sequence[Row]) -> list[Row]:
    """Of fp32 states without a read copy, each at its fastest window."""
    return _fastest([row for row in rows if _is_exact(row)])


def beside_formats(rows: Sequence[Row]) -> list[Row]:
    """Of the layers and batches that were measured in other formats too, all formats, each at its fastest window."""
    several = [of for of in group(rows, "layer", "batch").values() if not all(map(_is_exact, of))]
    return [row for of in several for row in _fastest(of)]


def _is_exact(row: Row) -> bool:
    return (row["state"], row["read"]) == ("fp32", None)


def _fastest(rows: Sequence[Row]) -> list[Row]:
    same = ("layer", "family", "batch", "state", "read", "u")
    return [min(of, key=lambda row: row["us"]) for of in group(rows, *same).values()]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are aligned right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def header(head: Row, command: str) -> str:
    """Where, when and by what a file's rows were measured."""
    commit = f", commit {head['commit'][:12]}" if head.get("commit") else ""
    ceiling = f"; read ceiling {head['read_ceiling'] / 1e12:.2f} TB/s" if head.get("read_ceiling") else ""
    about = ", ".join(
        f"{name}{head[key]}"
        for key, name in (("device", ""), ("date", ""), ("driver", "driver "), ("torch", "torch "), ("triton", "Triton "))
        if key in head
    )
    return f"{about}{commit}{ceiling}. `{command}`."


def _peer(row: Row, replaying: bool) -> str:
    found = best(row, replaying)
    return f"{found[1] / row['us']:.2f} ({found[0]}, {found[1]:.1f} µs)" if found else "-"


def _formats(row: Row) -> str:
    return row["state"] + (f", read {row['read']}" if row["read"] else "")


def _helper(row: Row) -> str:
    return row["u"] if RECURRENCES[row["family"]].delta else "-"


def decode(rows: Sequence[Row]) -> str:
    """Per layer, format and batch: time, floor, and how many times it the best peers take."""
    columns = ("layer", "state", "batch", "W", "µs", "byte floor, µs", "share", *PEERS)
    return table(columns, [
        (f"{row['layer']} ({row['family']})", _formats(row), f"{row['batch']}", f"{row['W']}", f"{row['us']:.1f}",
         f"{row['floor_us']:.1f}", f"{row['floor_us'] / row['us']:.2f}", _peer(row, False), _peer(row, True))
        for row in rows
    ])  # fmt: skip


def formats(rows: Sequence[Row]) -> str:
    """Per layer and format, at its fastest window: a step, one without a flush, and how many times it others take."""
    columns = ("layer", "state", "u", "batch", "W", "µs", "share", PEERS[0], "no flush, µs", "share", "fp32's / it")
    lines = []
    for of in group(rows, "layer", "batch").values():
        plain = min((row["us_no_flush"] for row in of if _is_exact(row)), default=None)
        for row in of:
            alone = row["us_no_flush"]
            lines.append((
                f"{row['layer']} ({row['family']})", _formats(row), _helper(row), f"{row['batch']}", f"{row['W']}",
                f"{row['us']:.1f}", f"{row['floor_us'] / row['us']:.2f}", _peer(row, False), f"{alone:.1f}",
                f"{row['floor_no_flush_us'] / alone:.2f}", f"{plain / alone:.2f}" if plain else "-",
            ))  # fmt: skip
    return table(columns, lines)


def verify(rows: Sequence[Row]) -> str:
    """Per layer, batch and T: time at the best window, also in conventional one-token steps, and the best peers'."""
    columns = ("layer", "batch", "T", "W", "µs", "share", "one-token steps", *PEERS)
    return table(columns, [
        (f"{row['layer']} ({row['family']})", f"{row['batch']}", f"{row['T']}", f"{row['W']}", f"{row['us']:.1f}",
         f"{row['floor_us'] / row['us']:.2f}", f"{row['us'] / row['one_step_us']:.2f}" if row.get("one_step_us") else "-",
         _peer(row, False), _peer(row, True))
        for row in rows
    ])  # fmt: skip


def summary(decoded: Sequence[Row], verified: Sequence[Row], T: int = 4) -> str:
    """Per layer at its largest batch, fp32 states: a step of one token and one of T, beside the best conventional peer's."""
    columns = ("layer", "requests", "one token, µs", "conventional, µs", "", f"{T} tokens, µs", "conventional, µs", "")
    same, rows = ("layer", "family", "batch", "state", "read"), []
    for (layer, family), of in group(exact(decoded), "layer", "family").items():
        one = max(of, key=lambda row: row["batch"])
        several = [row for row in verified if row["T"] == T and all(row[key] == one[key] for key in same)]
        rows.append((f"{layer} ({FAMILIES[family]})", f"{one['batch']}", *_beside(one), *_beside(next(iter(several), None))))
    return table(columns, rows)


def _beside(row: Row | None) -> tuple[str, str, str]:
    """A row's time, the best conventional peer's, and how many times ours that is."""
    peer = best(row, False) if row else None
    ours = f"{row['us']:.0f}" if row else "-"
    return (ours, f"{peer[1]:.0f}", f"{peer[1] / row['us']:.2f} x") if row and peer else (ours, "-", "-")


def trace(rows: Sequence[Row]) -> str:
    """Per layer: how much slower than the mean the slowest step of a cycle is."""
    return table(("layer", "requests", "W", "slowest step / mean of a cycle"), [
        (row["layer"], f"{row['batch']}", f"{row['W']}", f"{row['slowest_over_mean']:.2f}") for row in rows
    ])  # fmt: skip


def materialize(rows: Sequence[Row]) -> str:
    """Per layer, operation, batch and records: time of all measured layers, floor, share."""
    columns = ("layer", "operation", "batch", "records", "layers", "µs", "MB", "share of the byte floor")
    return table(columns, [
        (f"{row['layer']} ({row['family']})", row["op"], f"{row['batch']}", f"{row['count']}", f"{row['layers']}",
         f"{row['us']:.1f}", f"{row['bytes'] / 1e6:.1f}", f"{row['floor_us'] / row['us']:.2f}")
        for row in rows
    ])  # fmt: skip


def helper(rows: Sequence[Row]) -> str:
    """Per family, gates and dtype of the readout helper: errors of outputs and state, and the conventional recurrence's."""
    columns = ("family", "gates", "u", "output", "output, conventional", "state", "state, conventional")
    return table(columns, [
        (row["family"], row["gates"], row["u"], f"{row['output']:.1e}", f"{row['output_conventional']:.1e}",
         f"{row['state']:.2e}", f"{row['state_conventional']:.2e}")
        for row in rows
    ])  # fmt: skip


def scales(rows: Sequence[Row]) -> str:
    """Per format and values that share a scale: bytes a value, and errors of readouts of each family's even / uneven states."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    columns = ("format", "scale along", "values", "bytes a value", *families, "error x bytes, geometric mean")
    lines = []
    for (name, axis, block), of in group(rows, "format", "axis", "block").items():
        size = sum(row["bytes_per_value"] for row in of) / len(of)
        errors = (" / ".join(f"{row['output_error']:.1e}" for row in of if row["family"] == family) for family in families)
        mean = math.exp(sum(math.log(row["error_bytes"]) for row in of) / len(of))
        lines.append((name, axis, f"{block}", f"{size:.3f}", *errors, f"{mean:.2e}"))
    return table(columns, lines)


def position(row: Row) -> int:
    """The end of a row's bucket of positions, which is a number of tokens or a pair of them."""
    return row["position"][1] if isinstance(row["position"], list) else row["position"]


def drift(rows: Sequence[Row]) -> str:
    """Per model and format: mean KL divergence at each position."""
    return "Mean KL divergence from it, nats:\n\n" + _over_positions(
        rows, ("model", "format"), lambda row: f"{row['kl_mean']:.1e}"
    )


def conventional(rows: Sequence[Row]) -> str:
    """Per model: the conventional run's own loss at each position."""
    return "Loss of the conventional run, nats a token:\n\n" + _over_positions(
        rows, ("model",), lambda row: _shown(row["loss"], ".3f")
    )


def drift_end(rows: Sequence[Row]) -> str:
    """Per model and format, at the last positions: KL divergence's 99th percentile, top-1 agreement, recall, state error."""
    last = max(map(position, rows))
    columns = ("model", "format", "KL, 99th percentile", "top-1 agreement", "loss", "recall", "state error, worst layer")
    return f"At the last positions, to {last:,} tokens:\n\n" + table(columns, [
        (row["model"], row["format"], f"{row['kl_p99']:.1e}", f"{row['top1']:.2%}", _shown(row["loss"], ".3f"),
         _shown(row["recall"], ".1%"), "-" if None in row["state_error"] else f"{max(row['state_error']):.1e}")
        for row in rows if position(row) == last
    ])  # fmt: skip


def _over_positions(rows: Sequence[Row], keys: Sequence[str], cell: Callable[[Row], str]) -> str:
    """A line per group of rows, a column per position."""
    positions = sorted(set(map(position, rows)))
    lines = []
    for values, of in group(rows, *keys).items():
        at = {position(row): cell(row) for row in of}
        lines.append((*values, *(at.get(tokens, "-") for tokens in positions)))
    return table((*keys, *(f"{tokens:,} tokens" for tokens in positions)), lines)


def runs(rows: Sequence[Row]) -> dict[tuple[str, bool], dict[str, dict[int, Row]]]:
    """Steps of whole models under an engine: (model and GPUs, whether speculative) -> mode -> batch -> row."""
    found: dict[tuple[str, bool], dict[str, dict[int, Row]]] = {}
    for row in rows:
        ranks = row.get("tp", 1)
        name = row["model"] + (f", {ranks} GPUs" if ranks > 1 else "")
        modes = found.setdefault((name, row.get("speculative", False)), {mode: {} for mode in MODES})
        modes[row["mode"]][row["batch"]] = row
    return found


def gain(theirs: Row | None, ours: Row | None, key: str) -> float | None:
    """How many times ours theirs takes; None where either was not measured."""
    a, b = (row and row.get(key) for row in (theirs, ours))
    return a / b if a and b else None


def engines(rows: Sequence[Row]) -> str:
    """Per model and batch: a step by GPU-busy time in each mode, what ours gains by it and by the clock, requests that fit."""
    columns = (
        "model", "requests", "stock, ms", "its own replay, ms", "ReplaySSM, ms", "stock / ours", "own replay / ours",
        "stock / ours by the clock", "tokens/s", "requests that fit, stock", "ours",
    )  # fmt: skip
    lines = []
    for (name, speculative), modes in runs(rows).items():
        fit = [
            next((str(row["max_requests"]) for row in modes[mode].values() if "max_requests" in row), "-")
            for mode in (STOCK, OURS)
        ]
        for batch in sorted({batch for of in modes.values() for batch, row in of.items() if row.get("ms_per_step")}):
            stock, native, ours = (modes[mode].get(batch) for mode in (STOCK, NATIVE, OURS))
            pairs = (stock, "ms_per_step"), (native, "ms_per_step"), (stock, "wall_ms_per_step")
            lines.append((
                name + (", speculative" if speculative else ""), f"{batch}",
                *(_shown(row and row.get("ms_per_step"), ".2f") for row in (stock, native, ours)),
                *(_shown(gain(row, ours, key), ".2f") for row, key in pairs),
                _shown(ours and ours.get("tokens_per_s"), ",.0f"), *fit,
            ))  # fmt: skip
    return table(columns, lines)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
