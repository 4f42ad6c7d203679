"""What a TensorRT-LLM that has ReplaySSM built in calls (docs/patches.md); a model's configuration carries the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .contract import load
from .managers import selecting
from .register import choose, enable
from .settings import settings_of


def built(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """A model, its recurrent modules hooked where it is one of the contract's; of a composite model the inner one is, too."""
    model = original(config, *args, **kwargs)
    family = next((one.family for one in load().models.values() if one.class_name == type(model).__name__), None)
    if family is not None:
        enable(model, family, settings_of(config.pretrained_config))
    return model


def selected(original: Callable[..., type], model_config: Any, *args: Any, **kwargs: Any) -> type:
    """The cache manager's class with ReplaySSM as its recurrent state."""
    return selecting(original, choose)(model_config, *args, **kwargs)
