"""Hugging Face models decode with ReplaySSM: ``enable(model)``, ``model.generate(...)``, ``disable(model)``."""

from . import window  # noqa: F401  # names the attention that config.json of a trained model asks for
from .cache import speculation_of, state_of
from .enable import Enabled, disable, enable
from .speculation import Speculation

__all__ = ["Enabled", "Speculation", "disable", "enable", "speculation_of", "state_of"]
