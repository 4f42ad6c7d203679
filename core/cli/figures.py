"""``replayssm report``: figures and tables of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .refuse import refuse


def report(
    results: Annotated[Path | None, typer.Option(help="Folder of results; default: the committed ones.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of benchmarks.md; figures go into its figures/.")] = Path("docs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw every figure that the results allow and rewrite the tables between the markers of benchmarks.md.

    Where the folder has no benchmarks.md, one of figures and tables alone is written; the table of a README.md beside the
    folder is rewritten as well, that of precision.md, and parity.md from the parity*.json of every machine. What is not
    measured is listed.

    Example: replayssm report --results bench/results/h200 --out docs

    Exit code 0, or 2 for bad input.
    """
    try:
        from replayssm.bench import figures
    except ModuleNotFoundError as failed:
        if failed.name != "matplotlib":
            raise
        refuse("matplotlib is not installed; pip install 'replayssm[cli]'")
    from replayssm.bench import matrix
    from replayssm.bench.report import PAGE, PRECISION, README, advise, bare, drawable, fill, missing, summarise
    from replayssm.bench.results import COMMITTED, load

    page, parity, written = out / PAGE, out / matrix.PAGE, []
    try:
        found, machines = load(results or COMMITTED), matrix.load((results or COMMITTED).parent)
        text = fill(page.read_text() if page.is_file() else bare(), found)
        matrices = matrix.fill(parity.read_text() if parity.is_file() else matrix.BARE, machines)
    except ValueError as error:
        refuse(error)
    for name, rows in drawable(found).items():
        path = out / "figures" / f"{name}.png"
        figures.save(getattr(figures, name)(rows), path)
        written.append(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
    written.append(page)
    if machines:
        parity.write_text(matrices)
        written.append(parity)
    for path, rewritten in ((out.resolve().parent / README, summarise), (out / PRECISION, advise)):
        if path.is_file() and (text := rewritten(path.read_text(), found)) != path.read_text():
            path.write_text(text)
            written.append(path)
    if as_json:
        print(json.dumps({"written": list(map(str, written)), "missing": missing(found)}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for path in written:
        console.print(f"{path}")
    for line in missing(found):
        console.print(f"missing: {line}", style="yellow", markup=False)
