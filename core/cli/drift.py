"""``replayssm drift``: how far number formats of the state drift from a conventional fp32 state, over long texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .refuse import PRESETS, refuse, with_transformers

Results = dict[str, Any]
MEASURED = ("rows", "conventional")


def drift(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model of `replayssm presets` or a Hugging Face folder; may be repeated; default: one a family."),
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Formats `state` or `state/read`, with commas between; default: those of the docs.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of each text, the prompt included.")] = 256,
    texts: Annotated[int, typer.Option(help="Texts side by side: equal parts of the file.")] = 2,
    text: Annotated[Path | None, typer.Option(help="A text; default: the opening of Pride and Prejudice, 2,000 bytes.")] = None,
    window: Annotated[int, typer.Option(help="Records a ring holds before it is folded.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of activations: fp32, bf16 or fp16.")] = "fp32",
    out: Annotated[Path | None, typer.Option(help="JSON to write; other models' rows stay in it.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit for the header; default: REPLAYSSM_COMMIT or git's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print header and rows as JSON and no tables.")] = False,
) -> None:
    """Read given texts with the state in every format, and compare with a conventional fp32 state at every position.

    KL divergence of the next token's distribution (mean, 99th percentile), top-1 agreement, loss, recall of facts woven into
    the texts, and each layer's state error against fp64, per range of positions.

    Example: replayssm drift --model tiny-gdn --text book.txt --length 131072 --texts 4 --device cuda --out drift.json

    Exit code 0, or 2 for bad input.
    """
    study, known = with_transformers("..integrations.transformers.drift"), with_transformers(PRESETS)
    from replayssm.bench.timing import machine

    from .loading import load, named_device, named_dtype

    names, chosen = model or list(known.DEFAULTS), formats.split(",") if formats is not None else study.FORMATS
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    try:
        for option, value in (("length", length), ("texts", texts)):
            if value < 1:
                raise ValueError(f"{option}: expected >= 1, got {value}")
        number, where = named_dtype(dtype), named_device(device)
        settings = {"length": length, "texts": texts, "window": window, "dtype": dtype}
        results = _earlier(out, {**machine(where, commit), **settings}, names)
        written, jobs = known.book() if text is None else text.read_text(), []
        for name in names:
            loaded, tokenizer = load(name, number, where)
            jobs.append((Path(name).name, loaded, study.texts(written, tokenizer, texts, length)))
            study.check(*jobs[-1][1:], chosen, window)
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for name, loaded, of in jobs:
                task = progress.add_task(name, total=length)
                found = study.measure(name, loaded, of, chosen, window, advance=partial(progress.advance, task))
                _add(results, found, out)
                progress.update(task, completed=length)
    except (ValueError, NotImplementedError, OSError) as error:
        refuse(error)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        _print(results, study.fit)


def _earlier(out: Path | None, header: Results, names: list[str]) -> Results:
    """The file's results of other models, or none; refuses to mix settings or machines."""
    results: Results = {"header": header, **{key: [] for key in MEASURED}}
    if out is None or not out.is_file():
        return results
    earlier = json.loads(out.read_text())
    for key, value in header.items():
        if key not in ("date", "commit") and earlier["header"].get(key) != value:
            raise ValueError(f"out: expected results with {key} {value!r} in {out}, got {earlier['header'].get(key)!r}")
    again = {Path(name).name for name in names}
    return results | {key: [row for row in earlier[key] if row["model"] not in again] for key in MEASURED}


def _add(results: Results, found: Any, out: Path | None) -> None:
    """One model's rows, written at once, so that a run cut short keeps what it has."""
    for key in MEASURED:
        results[key] += getattr(found, key)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


def _print(results: Results, fit: Callable[[list[Results]], bool]) -> None:
    """Per model: the conventional run, then each format over the positions; what is not fit for the study is said."""
    console = Console(highlight=False, width=200)
    for one in dict.fromkeys(row["model"] for row in results["conventional"]):
        console.rule(one)
        conventional = [row for row in results["conventional"] if row["model"] == one]
        rows = [row for row in results["rows"] if row["model"] == one]
        ends = [f"to {row['position'][1]:,}" for row in conventional]
        table = Table("conventional fp32 state", *ends, box=None, pad_edge=False)
        for what, form in (("loss", ".3f"), ("recall", ".1%"), ("answers", "d")):
            table.add_row(what, *(_shown(row[what], form) for row in conventional))
        table.add_row("largest state error", *(_worst(row) for row in conventional))
        console.print(table)
        for what, key, form in (
            ("mean KL divergence", "kl_mean", ".1e"), ("99th percentile", "kl_p99", ".1e"), ("top-1 agreement", "top1", ".2%"),
            ("recall", "recall", ".1%"), ("largest state error", "", ""),
        ):  # fmt: skip
            table = Table(what, *ends, box=None, pad_edge=False)
            for format in dict.fromkeys(row["format"] for row in rows):
                line = [row for row in rows if row["format"] == format]
                table.add_row(format, *(_shown(row[key], form) if key else _worst(row) for row in line))
            console.print(table)
        if not fit(conventional):
            console.print("the conventional run itself gets worse with the length: not a model for this study", style="red")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _worst(row: Results) -> str:
    """The largest of a row's state errors over the layers."""
    return "not finite" if None in row["state_error"] else f"{max(row['state_error']):.1e}"
