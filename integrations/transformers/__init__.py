"""Hugging Face models decode with ReplaySSM: ``enable(model)``, ``model.generate(...)``, ``disable(model)``."""

from .cache import state_of
from .enable import Enabled, disable, enable

__all__ = ["Enabled", "disable", "enable", "state_of"]
