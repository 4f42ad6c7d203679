"""``replayssm patch``: changes to an engine's own source that a maintainer could merge."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .refuse import refuse

ENGINES = ("flashinfer", "sglang", "trtllm")


def patch(
    engine: Annotated[str, typer.Argument(help=f"One of {', '.join(ENGINES)}.")],
    source: Annotated[Path, typer.Option(help="A checkout of the engine, or the folder of its installed package.")],
    out: Annotated[Path | None, typer.Option(help="File for the patch; default: standard output.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether every anchor is found; print and write no patch.")
    ] = False,
    style: Annotated[str, typer.Option(help="depend: the kernels come from this package. vendor: they are copied.")] = "depend",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report and the patch, null with --check, as one JSON object.")
    ] = False,
) -> None:
    """Print a patch that builds ReplaySSM into an engine's source, which itself is not written. The report is on stderr.

    Example: replayssm patch sglang --source ~/sglang --out replayssm.patch

    Exit code 0: the patch, empty where the source has all of it. 1: an anchor is missing; nothing is written. 2: bad input.
    """
    if importlib.util.find_spec("libcst") is None:
        refuse("libcst is not installed; pip install 'replayssm[cli]'")
    from ..patches import recipe

    if engine not in ENGINES:
        refuse(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if style not in recipe.STYLES:
        refuse(f"style: expected one of {', '.join(recipe.STYLES)}, got {style!r}")
    package = f"{__package__.rpartition('.')[0]}.integrations.{engine}.upstream"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        changes = importlib.import_module(package).recipe(style)
        found = recipe.locate(source, changes)
        made = recipe.make(found, changes)
    except LookupError as error:
        console.print(f"replayssm: {error.args[0]}", markup=False)
        raise typer.Exit(1) from None
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    text = None if check else recipe.mail(made, changes, found) if made.diff else ""
    if as_json:
        steps = [{"file": step.file, "done": step.done, "what": step.what} for step in made.steps]
        head = {"engine": engine, "version": str(found.version), "source": str(found.root)}
        print(json.dumps(head | {"steps": steps, "patch": text}, indent=2))
    else:
        console.print(f"{engine} {found.version} in {found.root}", markup=False)
        for step in made.steps:
            console.print(f"{step.file}: {step.done}: {step.what}", markup=False)
    if out is not None and text is not None:
        out.write_text(text, newline="")
    elif text is not None and not as_json:
        print(text, end="")
