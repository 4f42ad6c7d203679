"""How the command says that it cannot do what it was asked."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer


def refuse(error: object) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"replayssm: {' '.join(str(error).split())}", file=sys.stderr)
    raise typer.Exit(2)
