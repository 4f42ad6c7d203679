"""ReplaySSM decode backends for recurrent layers.

Kernels and pool are imported in a process whose server chose a backend, and in no other.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable

from sglang.srt.runtime_context import get_exec

NAME = "replayssm"
PACKAGE = "replayssm.integrations.sglang.builtin"


def resolve(server_args: Any) -> None:
    """Validate the options, and declare what follows from them."""
    names = ("window", "checkpoint", "read", "u")
    given = [
        f"--{NAME}-{name}"
        for name in names
        if getattr(server_args, f"{NAME}_{name}") is not None
    ]
    if NAME in (server_args.linear_attn_decode_backend, server_args.mamba_backend):
        _hooks().resolve(server_args)
    elif given:
        raise ValueError(
            f"{', '.join(given)}: expected --linear-attn-decode-backend {NAME} "
            f"or --mamba-backend {NAME} as well"
        )


def around(hook: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call the package's hook in a function's place, which it gets as first argument."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not _chosen():
                return function(*args, **kwargs)
            return getattr(_hooks(), hook)(function, *args, **kwargs)

        return hooked

    return decorate


def become(backend: Any, model_runner: Any) -> None:
    """After the construction of an attention backend of recurrent layers."""
    if _chosen():
        _hooks().become(None, backend, model_runner)


def show(collector: Any) -> None:
    """After the scheduler's metrics were shown."""
    if _chosen():
        _hooks().show(None, collector)


def state_update(**options: Any) -> Any:
    """The backend of Mamba-2's selective state update."""
    return _hooks().ReplaySSU(**options)


def _chosen() -> bool:
    try:
        mamba = get_exec().mamba
    except ValueError:  # nothing was configured: parts of SGLang on their own
        return False
    return NAME in (mamba.linear_attn_decode_backend, mamba.mamba_backend)


def _hooks() -> Any:
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as missing:
        if missing.name != NAME:
            raise
        raise ImportError(
            f"the {NAME} backends need the package {NAME}: pip install {NAME}"
        ) from missing
