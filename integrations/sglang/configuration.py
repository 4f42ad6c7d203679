"""SGLang's flags from a user's choice, and its own parser's reading of them."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

import torch

from ...configuration import Choice, Configuration
from .settings import NAME, POOL_DTYPES, Settings


def configure(choice: Choice) -> Configuration:
    """The flags that ``sglang.launch_server`` takes beside those of the model.

    Raises:
        ValueError, NotImplementedError: what the shim does not offer, by name.
    """
    layout = choice.layout()
    if choice.checkpoint not in POOL_DTYPES:
        raise NotImplementedError(f"checkpoint: supported with SGLang are {', '.join(POOL_DTYPES)}, got {choice.checkpoint!r}")
    ours = Settings(window=layout.W, checkpoint=choice.checkpoint, read=_read(choice.read), u=choice.u)
    sizes = (layout.recurrence, layout.H, layout.G, layout.V, layout.K)
    ours.layout(*sizes, layout.T_max, layout.act, getattr(torch, POOL_DTYPES[choice.checkpoint]))
    backend = "--linear-attn-decode-backend" if layout.recurrence.delta else "--mamba-backend"
    given = ours.model_dump(exclude_none=True)
    flags: dict[str, Any] = {backend: NAME} | {f"--{NAME}-{name}": value for name, value in given.items()}
    notes: list[str] = []
    if choice.tokens > 1:
        flags |= _speculation(choice)
    if choice.tokens > 1 and choice.drafts == "mtp":
        notes.append("the checkpoint must hold the heads that draft (MTP)")
    return Configuration("flags", flags, tuple(notes))


def _read(name: str | None) -> Any:
    known = ("e4m3", "int8", "nvfp4")
    if name not in (None, *known):
        raise NotImplementedError(f"read: supported with SGLang are {', '.join(known)}, got {name!r}")
    return name


def _speculation(choice: Choice) -> dict[str, Any]:
    tokens = {"--speculative-num-draft-tokens": choice.tokens}
    if choice.drafts == "ngram":
        return {"--speculative-algorithm": "NGRAM"} | tokens
    chain = {"--speculative-num-steps": choice.tokens - 1, "--speculative-eagle-topk": 1}
    return {"--speculative-algorithm": "EAGLE"} | chain | tokens


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check(found: Configuration) -> None:
    """SGLang's own parser, with our plugin's options, reads the flags; raises where it refuses them."""
    from . import names

    names.check_version()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = _Parser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    parser.parse_args(["--model-path", "model", *found.flags])
