"""``replayssm soak``: requests come, decode, move and go at random, each beside its fp64 truth."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..configuration import DTYPES
from ..layout import Layout
from ..soak import Engine, Report, Setup, walk
from .refuse import refuse


def soak(
    steps: Annotated[int, typer.Option(help="Request-steps: rows of steps, padding apart.")] = 5000,
    seconds: Annotated[float, typer.Option(help="End after so many, done or not.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Which walk; a seed repeats every event.")] = 0,
    family: Annotated[str, typer.Option(help="mamba2, gdn, kda, kda_safe or gla.")] = "gdn",
    state: Annotated[str, typer.Option(help="Format of the state that the recurrence continues from.")] = "fp32",
    read: Annotated[str | None, typer.Option(help="Format of a copy that readouts use; default: they read the state.")] = None,
    dtype: Annotated[str, typer.Option(help="Activations: fp32, bf16 or fp16.")] = "fp32",
    window: Annotated[int, typer.Option(help="Records a ring of the first worker holds; the second's holds half.")] = 16,
    draft_tokens: Annotated[int, typer.Option(help="Most tokens of a row and step.")] = 4,
    slots: Annotated[int, typer.Option(help="Requests at a time on each worker; default: 1024 on a GPU, else 24.")] = 0,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    heads: Annotated[int, typer.Option(help="Value heads.")] = 4,
    groups: Annotated[int, typer.Option(help="Key groups.")] = 2,
    value_dim: Annotated[int, typer.Option(help="V of a head's state.")] = 32,
    key_dim: Annotated[int, typer.Option(help="K of a head's state.")] = 64,
    backend: Annotated[str | None, typer.Option(help="torch or triton; default: triton on a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: cuda where there is one.")] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Check cursors, slots and the order of calls as well; slower.")
    ] = False,
    graphs: Annotated[
        bool | None, typer.Option("--graphs/--no-graphs", help="Replay steps from CUDA graphs; default: on a GPU.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no tables.")] = False,
) -> None:
    """Walk at random through all that an engine does with states, beside the fp64 oracle.

    Two workers of different layouts admit, prefill in chunks, decode, verify chains and trees, take and reuse prefixes,
    preempt, resume, migrate, fork, move and abort requests.

    Example: replayssm soak --family kda --steps 1000000 --device cuda

    Exit code 0: everything within its bound. 1: something is not. 2: bad input.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    slots = slots or (1024 if where.startswith("cuda") else 24)
    graphs = where.startswith("cuda") and not debug if graphs is None else graphs
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", where):
            raise ValueError(f"device: expected cpu, cuda or cuda:N, got {where!r}")
        if min(steps, slots, layers) < 1:
            raise ValueError(f"steps, slots, layers: expected >= 1, got {steps}, {slots}, {layers}")
        formats = {"state": state, "read": read, "act": DTYPES[dtype]}
        layout = Layout(family, heads, groups, value_dim, key_dim, window, draft_tokens, **formats)  # type: ignore[arg-type]
        setup = Setup(layout, layers, slots, 3 * slots, backend=backend, device=where, debug=debug, graphs=graphs)
        engine = Engine(setup, seed)
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("request-steps", total=steps)
        report = walk(engine, steps, lambda done: progress.update(task, completed=done), seconds=seconds)
    if as_json:
        about: dict[str, object] = {
            "family": family,
            "layout": layout.spec,
            "backend": backend,
            "device": where,
            "graphs": graphs,
        }
        about |= {"slots": slots, "layers": layers}
        print(json.dumps(about | {"mismatches": report.mismatches} | asdict(report), indent=2))
    else:
        _print(report)
    raise typer.Exit(1 if report.mismatches else 0)


def _print(report: Report) -> None:
    console = Console(highlight=False)
    console.print(f"seed {report.seed}, {report.events['request-steps']} request-steps in {report.seconds:.1f} s")
    events = Table("event", "times", box=None, pad_edge=False)
    for name, times in sorted(report.events.items()):
        events.add_row(name, str(times))
    found = Table("compared", "values", "worst", "bound", "beyond", box=None, pad_edge=False)
    for name, one in report.found.items():
        found.add_row(name, str(one.compared), f"{one.worst:.1e}", f"{one.bound:.1e}", str(one.wrong))
    console.print(events, found, sep="\n\n")
    first = [one.first for one in report.found.values() if one.first is not None]
    console.print(f"MISMATCHES: {report.mismatches}, the first in event {min(first)}" if first else "no mismatch", style="bold")
