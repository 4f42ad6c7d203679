# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers' decode by ReplaySSM, with `kv_cache_config.mamba_replay`.

Its kernels are imported in processes whose configuration asks for it, and in no others.
"""

import functools
import importlib
import inspect
from typing import Any, Callable

KEY = "replayssm"
PACKAGE = "replayssm.integrations.trtllm.builtin"


def configured(load: Callable[..., Any]) -> Callable[..., Any]:
    """Put what the user asked for on the loaded model's configuration."""

    @functools.wraps(load)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = load(self, *args, **kwargs)
        asked = self.llm_args.kv_cache_config.mamba_replay
        if asked is not None and asked.mode != "off":
            pretrained = config.pretrained_config
            for one in (pretrained, getattr(pretrained, "text_config", None)):
                if one is not None:
                    setattr(one, KEY, asked.model_dump())
        return config

    return hooked


def around(hook: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call the package's hook in a function's place, which it gets as first argument.

    The function's own first argument is a model's configuration.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            config = args[0] if args else kwargs[name]
            if getattr(config.pretrained_config, KEY, None) is None:
                return function(*args, **kwargs)
            rest = {key: value for key, value in kwargs.items() if key != name}
            return getattr(_hooks(), hook)(function, config, *args[1:], **rest)

        return hooked

    return decorate


def _hooks() -> Any:
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as missing:
        if missing.name != KEY:
            raise
        raise ImportError(
            f"kv_cache_config.mamba_replay needs the package {KEY}: pip install {KEY}"
        ) from missing
