"""The command line: ``replayssm --help`` names its commands."""

import sys


def main() -> None:
    """Entry point of the ``replayssm`` command."""
    try:
        from .app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        print(f"replayssm: {missing.name} is not installed; pip install 'replayssm[cli,transformers]'", file=sys.stderr)
        sys.exit(2)
    app()
