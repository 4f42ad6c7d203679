"""The ``bench`` commands: options and tables; what they do is the package ``replayssm.bench``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import bench_sglang
from .refuse import refuse

app = typer.Typer(help="Time our kernels beside the peers' on a CUDA GPU, or fetch the peers.", no_args_is_help=True)
app.add_typer(bench_sglang.app, name="sglang")
PEERS = Path(".peers")
WORKERS = min(16, os.cpu_count() or 1)
CACHE = Path.home() / ".cache/replayssm/peers"

Layers = Annotated[list[str] | None, typer.Option("--layer", help="A model's layer; may be repeated; default: all.")]
Peers = Annotated[Path, typer.Option(help="Folder that `replayssm bench stage` wrote; without it, ours alone.")]
Out = Annotated[Path | None, typer.Option(help="File to write header and rows to, as JSON.")]
Commit = Annotated[str | None, typer.Option(help="Commit to name in the header; default: REPLAYSSM_COMMIT or git's.")]
Json = Annotated[bool, typer.Option("--json", help="Print header and rows as JSON and no table.")]


@app.command()
def stage(
    out: Annotated[Path, typer.Option(help="Folder to fill; about 60 MB.")] = PEERS,
    cache: Annotated[Path, typer.Option(help="Wheels and compiled objects, kept for the next time.")] = CACHE,
    python: Annotated[str, typer.Option(help="Python of the GPU machine.")] = "3.12",
    arch: Annotated[str, typer.Option(help="Compute capability of its GPU.")] = "9.0",
    cuda: Annotated[Path, typer.Option(envvar="CUDA_HOME", help="CUDA toolkit to compile with.")] = Path("/usr/local/cuda"),
    compile: Annotated[bool, typer.Option(help="Compile the CUDA kernels: FlashInfer's Mamba-2 and SGLang's KDA.")] = True,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens a step of FlashInfer's objects, six minutes each; default: 1, 4 and 8.")
    ] = None,
) -> None:
    """Fetch the peers' kernels from the package index, to be copied to the GPU machine; needs no GPU.

    Example: replayssm bench stage --python 3.12 --arch 9.0

    Exit code 0, or 2 for bad input.
    """
    from replayssm.bench.stage import mamba2_objects, stage

    try:
        stage(
            out,
            cache,
            python,
            arch,
            cuda if compile else None,
            mamba2_objects(tokens or (1, 4, 8)),
            say=Console(stderr=True).print,
        )
    except ValueError as error:
        refuse(error)


@app.command()
def decode(
    layer: Layers = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Requests of a step; may be repeated.")] = None,
    format: Annotated[
        list[str] | None, typer.Option(help="Format of the state, or state/read; may be repeated; default: fp32.")
    ] = None,
    u: Annotated[
        list[str] | None, typer.Option("--u", help="Format of the delta rule's readout helper; may be repeated.")
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Records a ring holds before it is folded; may be repeated; default: 16.")
    ] = None,
    peers: Peers = PEERS,
    replays: Annotated[int, typer.Option(help="Replays of each graph; the median counts.")] = 8,
    trace: Annotated[bool, typer.Option(help="Also time every step after one admission of the largest batch.")] = True,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that compile our kernels before anything is timed; 0: as they are needed.")
    ] = WORKERS,
    out: Out = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep what --out has of other layers, batches, formats and windows.")
    ] = False,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """One token a request: microseconds per layer and step over whole flush cycles, share of the byte floor, ratios.

    Every format and window is a row. Peers hold fp32 states whatever ours are; those that replay, the first window.

    Example: replayssm bench decode --layer Qwen3.5-4B --batch 64 --batch 256

    Example: replayssm bench decode --batch 256 --format fp32/e4m3 --format fp16+sr/nvfp4 --window 16 --window 24

    Exit code 0, or 2 for bad input.
    """
    if keep and out is None:
        refuse("keep: expected --out, the file to add to")
    names, with_peers = _prepare(layer, [*(batch or ()), *(window or ())], peers)
    import torch

    from replayssm.bench import decode, timing, warm
    from replayssm.bench.check import ROWS
    from replayssm.bench.precision import Precision
    from replayssm.bench.results import kept
    from replayssm.bench.trace import steps

    batches, windows = batch or list(decode.BATCHES), window or [16]
    try:
        precisions = Precision.parse(format or ["fp32"], u or ())
        of = {name: decode.layouts(name, precisions, windows) for name in names}
        results = kept(out, timing.machine(torch.device("cuda"), commit)) if keep and out else None
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    results = results or _results(timing.header(commit))
    head, every = results["header"], [layout for some in of.values() for layout in some]
    compiled = warm.compiled(every, list(dict.fromkeys((*batches, ROWS))), workers)
    _progress("compiled", compiled, len(every) if workers else 0, lambda _: None)
    rows = (
        row
        for name in names
        for row in decode.rows(name, batches, of[name], head["read_ceiling"], with_peers, replays, head["checks"])
    )
    _measure(results, "rows", rows, len(every) * len(batches), out)
    traces = (steps(name, max(batches), windows[0]) for name in names if trace)
    _measure(results, "trace", traces, len(names) if trace else 0, out)
    _print(results, as_json)


@app.command()
def verify(
    layer: Layers = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Requests of a step; may be repeated.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a request and step; may be repeated.")] = None,
    window: Annotated[list[int] | None, typer.Option(help="Windows to choose from; may be repeated.")] = None,
    peers: Peers = PEERS,
    replays: Annotated[int, typer.Option(help="Replays of each graph; the median counts.")] = 5,
    out: Out = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """T tokens a request, of which a random number stays: microseconds at the best window, also over one conventional step.

    Example: replayssm bench verify --layer Qwen3.5-4B --tokens 4

    Exit code 0, or 2 for bad input.
    """
    names, with_peers = _prepare(layer, [*(batch or ()), *(tokens or ()), *(window or ())], peers)
    from replayssm.bench import timing, verify

    batches, T, windows = batch or list(verify.BATCHES), tokens or list(verify.TOKENS), window or list(verify.WINDOWS)
    if max(T) > max(verify.TOKENS):
        refuse(f"tokens: expected at most {max(verify.TOKENS)}, got {max(T)}")
    if max(T) > max(windows):
        refuse(f"window: expected one of at least {max(T)} tokens, got {windows}")
    results = _results(timing.header(commit))
    rows = verify.rows(
        names, batches, T, windows, results["header"]["read_ceiling"], with_peers, replays, results["header"]["checks"]
    )
    _measure(results, "rows", rows, len(names) * len(batches) * len(T), out)
    _print(results, as_json)


@app.command()
def materialize(
    layer: Layers = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Requests at once; may be repeated.")] = None,
    count: Annotated[list[int] | None, typer.Option("--count", help="Records of a request; may be repeated.")] = None,
    state: Annotated[list[str] | None, typer.Option("--state", help="Checkpoint format; may be repeated.")] = None,
    window: Annotated[int, typer.Option(help="Records a ring holds before it is folded.")] = 16,
    replays: Annotated[int, typer.Option(help="Replays of each graph; the median counts.")] = 8,
    out: Out = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """The exact states of some requests, all layers at once, into a buffer and in place: microseconds, share of the floor.

    Example: replayssm bench materialize --layer Qwen3.5-4B --count 8

    Exit code 0, or 2 for bad input.
    """
    names, _ = _prepare(layer, [*(batch or ()), window], PEERS)
    from replayssm.bench import materialize, timing

    batches, states = batch or list(materialize.BATCHES), state or ["fp32"]
    counts = count or [n for n in materialize.COUNTS if n <= window]
    if not 0 <= min(counts) <= max(counts) <= window:
        refuse(f"count: expected 0 ... window = {window}, got {counts}")
    for name in states:
        if name not in materialize.ERROR_BOUND:
            refuse(f"state: expected one of {', '.join(materialize.ERROR_BOUND)}, got {name!r}")
    results = _results(timing.header(commit))
    head = results["header"]
    rows = materialize.rows(names, batches, states, window, counts, head["read_ceiling"], replays, head["checks"])
    _measure(results, "rows", rows, len(names) * len(states) * len(batches) * len(counts) * len(materialize.OPERATIONS), out)
    _print(results, as_json)


@app.command()
def host(
    layer: Layers = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Requests of a step; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that 32 steps are launched and waited for.")] = 20,
    out: Out = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """What plan, step and commit take of the host, run eagerly without waiting: microseconds a call, allocations a step.

    Example: replayssm bench host --layer Qwen3.5-4B --batch 64

    Exit code 0, or 2 for bad input.
    """
    names, _ = _prepare(layer, [*(batch or ()), rounds], PEERS)
    import torch

    from replayssm.bench import host, timing

    batches, console = batch or list(host.BATCHES), Console(highlight=False)
    results = {"header": timing.machine(torch.device("cuda"), commit), "rows": []}
    table = Table("layer", "batch", "step", "call", "us", "90 %", "allocations a step", box=None, pad_edge=False)
    for row in host.rows(names, batches, rounds):
        results["rows"].append(row)
        table.add_row(
            row["layer"],
            str(row["batch"]),
            f"{row['kind']}, T {row['T']}",
            row["call"],
            *(f"{row[key]:.1f}" for key in ("us", "us_90")),
            f"{row['allocations']:.2f}",
        )
    _write(results, out)
    if as_json:
        print(json.dumps(results, indent=1))
        return
    console.print(", ".join(map(str, results["header"].values())))
    console.print(table)


def _prepare(layers: list[str] | None, sizes: list[int], peers: Path) -> tuple[list[str], bool]:
    """Layers to measure and whether the peers are there; refuses what cannot run here."""
    import torch

    from replayssm.bench import peers as projects
    from replayssm.bench import work

    names = layers or list(work.MODELS)
    for name in names:
        if name not in work.MODELS:
            refuse(f"layer: expected one of {', '.join(work.MODELS)}, got {name!r}")
    for size in sizes:
        if size < 1:
            refuse(f"batch, tokens, window: expected >= 1, got {size}")
    if not torch.cuda.is_available():
        refuse("bench: expected a CUDA GPU, and torch finds none")
    if peers.is_dir():
        projects.use(peers)
    elif peers != PEERS:
        refuse(f"peers: expected a folder that `replayssm bench stage` wrote, got {peers}")
    return names, peers.is_dir()


def _results(header: dict[str, Any]) -> dict[str, Any]:
    return {"header": header | {"checks": {}}, "rows": []}


def _measure(results: dict[str, Any], key: str, rows: Iterable[dict[str, Any]], total: int, out: Path | None) -> None:
    """Gather rows under the key, each written at once, so that a run cut short keeps what it has."""
    from replayssm.bench.results import identity

    def gather(row: dict[str, Any]) -> str:
        others = [one for one in results.get(key, ()) if identity(one) != identity(row)]
        results[key] = [*others, row]
        _write(results, out)
        return f"{row['layer']}, {_case(row)}: {row['us']:.1f} us" if key == "rows" else ""

    _progress(key, rows, total, gather)


def _progress(name: str, done: Iterable[Any], total: int, say: Callable[[Any], str | None]) -> None:
    """A bar over what is done, and a line for each where there is something to say."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=total)
        for one in done:
            text = say(one)
            progress.advance(task)
            if text:
                progress.console.print(text, highlight=False)


def _write(results: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


def _print(results: dict[str, Any], as_json: bool) -> None:
    """The table, what is absent and why, and the output errors; or all of it as JSON."""
    if as_json:
        print(json.dumps(results, indent=1))
        return
    console, head = Console(highlight=False, width=200), results["header"]
    console.print(f"{head['device']}, torch {head['torch']}, Triton {head['triton']}, commit {head['commit'][:12]}")
    console.print(f"read ceiling {head['read_ceiling'] / 1e12:.2f} TB/s")
    columns = ("layer", "case", "us", "spread", "floor us", "share", "of one step", "peers, us (ratio)")
    table = Table(*columns, box=None, pad_edge=False)
    for row in results["rows"]:
        peers = ", ".join(f"{name} {us:.1f} ({us / row['us']:.2f})" for name, us in row.get("peers", {}).items())
        figures = (row["us"], row["spread_us"], row["floor_us"])
        table.add_row(
            row["layer"],
            _case(row),
            *(f"{x:.1f}" for x in figures),
            f"{row['floor_us'] / row['us']:.2f}",
            f"{row['us'] / row['one_step_us']:.2f}" if row.get("one_step_us") else "",
            peers,
        )
    console.print(table)
    for one in results.get("trace", ()):
        console.print(
            f"{one['layer']}, batch {one['batch']}, one admission: slowest step {one['slowest_over_mean']:.2f} x mean"
        )
    absent = {(row["layer"], name): reason for row in results["rows"] for name, reason in row.get("absent", {}).items()}
    for (layer, name), reason in absent.items():
        console.print(f"absent: {name} for {layer}: {reason}", markup=False, soft_wrap=True)
    for layer, found in head["checks"].items():
        errors = ", ".join(f"{name} {error:.1e}" for name, error in found.items() if not isinstance(error, str))
        console.print(f"output errors against fp64, {layer}: {errors}", soft_wrap=True)


def _case(row: dict[str, Any]) -> str:
    """What a row measures of its layer."""
    step = f"T {row['T']}" if "T" in row else f"{row['op']} of {row['count']}"
    return f"batch {row['batch']}, {step}, W {row['W']}, {row['state']}" + (f"/{row['read']}" if row["read"] else "")
