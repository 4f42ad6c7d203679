"""Backend "replayssm": recurrent layers' calls on Triton kernels.

They are imported by the first call that asks for the backend, and by no other.
"""

import functools
import importlib
from types import ModuleType

PACKAGE = "replayssm.integrations.flashinfer"


@functools.cache
def replayssm_ops() -> ModuleType:
    """Functions by FlashInfer's names, which take its arguments and tensors."""
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as missing:
        if missing.name != "replayssm":
            raise
        raise ImportError(
            'backend="replayssm" needs the package replayssm: pip install replayssm'
        ) from missing
