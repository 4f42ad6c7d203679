"""The installed TensorRT-LLM: its version, and its symbols by the names of the contract."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from .contract import Symbol, load

logger = logging.getLogger(__name__)
_said: set[str] = set()


class Refused(NotImplementedError):
    """Why ReplaySSM does not run in this engine: raised with mode "require", said once with "auto"."""


def version() -> str:
    """The installed release. Raises ModuleNotFoundError where there is none."""
    return str(importlib.import_module(load().package).__version__)


def check_version() -> None:
    """Raise Refused unless the contract holds for the installed release."""
    contract, found = load(), version()
    if not contract.supports(found):
        raise Refused(f"TensorRT-LLM {found}: supported are {contract.versions}")


def built_in() -> bool:
    """Whether this TensorRT-LLM was patched (docs/patches.md)."""
    module = f"{load().package}._torch.replayssm"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not _absent(module, error):
            raise
        return False
    return True


def locate(symbol: Symbol) -> tuple[str, Any] | None:
    """The first of a symbol's modules that has it, and what it is there; None where none has."""
    for module in symbol.modules:
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not _absent(module, error):
                raise
            continue
        for part in symbol.name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return module, found
    return None


def find(name: str) -> Any | None:
    """A symbol of the contract, or None where the installed release has none of its modules."""
    found = locate(load().symbol(name))
    return found and found[1]


def require(name: str) -> Any:
    """A symbol of the contract. Raises Refused, naming where it was looked for."""
    symbol = load().symbol(name)
    found = locate(symbol)
    if found is None:
        raise Refused(f"TensorRT-LLM {version()}: expected {name} in {' or '.join(symbol.modules)}, found none")
    return found[1]


def memory(address: int, dtype: torch.dtype, elements: int) -> Tensor:
    """A tensor [elements] over memory that the engine owns."""
    return require("convert_to_torch_tensor")(require("TensorWrapper")(address, dtype, [elements]))


def fallback(reason: Exception | str) -> None:
    """Mode "auto": say once per rank that TensorRT-LLM decodes as it does without ReplaySSM."""
    once(f"ReplaySSM is not used: {reason}", logging.WARNING)


def once(message: str, level: int = logging.INFO) -> None:
    """Log a message the first time this process, which is one rank, says it."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def _absent(module: str, error: ModuleNotFoundError) -> bool:
    """Whether the module itself or a package above it is what is missing, not something that it imports."""
    return error.name is not None and (module == error.name or module.startswith(f"{error.name}."))
