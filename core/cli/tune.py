"""``replayssm tune``: launches measured on this machine's GPU, which the rules then give way to."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import launch, models, records
from ..records import Launch, Record
from .refuse import refuse

BATCHES = (1, 16, 64, 256)


def tune(
    model: Annotated[list[str], typer.Option(help="A model's name, a config.json or a checkpoint's folder; may be repeated.")],
    batch: Annotated[
        list[int] | None, typer.Option("--batch", help="Requests of a step; may be repeated; default: 1, 16, 64, 256.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a request and step: 1 decodes, more verify.")] = 1,
    format: Annotated[
        list[str] | None, typer.Option(help="Format of the state, or state/read; may be repeated; default: fp32.")
    ] = None,
    window: Annotated[int, typer.Option(help="Records a ring holds before it is folded.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share every layer.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="File to add to; default: REPLAYSSM_LAUNCHES, or ~/.config/replayssm/launches.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no table.")] = False,
) -> None:
    """Time a dozen launches of a model's decode or verify step on this GPU and record the fastest, which is used from then on.

    Example: replayssm tune --model Qwen3.5-4B --batch 1 --batch 64 --tensor-parallel 2

    Exit code 0, or 2 for bad input and where there is no CUDA GPU.
    """
    from replayssm.bench import tune as measuring
    from replayssm.bench.precision import Precision

    batches, file = batch or list(BATCHES), out or records.path()
    if min(batches) < 1:
        refuse(f"batch: expected >= 1, got {min(batches)}")
    try:
        precisions = Precision.parse(format or ["fp32"])
        shards = {name: models.find(name).shard(tensor_parallel) for name in model}
        jobs = [
            (name, shard, precision.layout(shard, window, tokens)) for name, shard in shards.items() for precision in precisions
        ]
        records.read(file)
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    if not torch.cuda.is_available():
        refuse("tune: expected a CUDA GPU, and torch finds none")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found: list[tuple[str, Record, dict[Launch, float]]] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("batches", total=len(jobs) * len(batches))
        for name, shard, layout in jobs:
            for record, tried in measuring.tune(shard, layout, batches, tokens, torch.cuda.get_device_name()):
                records.add(file, [record])
                found.append((name, record, tried))
                progress.advance(task)
    launch.forget()
    _print(found, file, as_json)


def _print(found: list[tuple[str, Record, dict[Launch, float]]], file: Path, as_json: bool) -> None:
    if as_json:
        lines = [{"model": name, **asdict(record), "tried": len(tried)} for name, record, tried in found]
        print(json.dumps({"file": str(file), "records": lines}, indent=2))
        return
    console = Console(highlight=False, width=160)
    table = Table("model", "step", "batch", "tried", "rule, us", "best, us", "rule / best", "launch", box=None, pad_edge=False)
    for name, record, tried in found:
        gain = f"{record.rule_us / record.us:.2f}"
        figures = (str(len(tried)), f"{record.rule_us:.1f}", f"{record.us:.1f}", gain)
        table.add_row(name, record.op, str(record.batch), *figures, str(record.launch).removeprefix("Launch"))
    console.print(table)
    console.print(f"written to {file}", soft_wrap=True)
