"""Figures of committed results and of estimates, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replayssm.estimate import Estimate

from .sglang.modes import NATIVE, OURS, STOCK
from .tables import FAMILIES, best, gain, group, position, runs

Rows = Sequence[dict[str, Any]]
matplotlib.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9, "legend.handlelength": 3.5})
COLOURS = tuple(f"C{i}" for i in range(10))


def save(figure: Figure, path: Path) -> None:
    """Write a PNG; no date or version in it, so that equal figures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.2 * len(titles), 3.4), layout="constrained")
    axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for at, title in zip(axes, titles, strict=True):
        at.set_title(title)
    return figure, list(axes)


def _powers(at: Axes, label: str, values: Iterable[float]) -> None:
    ticks = sorted(set(values))
    at.set_xscale("log", base=2)
    at.set_xticks(ticks, [f"{tick:g}" if tick < 1024 else f"{tick / 1024:g}K" for tick in ticks])
    at.minorticks_off()
    at.set_xlabel(label)


def _over_batch(rows: Rows, lines: dict[str, Callable[[dict], float | None]], ylabel: str, least: float | None) -> Figure:
    """One panel a family; a colour per layer, a line style per entry of `lines`."""
    families = [family for family in FAMILIES if any(row["family"] == family for row in rows)]
    figure, axes = _panels([FAMILIES[family] for family in families])
    for at, family in zip(axes, families, strict=True):
        layers = group([row for row in rows if row["family"] == family], "layer")
        for colour, ((layer,), of) in zip(COLOURS, layers.items(), strict=False):
            for style, (name, value) in zip(("-", "--"), lines.items(), strict=False):
                points = sorted((row["batch"], y) for row in of if (y := value(row)) is not None)
                if points:
                    label = ", ".join(part for part in (layer, name) if part)
                    at.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=colour, label=label)
        if least is not None:
            at.axhline(least, color="black", lw=0.8)
        _powers(at, "requests of a step", (row["batch"] for row in rows))
        if at.lines:
            at.legend(fontsize=7)
    axes[0].set_ylabel(ylabel)
    axes[0].set_ylim(bottom=0)
    return figure


def speed_up(rows: Rows) -> Figure:
    """Decode: time of the best peer over ours, over the batch."""

    def ratio(replaying: bool) -> Callable[[dict], float | None]:
        def value(row: dict) -> float | None:
            found = best(row, replaying)
            return found[1] / row["us"] if found else None

        return value

    lines = {"best conventional": ratio(False), "best replaying": ratio(True)}
    return _over_batch(rows, lines, "time of the best peer / ours", 1.0)


def share(rows: Rows) -> Figure:
    """Decode: what the step's bytes take at the read ceiling, over what the step takes."""
    return _over_batch(rows, {"": lambda row: row["floor_us"] / row["us"]}, "share of the byte floor", 1.0)


def verify(rows: Rows) -> Figure:
    """Verify: a step's time over T, in conventional one-token steps."""
    families = [family for family in FAMILIES if any(row["family"] == family for row in rows)]
    figure, axes = _panels([FAMILIES[family] for family in families])
    for at, family in zip(axes, families, strict=True):
        layers = group([row for row in rows if row["family"] == family], "layer", "batch")
        for i, ((layer, batch), of) in enumerate(layers.items()):
            ones = {row["T"]: row["one_step_us"] for row in of}
            ours = {row["T"]: row["us"] for row in of}
            peers = {row["T"]: min(row["peers"].values()) for row in of if row["peers"]}
            for times, style, label in ((ours, "o-", f"{layer}, batch {batch}"), (peers, "x:", f"_{layer}, batch {batch}")):
                points = sorted((T, us / ones[T]) for T, us in times.items())
                if points:
                    at.plot(*zip(*points, strict=True), style, ms=3, color=f"C{i % 10}", label=label)
        at.axhline(1.0, color="black", lw=0.8)
        _powers(at, "tokens of a request and step; dotted: best peer", (row["T"] for row in rows))
        at.legend(fontsize=6)
    axes[0].set_ylabel("time / one conventional one-token step")
    axes[0].set_ylim(bottom=0)
    return figure


def trace(traces: Rows) -> Figure:
    """Step by step from one admission: microseconds per layer."""
    figure, (at,) = _panels([f"{traces[0]['batch']} requests admitted on one step"])
    figure.set_size_inches(7, 3.4)
    for one in traces:
        label = f"{one['layer']}: slowest {one['slowest_over_mean']:.2f} x mean"
        at.plot(range(len(one["us"])), one["us"], marker=".", lw=0.8, label=label)
    at.set_xlabel("steps since the admission")
    at.set_ylabel("microseconds per layer")
    at.set_ylim(bottom=0)
    at.legend(fontsize=7)
    return figure


def materialize(rows: Rows) -> Figure:
    """Materialize and fold: share of the byte floor over the records folded, at the largest batch."""
    most = max(row["batch"] for row in rows)
    figure, axes = _panels([f"{op}, batch {most}" for op in ("materialize", "fold")])
    for at, op in zip(axes, ("materialize", "fold"), strict=True):
        for layer, of in group([row for row in rows if (row["op"], row["batch"]) == (op, most)], "layer").items():
            points = sorted((row["count"], row["floor_us"] / row["us"]) for row in of)
            at.plot(*zip(*points, strict=True), marker="o", ms=3, label=layer[0])
        at.set_xlabel("records")
        at.legend(fontsize=7)
    axes[0].set_ylabel("share of the byte floor")
    axes[0].set_ylim(bottom=0)
    return figure


def drift(rows: Rows) -> Figure:
    """Drift: KL divergence from the fp32 state's logits over the position, a panel per model and a line per format.

    A colour is the format that readouts read, a style that of the state it comes from: solid where both are one copy.
    """
    models = group(rows, "model")
    figure, axes = _panels([model for (model,) in models])
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["read"] or row["state"] for row in rows))}
    separate = dict.fromkeys(row["state"] for row in rows if row["read"])
    styles = {None: "-"} | dict(zip(separate, ("--", ":", "-."), strict=False))
    for at, of in zip(axes, models.values(), strict=True):
        for (format, state, read), line in group(of, "format", "state", "read").items():
            points = sorted((position(row), row["kl_mean"]) for row in line)
            style = styles.get(state if read else None, "-.")
            at.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=colours[read or state], label=format)
        _powers(at, "tokens", map(position, of))
        at.set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    axes[0].set_ylabel("mean KL divergence")
    return figure


def engines(rows: Rows) -> Figure:
    """Whole models under SGLang: its step over ours, by GPU-busy time and by the clock, over the batch; a panel per model."""
    found = runs(rows)
    names = list(dict.fromkeys(name for name, _ in found))
    figure, axes = _panels(names)
    for (name, speculative), modes in found.items():
        at = axes[names.index(name)]
        for mode, colour, label in ((STOCK, 0, "stock"), (NATIVE, 1, "its own replay")):
            for key, style in (("ms_per_step", "o-"), ("wall_ms_per_step", "x:")):
                gains = ((batch, gain(row, modes[OURS].get(batch), key)) for batch, row in modes[mode].items())
                points = sorted((batch, times) for batch, times in gains if times is not None)
                if points:
                    shown = ("" if style == "o-" else "_") + label + (", speculative" if speculative else "")
                    at.plot(*zip(*points, strict=True), style, ms=3, color=f"C{colour + 2 * speculative}", label=shown)
    for name, at in zip(names, axes, strict=True):
        if at.lines:
            at.legend(fontsize=7)
        at.axhline(1.0, color="black", lw=0.8)
        _powers(at, "requests of a step", (batch for key in found if key[0] == name for batch in found[key][OURS]))
    axes[0].set_ylabel("SGLang's step / ours; dotted: by the clock")
    axes[0].set_ylim(bottom=0)
    return figure


def over_context(title: str, every: Sequence[Estimate]) -> Figure:
    """An estimate's step over the context: what the attention layers take, and the recurrent ones each way."""
    figure, (at,) = _panels([title])
    figure.set_size_inches(6, 4)
    contexts = [one.context for one in every]
    at.plot(contexts, [one.attention.us for one in every], color="black", label="attention layers")
    for i, way in enumerate(every[0].ways):
        at.plot(contexts, [one.ways[i].recurrent.us for one in every], color=f"C{i}", label=f"recurrent layers, {way.name}")
        at.plot(contexts, [one.ways[i].step_us for one in every], "--", color=f"C{i}", label=f"step, {way.name}")
    _powers(at, "context, tokens", contexts)
    at.set_yscale("log")
    at.set_ylabel("microseconds of a step, one GPU")
    at.legend(fontsize=7)
    return figure
