"""How the command says that it cannot do what it was asked."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import NoReturn

import typer

PRESETS = "..integrations.transformers.presets"


def refuse(error: object) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"replayssm: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(2)


def with_transformers(name: str) -> ModuleType:
    """A module of this package that needs transformers, or the refusal that says how to install it."""
    try:
        return importlib.import_module(name, __package__)
    except ModuleNotFoundError as missing:
        if missing.name not in ("transformers", "tokenizers"):
            raise
        refuse(f"{missing.name} is not installed; pip install 'replayssm[cli,transformers]'")
