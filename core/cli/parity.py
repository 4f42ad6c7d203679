"""``replayssm parity``: the same requests by every implementation, beside fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..configuration import DTYPES
from ..layout import Layout
from ..models import MODELS
from ..parity import SCENARIOS, Entry, cells, implementations, rows, vectors, within
from ..parity import scenario as script
from ..recurrence import FAMILIES
from .bench import PEERS, Commit, Json, Out, Peers
from .refuse import refuse

# Heads and dimensions: small ones that the interpreter can run, and those of served models.
SMALL = {name: (2, 2 if name.startswith("kda") else 1, 16, 32) for name in FAMILIES}
SERVED = {"mamba2": "Nemotron-3-Super-120B-A12B", "gdn": "Qwen3.5-4B", "kda": "Kimi-Linear-48B-A3B"}


def parity(
    family: Annotated[list[str] | None, typer.Option(help="mamba2, gdn, kda, kda_safe or gla; may be repeated.")] = None,
    scenario: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SCENARIOS)}; may be repeated.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Begin of an implementation's name, as 'core' or 'SGLang'; may be repeated.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Activations: fp32, bf16, fp16; default: fp32 and bf16.")] = None,
    state: Annotated[str, typer.Option(help="Format of the state that the recurrence continues from.")] = "fp32",
    read: Annotated[str | None, typer.Option(help="Format of a copy that readouts use; default: they read the state.")] = None,
    window: Annotated[int, typer.Option(help="Records of a ring; default: 16 on a GPU, else 8.")] = 0,
    served: Annotated[bool | None, typer.Option(help="Served models' heads and dimensions; default: on a GPU.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    seed: Annotated[int, typer.Option(help="Which inputs.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    peers: Peers = PEERS,
    check_vectors: Annotated[
        bool, typer.Option("--vectors", help="Check the golden vectors instead, on our own implementations.")
    ] = False,
    out: Out = None,
    commit: Commit = None,
    as_json: Json = False,
) -> None:
    """Run fixed requests through every implementation and compare outputs, states and greedy tokens with fp64.

    Ours: torch, Triton, and the engines' shims in their own layouts. Native: the engines' and libraries' own kernels, of those
    that are installed or staged by `replayssm bench stage`. An error passes within four times that of a plain torch run in the
    same precision. Without a GPU, TRITON_INTERPRET=1 runs Triton's kernels.

    Example: replayssm parity --family gdn --scenario verify --scenario rejection

    Exit code 0: ours within bounds; native kernels beyond them are findings and only marked. 1: ours is not. 2: bad input.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = where.startswith("cuda")
    try:
        served, window = on_gpu if served is None else served, window or (16 if on_gpu else 8)
        layouts = [
            _layout(name, served, window, one, state, read)
            for name in _known("family", family, list(FAMILIES))
            for one in _known("dtype", dtype, list(DTYPES), ["fp32", "bf16"])
        ]
        entries = _chosen(implementation, peers)
        names = _known("scenario", scenario, list(SCENARIOS))
        script(names[0], layouts[0].W)  # a window that is too short is refused here
        options = {"window": window, "layers": layers, "served": served}
        if check_vectors:
            total, results = vectors.total(entries, family), vectors.check(entries, family, where)
        else:
            total = len(layouts) * sum(len(cells(entries, name)) for name in names)
            results = rows(entries, layouts, names, layers=layers, device=where, seed=seed)
        found = _run(results, total, _header(where, commit) | ({} if check_vectors else options), out)
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found["rows"])
    raise typer.Exit(0 if all(within(row) or row["native"] for row in found["rows"]) else 1)


def _known(argument: str, given: list[str] | None, known: list[str], default: list[str] | None = None) -> list[str]:
    for name in given or ():
        if name not in known:
            raise ValueError(f"{argument}: expected one of {', '.join(known)}, got {name!r}")
    return given or default or known


def _layout(family: str, served: bool, window: int, dtype: str, state: str, read: str | None) -> Layout:
    H, G, V, K = SMALL[family]
    if served:
        model = MODELS[SERVED.get(family, SERVED["kda"])]
        H, G, V, K = model.H, model.G, model.V, model.K
    return Layout(family, H, G, V, K, window, state=state, read=read, act=DTYPES[dtype])  # type: ignore[arg-type]


def _chosen(names: list[str] | None, peers: Path) -> list[Entry]:
    """The implementations whose names begin so, with the staged peers in reach."""
    from replayssm.bench import peers as projects

    if peers.is_dir():
        projects.use(peers)
    elif peers != PEERS:
        raise ValueError(f"peers: expected a folder that `replayssm bench stage` wrote, got {peers}")
    known = implementations()
    found = [one for one in known if not names or any(one.name.lower().startswith(name.lower()) for name in names)]
    if not found:
        raise ValueError(f"implementation: expected the begin of one of {', '.join(one.name for one in known)}, got {names}")
    return found


def _header(where: str, commit: str | None) -> dict[str, Any]:
    from replayssm.bench.timing import machine

    about = machine(torch.device(where), commit)
    return about | ({} if where.startswith("cuda") else {"device": "CPU, Triton in its interpreter"})


def _run(results: Any, total: int, header: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """All rows, written as they come."""
    found: dict[str, Any] = {"header": header, "rows": []}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("parity", total=total)
        for row in results:
            found["rows"].append(row)
            progress.update(task, advance=1, description=f"{row['family']} {row['scenario']} {row['implementation']}")
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _print(found: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, width=200)
    columns = ("family", "act", "scenario", "implementation", "outputs", "bound", "states", "bound", "lossless", "tokens", "")
    table = Table(*columns, box=None, pad_edge=False)
    for row in found:
        if "absent" not in row:
            errors = [
                row.get(name) for name in ("output_error", "output_bound", "state_error", "state_bound", "lossless_error")
            ]
            verdict = "" if within(row) else "beyond: a finding" if row["native"] else "BEYOND"
            name = row["implementation"] + (f" -> {row['to']}" if "to" in row else "")
            tokens = f"{row['tokens'] - row['tokens_differing']}/{row['tokens']}" if "tokens" in row else ""
            shown = ("" if x is None else f"{x:.1e}" for x in errors)
            table.add_row(row["family"], row["act"], row["scenario"], name, *shown, tokens, verdict)
    console.print(table)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in found:
        if "absent" in row:
            reasons.setdefault((row["implementation"], row["absent"]), []).append(f"{row['family']} {row['scenario']}")
    for (name, reason), where in reasons.items():
        cases = list(dict.fromkeys(where))
        some = ", ".join(cases) if len(cases) < 6 else f"{len(cases)} cases"
        console.print(f"not available: {name} ({some}): {reason}", markup=False, soft_wrap=True)
    ours = [row for row in found if not row["native"] and "absent" not in row]
    beyond = sum(not within(row) for row in ours)
    natives = sum(not within(row) for row in found if row["native"])
    console.print(f"ours: {len(ours)} results, {beyond} beyond bounds; native: {natives} findings", style="bold")
