"""Results and presets as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..integrations.transformers.presets import Preset
    from .compare import Cost, Drafted, Result


def results(every: list[Result]) -> None:
    """Print each model's text and comparison, then one line over all."""
    console = Console(highlight=False)
    for result in every:
        _result(console, result)
    if any(result.device == "cpu" for result in every):
        console.print("On a CPU ReplaySSM runs in plain torch: bytes are the same as on a GPU, times say nothing about one.")
    tokens = sum(result.new_tokens * len(result.text) for result in every)
    same = sum(result.identical for result in every)
    console.print(f"{tokens} tokens generated; {same} of {len(every)} models: tokens identical with and without ReplaySSM")


def _result(console: Console, result: Result) -> None:
    console.rule(f"{result.model}: {result.layers} {result.family} layers, {result.device}, {result.dtype}")
    helper = f", u {result.u}" if result.u else ""
    console.print(f"state {result.state}, read copy {result.read or 'none'}{helper}")
    for row, text in enumerate(result.text):
        console.print(f"row {row}, after {result.prompt_tokens[row]} tokens of prompt:", style="bold")
        console.print(text, markup=False, soft_wrap=True)
    _costs(console, "state, one request, all layers", "transformers", result.stock, result.replay)
    flushes = sorted(set(result.flushes))
    if result.speculation:
        _speculation(console, result.speculation, result.replay)
    console.print(f"window {result.window}; flushes per request and layer: {', '.join(map(str, flushes))}")
    if result.identical:
        console.print(f"tokens: identical, {len(result.text)} x {result.new_tokens}", style="green")
    else:
        row, position = result.first_difference or (0, 0)
        console.print(f"tokens: different from token {position} of row {row} on", style="red")
    row, position = result.logit_difference_at
    console.print(
        f"logits: differ most at token {position} of row {row}, by {result.logit_difference:.1e}\n"
        f"smallest top-1 margin: {result.smallest_margin:.1e}\n"
    )


def _costs(console: Console, title: str, other: str, theirs: Cost, ours: Cost) -> None:
    table = Table(title)
    for way in (other, "ReplaySSM", "ratio"):
        table.add_column(way, justify="right")
    rows = (
        ("bytes read per token", theirs.read, ours.read, ",.0f"),
        ("bytes written per token", theirs.written, ours.written, ",.0f"),
        ("bytes read and written", theirs.read + theirs.written, ours.read + ours.written, ",.0f"),
        ("bytes held", theirs.memory, ours.memory, ",.0f"),
        ("ms per token of every row", theirs.milliseconds, ours.milliseconds, ".2f"),
    )
    for name, a, b, form in rows:
        if a is not None and b is not None:
            table.add_row(name, f"{a:{form}}", f"{b:{form}}", f"{b / a:.2f}" if a else "-")
    console.print(table)


def _speculation(console: Console, drafted: Drafted, replay: Cost) -> None:
    _costs(console, "speculation, per token kept", "snapshots", drafted.snapshots, replay)
    console.print(
        f"up to {drafted.draft_tokens} drafts a step: {drafted.steps} steps read {drafted.tokens} tokens and kept "
        f"{drafted.kept}; acceptance length {drafted.acceptance:.2f}\n"
        f"state snapshots avoided: {drafted.snapshots_avoided}"
    )


def presets(trained: dict[str, Path], every: Iterable[Preset]) -> list[dict[str, str]]:
    """The models that need no download, by name, class and what they are: the trained ones, then presets of random weights."""
    listed = []
    for name, folder in trained.items():
        (model,) = json.loads((folder / "config.json").read_text())["architectures"]
        listed.append({"preset": name, "class": model, "what it is": "trained on English text in the public domain"})
    return listed + [{"preset": one.name, "class": one.model, "what it is": one.about} for one in every]


def print_presets(listed: list[dict[str, str]]) -> None:
    """One model a line."""
    table = Table("preset", "class", "what it is", box=None, pad_edge=False)
    for one in listed:
        table.add_row(*one.values())
    Console(highlight=False).print(table)
