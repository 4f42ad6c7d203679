"""``replayssm plan``: what a model would gain on a GPU, before anything is installed there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import devices, models
from ..calibration import Calibration
from ..estimate import Cost, Deployment, Estimate, estimate
from .refuse import refuse

CONTEXTS = tuple(2**n for n in range(8, 21))


def plan(
    model: Annotated[str, typer.Option(help="A model's name, a Hugging Face config.json or the folder of a checkpoint.")],
    gpu: Annotated[str, typer.Option(help="One of " + ", ".join(devices.GPUS) + ".")] = "h200",
    batch: Annotated[int, typer.Option(help="Requests of a step.")] = 64,
    context: Annotated[int, typer.Option(help="Tokens that each request has behind it.")] = 8192,
    speculate: Annotated[int, typer.Option(help="Tokens of a request and step, drafts and the one before them.")] = 1,
    acceptance: Annotated[float, typer.Option(help="Probability that a draft stays where all before it did.")] = 0.75,
    window: Annotated[int | None, typer.Option(help="Records a ring holds; default: the window of least bytes.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Format of the state that the recurrence continues from.")] = "fp32",
    read: Annotated[str | None, typer.Option(help="Format of a copy that readouts use; default: they read the state.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share every layer.")] = 1,
    kv_bytes: Annotated[float, typer.Option(help="Bytes of a cached element of the attention layers.")] = 2.0,
    weights: Annotated[float | None, typer.Option(help="GB of all weights; default: the checkpoint's, or 16 bits.")] = None,
    other_us: Annotated[float, typer.Option(help="Microseconds of the rest of a step, as your engine measures them.")] = 0.0,
    memory_utilization: Annotated[float, typer.Option(help="Part of the memory for weights and requests.")] = 0.9,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw: time of a step over the context.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no tables.")] = False,
) -> None:
    """Bytes, time and memory of decode steps with states written every step and with ReplaySSM, from the byte model.

    Example: replayssm plan --model Qwen3.5-4B --gpu h100 --batch 128 --context 4096 --speculate 4

    Exit code 0, or 2 for bad input.
    """
    formats = {"state": checkpoint, "read": read}
    try:
        of = Deployment(
            models.find(model), devices.find(gpu), batch, context, speculate, acceptance, window, formats,
            tensor_parallel, kv_bytes, other_us, memory_utilization,
        )  # fmt: skip
        if weights is not None:
            of = replace(of, model=replace(of.model, weights=weights * 1e9))
        calibration = _calibration()
        found = estimate(of, calibration)
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    if plot is not None:
        _plot(of, calibration, f"{model}, {gpu}, batch {batch}", plot)
    if as_json:
        print(json.dumps({"model": model, "gpu": gpu, "batch": batch} | asdict(found), indent=2))
    else:
        _print(Console(highlight=False, width=120), f"{model} on {gpu}, batch {batch}", of, found)


def _calibration() -> Calibration:
    from replayssm.bench.peers import replays
    from replayssm.bench.results import load

    return Calibration.of(load(), replays)


def _print(console: Console, title: str, of: Deployment, found: Estimate) -> None:
    replay = found.ways[-1]
    row = of.model.recurrence.name
    console.print(
        f"{title}, context {found.context:,}; {of.model.layers} {row} and {of.model.attention.layers} attention layers"
        + (f", over {of.ranks} GPUs, figures of each" if of.ranks > 1 else "")
    )
    console.print(f"window {found.window}; least bytes at {found.best_window}")
    table = Table("", *(way.name for way in found.ways), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    lines: tuple[tuple[str, list[Any]], ...] = (
        ("tokens of a request and step, kept", [f"{way.tokens}, {way.kept:.2f}" for way in found.ways]),
        ("recurrent layers: GB a step", [f"{way.recurrent.bytes / 1e9:.2f}" for way in found.ways]),
        ("  microseconds", [f"{way.recurrent.us:,.0f}" for way in found.ways]),
        ("  share of the byte floor", [_share(way.recurrent) for way in found.ways]),
        ("attention layers: GB a step", [f"{found.attention.bytes / 1e9:.2f}" for _ in found.ways]),
        ("  microseconds", [f"{found.attention.us:,.0f}" for _ in found.ways]),
        ("step, microseconds", [f"{way.step_us:,.0f}" for way in found.ways]),
        ("tokens per second, batch", [f"{way.tokens_per_second:,.0f}" for way in found.ways]),
        ("MiB of a request", [f"{way.memory / 2**20:,.1f}" for way in found.ways]),
        ("  states and ring", [f"{way.state / 2**20:,.1f}" for way in found.ways]),
        ("  convolution window", [f"{way.conv / 2**20:,.1f}" for way in found.ways]),
        ("  keys and values", [f"{way.kv / 2**20:,.1f}" for way in found.ways]),
        ("requests that fit", ["?" if way.fits is None else f"{way.fits:,}" for way in found.ways]),
        ("attention takes longer from a context of", [_tokens(found.takes_over[way.name]) for way in found.ways]),
    )
    for name, cells in lines:
        table.add_row(name, *cells)
    console.print(table)
    for name, times in found.faster.items():
        console.print(
            f"{replay.name} against {name}, per kept token: recurrent layers {times['recurrent']:.2f} x faster, "
            f"step {times['step']:.2f} x",
            style="bold",
        )
    for sentence in found.basis:
        console.print(sentence, soft_wrap=True, markup=False)


def _share(cost: Cost) -> str:
    return f"{cost.share:.2f}{'' if cost.measured else ' (not measured)'}"


def _tokens(context: float | None) -> str:
    return "never" if context is None else f"{context:,.0f}"


def _plot(of: Deployment, calibration: Calibration, title: str, path: Path) -> None:
    try:
        from replayssm.bench import figures
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        refuse("matplotlib is not installed; pip install 'replayssm[cli]'")
    every = [estimate(replace(of, context=context), calibration) for context in CONTEXTS]
    figures.save(figures.over_context(title, every), path)
