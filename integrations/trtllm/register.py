"""Registers model classes over TensorRT-LLM's, and puts ReplaySSM into the cache managers that it picks for them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from replayssm import Recurrence

from . import engine
from .contract import Family, Model, load
from .engine import Refused
from .layouts import recurrence_of
from .managers import selecting
from .mixers import Hooks
from .settings import Settings, settings_of

_registered_over: dict[type, type] = {}


def register() -> list[str]:
    """Register every model of the contract that this release has; again changes nothing.

    A TensorRT-LLM that has ReplaySSM built in calls us itself: nothing is registered. A release that the contract does not
    hold for is not refused here, where no model is loaded, but by each model that asks for ReplaySSM.

    Returns:
        The architectures registered.
    """
    if engine.built_in():
        return []
    done = []
    for architecture, model in load().models.items():
        base = _base(model)
        if base is None:
            engine.fallback(f"{architecture}: expected {model.class_name} in {model.module}, found none")
        else:
            if base not in _registered_over:
                _registered_over[base] = _registered(base, model.family)
                engine.require("register_auto_model")(architecture)(_registered_over[base])
            done.append(architecture)
    _select_managers()
    return done


def _base(model: Model) -> type | None:
    try:
        return getattr(importlib.import_module(model.module), model.class_name, None)
    except ImportError:
        return None


def _registered(base: type, family: Family) -> type:
    """A subclass that hooks its recurrent modules once it is built. Workers import the module that it names."""

    class Registered(base):
        def __init__(self, model_config: Any, *args: Any, **kwargs: Any) -> None:
            settings = settings_of(model_config.pretrained_config)
            super().__init__(model_config, *args, **kwargs)
            enable(self, family, settings)

    Registered.__name__, Registered.__qualname__, Registered.__module__ = base.__name__, base.__qualname__, __package__ or ""
    return Registered


def enable(model: Any, family: Family, settings: Settings) -> Hooks | None:
    """Hook a model's recurrent modules as its settings say; None where it stays TensorRT-LLM's own.

    Raises: Refused: why not, with mode "require".
    """
    if settings.mode == "off":
        return None
    try:
        engine.check_version()
        return Hooks(model, family, settings)
    except Refused as reason:
        if settings.mode == "require":
            raise
        engine.fallback(reason)
        return None


def choose(model_config: Any) -> tuple[Recurrence, Settings] | None:
    """What a model's cache manager shall hold; None for its own state. Raises Refused, with mode "require"."""
    config = model_config.pretrained_config
    settings = settings_of(config)
    if settings.mode == "off":
        return None
    try:
        engine.check_version()
        names = getattr(config, "architectures", None) or []
        model = next((load().models[name] for name in names if name in load().models), None)
        if model is None:
            raise Refused(f"architecture {names}: supported are {sorted(load().models)}")
        return recurrence_of(model.family, config), settings
    except Refused as reason:
        if settings.mode == "require":
            raise
        engine.fallback(reason)
        return None


def _select_managers() -> None:
    """Rebind the function that picks cache managers, wherever it was imported by name already."""
    found = engine.locate(load().symbol("get_kv_cache_manager_cls"))
    if found is None or hasattr(found[1], "__wrapped__"):
        return
    original = found[1]
    ours = selecting(original, choose)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == load().package and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, ours)
