"""The commands; ``run`` and ``presets`` here, what they do is compare.py, how it looks is report.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import bench, figures, report
from .config import config
from .doctor import doctor
from .drift import drift
from .parity import parity
from .patch import patch
from .plan import plan
from .refuse import PRESETS, refuse, with_transformers
from .soak import soak
from .tune import tune

app = typer.Typer(
    help="Decode recurrent layers from a checkpoint and a ring of recent inputs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command()(figures.report)
app.command()(plan)
app.command()(config)
app.command()(doctor)
app.command()(drift)
app.command()(soak)
app.command()(parity)
app.command()(patch)
app.command()(tune)


@app.command()
def run(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model of `replayssm presets` or a Hugging Face folder; may be repeated; default: one a family."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; default: the opening of Pride and Prejudice.")] = None,
    window: Annotated[int, typer.Option(help="Records a ring holds before it is folded.")] = 16,
    state: Annotated[str, typer.Option(help="Format of the state that the recurrence continues from.")] = "fp32",
    read: Annotated[str | None, typer.Option(help="Format of a copy that readouts use; default: they read the state.")] = None,
    u: Annotated[str | None, typer.Option(help="Dtype of the delta rule's readout helper; default: by --dtype.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate, each row.")] = 256,
    batch: Annotated[int, typer.Option(help="Rows: beginnings of the prompt of different lengths.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    speculate: Annotated[str | None, typer.Option(help="prompt-lookup: ReplaySSM decodes with drafts from the text.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Most drafts of a step, with --speculate; default: 4.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no tables.")] = False,
) -> None:
    """Generate greedily with a model's own decoding and with ReplaySSM, and compare tokens, logits, bytes and time.

    Example: replayssm run --model qwen3.5 --read int8 --speculate prompt-lookup --draft-tokens 4

    Exit code 0: identical tokens. 1: tokens differ, as those of rounded states may. 2: bad input.
    """
    compare, known = with_transformers(".compare"), with_transformers(PRESETS)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        options = compare.Options(prompt, window, state, read, u, max_new_tokens, batch, device, dtype, speculate, draft_tokens)
        jobs = [compare.prepare(name, options) for name in model or known.DEFAULTS]
    except (ValueError, NotImplementedError, OSError) as error:
        refuse(error)
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for job in jobs:
            task = progress.add_task(job.name, total=2 * max_new_tokens)
            results.append(compare.compare(job, advance=partial(progress.advance, task)))
            progress.update(task, completed=2 * max_new_tokens)
    identical = all(result.identical for result in results)
    if as_json:
        print(json.dumps({"identical": identical, "models": [asdict(result) for result in results]}, indent=2))
    else:
        report.results(results)
    raise typer.Exit(0 if identical else 1)


@app.command()
def presets(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no table.")] = False) -> None:
    """List the small models that ``run`` and ``drift`` take without a download: trained ones, and random weights.

    Example: replayssm presets

    Exit code 0, or 2 where transformers is missing.
    """
    known = with_transformers(PRESETS)
    listed = report.presets(known.TRAINED, known.PRESETS.values())
    if as_json:
        print(json.dumps({"presets": listed}, indent=2))
    else:
        report.print_presets(listed)
