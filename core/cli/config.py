"""``replayssm config``: what an engine is to be told, from the options of ``replayssm plan``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from types import ModuleType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .. import models
from ..configuration import DRAFTS, Choice, Configuration
from .refuse import refuse

ENGINES = ("sglang", "trtllm", "flashinfer")
WINDOW = "the window has the least bytes; with drafts a smaller one may be faster: measure --window 16 beside it"
LIBRARIES = ("packaging", "pydantic", "pydantic_core", "yaml")


def config(
    engine: Annotated[str, typer.Argument(help="One of " + ", ".join(ENGINES) + ".")],
    model: Annotated[str, typer.Option(help="A model's name, a Hugging Face config.json or the folder of a checkpoint.")],
    speculate: Annotated[int, typer.Option(help="Tokens of a request and step, drafts and the one before them.")] = 1,
    acceptance: Annotated[float, typer.Option(help="Probability that a draft stays where all before it did.")] = 0.75,
    drafts: Annotated[str, typer.Option(help=f"Where drafts come from: {' or '.join(DRAFTS)}.")] = "mtp",
    window: Annotated[int | None, typer.Option(help="Records a ring holds; default: the window of least bytes.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Format of the state that the recurrence continues from.")] = "fp32",
    read: Annotated[str | None, typer.Option(help="Format of a copy that readouts use; default: they read the state.")] = None,
    u: Annotated[str | None, typer.Option(help="Dtype of the delta rule's readout helper; default: fp16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print an engine's flags, YAML or environment for decoding a model with ReplaySSM, alone on stdout; notes on stderr.

    Where the engine is installed, its own parser reads them first.

    Example: replayssm config sglang --model Qwen3.5-4B --speculate 4 --read int8

    Exit code 0. 1: the installed engine does not take them. 2: bad input, or a combination that is not supported.
    """
    translation = _translation(engine)
    try:
        choice = Choice(models.find(model), speculate, acceptance, drafts, window, checkpoint, read, u)
        found = translation.configure(choice)
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    validated = _validate(engine, translation, found)
    notes = (*found.notes, *((WINDOW,) if speculate > 1 and window is None else ()))
    if as_json:
        about = {"engine": engine, "model": model, "form": found.form, "text": found.text, "settings": found.settings}
        print(json.dumps(about | {"notes": notes, "validated": validated}, indent=2))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, markup=False)
    console.print(f"read by {engine} {validated}" if validated else f"{engine} is not installed here: not read by its parser")
    print(found.text)


def _translation(engine: str) -> ModuleType:
    """The engine's translation, or the refusal that says why there is none."""
    if engine not in ENGINES:
        refuse(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    name = f"{__package__.rpartition('.')[0]}.integrations.{engine}"
    if importlib.util.find_spec(name) is None:
        refuse(f"engine: this version of ReplaySSM has no integration for {engine}")
    try:
        return importlib.import_module(f"{name}.configuration")
    except ModuleNotFoundError as missing:
        _without(missing)


def _validate(engine: str, translation: ModuleType, found: Configuration) -> str | None:
    """The version of the engine whose parser took the settings; None where it is not installed. Exit 1 where it refuses."""
    try:
        from .. import doctor
    except ModuleNotFoundError as missing:
        _without(missing)
    distribution = next(one.distribution for one in doctor.INTEGRATIONS if one.engine == engine)
    version = doctor.package(distribution, {}).version
    if version is None:
        return None
    console = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr), console.status(f"{engine} {version} reads them"):
        try:
            translation.check(found)
        except Exception as error:  # whatever it is, the engine would stop with it
            print(f"replayssm: {engine} {version}: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(1) from None
    return version


def _without(missing: ModuleNotFoundError) -> NoReturn:
    if missing.name not in LIBRARIES:
        raise missing
    refuse(f"{missing.name} is not installed; pip install 'replayssm[cli]'")
