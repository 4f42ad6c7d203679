"""``replayssm doctor``: what works on this machine and why the rest does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .refuse import refuse


def doctor(
    engine: Annotated[str | None, typer.Option(help="Also fail where this engine cannot decode with ReplaySSM.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no tables.")] = False,
) -> None:
    """Run small layers of every family, mode and state format beside the fp64 oracle, and look at the engines.

    Example: replayssm doctor --engine transformers

    Exit code 0: all that is supported here works. 1: something does not. 2: bad input.
    """
    try:
        from .. import doctor
    except ModuleNotFoundError as missing:
        if missing.name != "packaging":
            raise
        refuse("packaging is not installed; pip install 'replayssm[cli]'")
    names = [one.engine for one in doctor.INTEGRATIONS]
    if engine is not None and engine not in names:
        refuse(f"engine: expected one of {', '.join(names)}, got {engine!r}")
    if device not in (None, "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        refuse(f"device: expected cpu{', cuda' if torch.cuda.is_available() else ''}, got {device!r}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    allowed = doctor.supported()
    packages = [doctor.package(name, allowed) for name in ("torch", "triton")]
    running = track(doctor.probes(where), "small layers", doctor.count(), console=Console(stderr=True), transient=True)
    probes = list(running)
    states = tuple(sorted({one.state for one in probes if one.status == "works"}))
    engines = {one.engine: doctor.engine(one, allowed, states) for one in doctor.INTEGRATIONS}
    ok = not any(one.status == "broken" for one in probes) and not any(one.problem for one in packages)
    ok = ok and (engine is None or engines[engine].works)
    found = {
        "ok": ok,
        "machine": doctor.machine(),
        "packages": [asdict(one) for one in packages],
        "device": where,
        "probes": [asdict(one) for one in probes],
        "engines": {name: asdict(one) for name, one in engines.items()},
    }
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    raise typer.Exit(0 if ok else 1)


def _print(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, value in found["machine"].items():
        console.print(f"{name}: {value}", markup=False)
    for one in found["packages"]:
        console.print(f"{one['name']}: {_version(one)}", markup=False)
    probes = found["probes"]
    families = list(dict.fromkeys(one["family"] for one in probes))
    table = Table(f"on {found['device']}, error", "state", *families, box=None, pad_edge=False)
    for mode, state in dict.fromkeys((one["mode"], one["state"]) for one in probes):
        at = {one["family"]: one for one in probes if (one["mode"], one["state"]) == (mode, state)}
        cells = (at[family] for family in families)
        table.add_row(mode, state, *(f"{one['error']:.0e}" if one["status"] == "works" else one["status"] for one in cells))
    console.print(table)
    for reason in dict.fromkeys(f"{one['mode']}: {one['status']}: {one['reason']}" for one in probes if one["reason"]):
        console.print(reason, markup=False)
    for name, one in found["engines"].items():
        console.print(f"{name}: {'works' if one['works'] else 'does not work'}; {_version(one['package'])}", style="bold")
        if one["works"]:
            for what in ("families", "modes", "states"):
                console.print(f"  {what}: {', '.join(one[what])}")
        for reason in one["reasons"]:
            console.print(f"  {reason}", markup=False)
    console.print("all that is supported here works" if found["ok"] else "something does not work", style="bold")


def _version(package: dict[str, Any]) -> str:
    wanted = f", supported {package['supported']}" if package["supported"] else ""
    return f"{package['version'] or 'not installed'}{wanted}"
