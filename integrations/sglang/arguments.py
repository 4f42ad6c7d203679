"""SGLang's command line and its resolution know ReplaySSM: two choices, four options, one place where start-up is refused."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from . import names
from .settings import NAME, POOL_DTYPES, Settings, check, check_place, chosen, overrides_of

CHOICES = ("linear_attn_decode_backend", "mamba_backend")
HELP = {
    "window": "most records between folds of a request's state (default 16)",
    "checkpoint": "format of the states: fp32, bf16, fp16 or fp16+sr (default: as --mamba-ssm-dtype or the model says)",
    "read": "format of a copy of the states that decoding reads: e4m3, int8 or nvfp4 (default: none)",
    "u": "dtype of the delta rule's readout helper: fp32, bf16 or fp16",
}


def register(failure: Exception | None, targets: list[str]) -> None:
    """Register the options and the check with SGLang's hooks, which it puts in place itself, and offer the choices.

    Args:
        failure: why ReplaySSM cannot run here; a server that chose it is then refused with that.
        targets: what else was hooked; one that SGLang then could not hook is a failure, too.
    """
    resolution = names.present(*names.RESOLUTION)[0]
    HookRegistry.register(f"{names.SERVER_ARGS}.add_cli_args", _add_options, HookType.AFTER)
    HookRegistry.register(f"{names.SERVER_ARGS}.from_cli_args", _parse_options, HookType.AROUND)
    HookRegistry.register(resolution, partial(_resolve, failure, targets), HookType.AROUND)
    _offer_choices()


def _offer_choices() -> None:
    from sglang.srt.server_args import ServerArgs

    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    for name in CHOICES:
        choices = next(one.choices for one in hints[name].__metadata__ if getattr(one, "choices", None))
        if NAME not in choices:
            choices.append(NAME)


def _add_options(result: None, parser: argparse.ArgumentParser) -> None:
    """After SGLang's own options."""
    group = parser.add_argument_group("ReplaySSM", f"with --linear-attn-decode-backend {NAME} or --mamba-backend {NAME}")
    for name in Settings.model_fields:
        group.add_argument(f"--{NAME}-{name}", type=int if name == "window" else str, default=None, help=HELP[name])


def _parse_options(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Move the options into --json-model-override-args, which reaches every process and Python's Engine alike."""
    given = {name: getattr(args, f"{NAME}_{name}", None) for name in Settings.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        overrides = overrides_of(args)
        args.json_model_override_args = json.dumps(overrides | {NAME: overrides.get(NAME, {}) | given})
    return original(cls, args)


def _resolve(failure: Exception | None, targets: list[str], original: Callable[[Any], None], server_args: Any) -> None:
    """In the midst of SGLang's resolution of the server arguments: the one place where start-up is refused."""
    if any(chosen(server_args)):
        missing = [target for target in targets if target not in HookRegistry._patched]
        if missing and failure is None:
            failure = RuntimeError(f"SGLang could not hook {', '.join(missing)}; its log says why")
        if failure is not None:
            raise RuntimeError(f"{NAME} cannot run here: {failure}") from failure
    resolve(server_args)
    original(server_args)


def resolve(server_args: Any) -> None:
    """Check the arguments of a server that chose us, and decide what follows from them; refuse settings without a choice."""
    check_place(server_args)
    if any(chosen(server_args)):
        _decide(server_args, check(server_args))


def _decide(server_args: Any, settings: Settings) -> None:
    """The pool's dtype follows from the checkpoint's format."""
    if settings.checkpoint is None:
        return
    dtype, given = POOL_DTYPES[settings.checkpoint], server_args.mamba_ssm_dtype
    if given not in (None, dtype):
        raise ValueError(f"--mamba-ssm-dtype: expected {dtype} with --{NAME}-checkpoint {settings.checkpoint}, got {given}")
    names.decide(server_args, mamba_ssm_dtype=dtype)
