"""The ``bench sglang`` commands: options and tables; what they do is the package ``replayssm.bench.sglang``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, Any

import typer
from rich.console import Console

from .refuse import refuse

app = typer.Typer(help="Whole models under SGLang, with and without ReplaySSM, on a CUDA GPU.", no_args_is_help=True)
ENGINE = Path(".engines/sglang/sglang.tar.xz")
CACHE = Path.home() / ".cache/replayssm/engines"
Row = dict[str, Any]
USUAL: Row = {"speculative": False, "tp": 1, "separate": False}

Models = Annotated[list[str] | None, typer.Option("--model", help="May be repeated; default: all.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", help="Requests that decode together; may be repeated.")]
Modes = Annotated[list[str] | None, typer.Option("--mode", help="stock, native_replay or ours; may be repeated.")]
Engine = Annotated[Path, typer.Option(help="What `stage` packed; where it is not there, the installed SGLang is used.")]
Commit = Annotated[str | None, typer.Option(help="Commit to name in the header; default: REPLAYSSM_COMMIT or git's.")]
Tp = Annotated[int, typer.Option(help="SGLang's --tp-size: GPUs that share each layer.")]
Speculative = Annotated[bool, typer.Option(help="Chains of 4 tokens, guessed from the text so far.")]
Extra = Annotated[list[str] | None, typer.Option("--option", help="A further option of SGLang, as --option=--log-level=debug.")]


@app.command()
def stage(
    out: Annotated[Path, typer.Option(help="Folder of the archive, 47 MB.")] = ENGINE.parent,
    cache: Annotated[Path, typer.Option(help="Wheels, kept for the next time.")] = CACHE,
    python: Annotated[str, typer.Option(help="Python of the GPU machine.")] = "3.12",
) -> None:
    """Pack SGLang 0.5.17 for a GPU machine without a network: Python as said, torch 2.11, Triton 3.6."""
    from replayssm.bench.sglang.stage import stage

    archive = stage(out, cache, python, Console(stderr=True).print)
    print(f"{archive}, {archive.stat().st_size / 2**20:.0f} MiB")


@app.command()
def speed(
    model: Models = None,
    batch: Batches = None,
    mode: Modes = None,
    speculative: Speculative = False,
    tp: Tp = 1,
    out: Annotated[Path, typer.Option(help="JSON of rows; those in it already are not measured again.")] = Path("sglang.json"),
    settle: Annotated[int, typer.Option(help="Steps left out at first.")] = 40,
    steps: Annotated[int, typer.Option(help="Steps taken by the clock.")] = 128,
    profiled: Annotated[int, typer.Option(help="Steps under the profiler: whole windows.")] = 48,
    memory: Annotated[float, typer.Option(help="SGLang's --mem-fraction-static.")] = 0.8,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="Start a model's modes together; they measure in turns. Memory must suffice.")
    ] = False,
    option: Extra = None,
    engine: Engine = ENGINE,
    commit: Commit = None,
) -> None:  # fmt: skip
    """Milliseconds per decode step, by the clock and busy on the GPU, with dummy weights: one process a model and mode.

    Exit code 0, 1 where a process failed, or 2 for bad input.
    """
    from replayssm.bench.sglang import launch, modes, shapes
    from replayssm.bench.sglang.turns import Turns
    from replayssm.bench.timing import machine

    names, chosen, batches = model or list(shapes.MODELS), mode or list(modes.MODES), batch or [1, 16, 64, 256]
    _check("model", names, shapes.MODELS)
    _check("mode", chosen, modes.MODES)
    if side_by_side and tp > 1:
        refuse(f"tp: expected 1 with --side-by-side, got {tp}: what waits for its turn would keep a GPU busy")
    site, device = _prepare(engine, tp)
    results = _Results(out, machine(device, commit))

    def run(name: str, one: str) -> Row:
        return {"model": name, "mode": one} | USUAL | {"speculative": speculative, "tp": tp}

    def measure(name: str, jobs: dict[str, Row], one: str) -> None:
        for row in results.guarded(launch.run(jobs[one], one, site, _log(out, run(name, one)))):
            results.add(run(name, one) | row)

    for name in names:
        folder = shapes.write(name, out.with_suffix("") / name)
        jobs: dict[str, Row] = {}
        with TemporaryDirectory() as meeting:
            left = {one: [b for b in batches if not results.has(run(name, one) | {"batch": b})] for one in chosen}
            for one in [one for one in left if not modes.exists(one, folder)]:
                Console(stderr=True).print(f"{name}: left out: SGLang has no {one} for it")
                del left[one]
            left = {one: some for one, some in left.items() if some}
            for number, (one, some) in enumerate(left.items()):
                turns = Turns(meeting, number, len(left)) if side_by_side else None
                jobs[one] = launch.speed(folder, one, some, speculative, settle, steps, profiled, memory, turns, tp)
                jobs[one]["options"] += option or []
            _all(partial(measure, name, jobs), jobs, together=side_by_side)
    results.print()
    if results.failed:
        raise typer.Exit(1)


@app.command()
def parity(
    model: Models = None,
    batch: Batches = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each request.")] = 512,
    pool: Annotated[int, typer.Option(help="Tokens that fit; fewer than the largest batch needs.")] = 16384,
    dtype: Annotated[str, typer.Option(help="bfloat16, or float32 where SGLang's kernels take it.")] = "bfloat16",
    speculative: Speculative = False,
    tp: Tp = 1,
    separate: Annotated[
        bool, typer.Option("--separate", help="A server prefills, another decodes, a GPU each, with different windows.")
    ] = False,
    tie: Annotated[float | None, typer.Option(help="Log-probabilities closer than this tie; default: by dtype.")] = None,
    out: Annotated[Path, typer.Option(help="JSON of rows; models in it already are left out.")] = Path("sglang-parity.json"),
    option: Extra = None,
    engine: Engine = ENGINE,
    commit: Commit = None,
) -> None:  # fmt: skip
    """Greedy tokens with and without ReplaySSM: small models with random weights, CUDA graphs, prefix hits, retraction.

    With several GPUs or with speculation what is compared with is SGLang alone in one server on one GPU, without speculation.
    """
    from replayssm.bench.sglang import folders, launch, modes
    from replayssm.bench.timing import machine

    names, batches = model or list(folders.SIZES), batch or [1, 7, 64]
    _check("model", names, folders.SIZES)
    _check("dtype", [dtype], launch.TIES)
    if separate and (tp > 1 or speculative):
        refuse("separate: expected neither --tp nor --speculative with it")
    tie = launch.TIES[dtype] if tie is None else tie
    site, device = _prepare(engine, 2 if separate else tp)
    results = _Results(out, machine(device, commit))

    def answer(folder: Path, runs: list[Row], answers: dict[int, list[Row]], number: int) -> None:
        run = runs[number]
        job = launch.parity(folder, run["mode"], batches, tokens, pool, dtype, run["speculative"], run["tp"], run["separate"])
        job["options"] += option or []
        answers[number] = list(results.guarded(launch.run(job, run["mode"], site, _log(out, run))))

    for name in names:
        stock: Row = {"model": name, "mode": modes.STOCK} | USUAL
        more = {"speculative": speculative, "tp": tp, "separate": separate}
        runs = [{"model": name, "mode": mode} | more for mode in (modes.STOCK, modes.OURS)]
        runs = [run for run in runs if run != stock and not all(results.has(run | {"batch": b}) for b in batches)]
        if not runs:
            continue
        folder = folders.write(name, out.with_suffix("") / name, dtype, **folders.SIZES[name])
        answers: dict[int, list[Row]] = {}
        _all(partial(answer, folder, [stock, *runs], answers), range(len(runs) + 1), together=tp == 1)
        for number, run in enumerate(runs, 1):
            for one, other in zip(answers[0], answers[number], strict=False):
                found = launch.compared(one["answers"], other["answers"], tie) | {"slot_bytes": other["slot_bytes"]}
                results.add(run | {"batch": one["batch"], "dtype": dtype, "tie": tie} | found)
    results.print()
    if results.failed or any(row["wrong"] for row in results.rows):
        raise typer.Exit(1)


def _check(what: str, given: list[str], known: Any) -> None:
    for name in given:
        if name not in known:
            refuse(f"{what}: expected one of {', '.join(known)}, got {name!r}")


def _log(out: Path, run: Row) -> Path:
    parts = [
        run["model"],
        run["mode"],
        *[f"{key}-{value}" for key, value in run.items() if key in USUAL and value != USUAL[key]],
    ]
    return out.with_suffix("") / f"{'-'.join(parts)}.log"


def _prepare(engine: Path, tp: int) -> tuple[Path | None, Any]:
    """SGLang's folder, and the GPU; refuses what cannot run here."""
    import torch

    from replayssm.bench.sglang import launch

    if not torch.cuda.is_available():
        refuse("bench: expected a CUDA GPU, and torch finds none")
    if not 1 <= tp <= torch.cuda.device_count():
        refuse(f"tp: expected 1 ... {torch.cuda.device_count()}, the GPUs here, got {tp}")
    if engine.is_file():
        return launch.unpack(engine), torch.device("cuda")
    if engine != ENGINE:
        refuse(f"engine: expected an archive that `replayssm bench sglang stage` wrote, got {engine}")
    return None, torch.device("cuda")


def _all(do: Callable[[Any], None], names: Iterable[Any], together: bool) -> None:
    """Does it for every name, one after another or at the same time."""
    with ThreadPoolExecutor(None if together else 1) as pool:
        list(pool.map(do, names))


class _Results:
    """Header and rows in a file, written with every row; what a row does not say is as in USUAL, or does not apply."""

    def __init__(self, path: Path, header: Row) -> None:
        self.path, self.header, self.failed, self._lock = path, header, False, Lock()
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() else []

    def guarded(self, rows: Iterator[Row]) -> Iterator[Row]:
        """A process that fails is reported and remembered; the others go on."""
        try:
            yield from rows
        except RuntimeError as error:
            self.failed = True
            Console(stderr=True).print(f"failed: {error}", markup=False, soft_wrap=True)

    def has(self, wanted: Row) -> bool:
        return any(wanted.items() <= (USUAL | row).items() for row in self.rows)

    def add(self, row: Row) -> None:
        row = {key: value for key, value in row.items() if value is not None and not (key in USUAL and value == USUAL[key])}
        with self._lock:
            self.rows.append(row)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"header": self.header, "rows": self.rows}, indent=1) + "\n")
        Console(stderr=True).print(_said(row), highlight=False, soft_wrap=True)

    def print(self) -> None:
        for row in self.rows:
            print(_said(row))


def _said(row: Row) -> str:
    shown = {key: f"{value:.2f}" if isinstance(value, float) else value for key, value in row.items() if key != "model"}
    return f"{row['model']}: " + ", ".join(f"{key} {value}" for key, value in shown.items())
