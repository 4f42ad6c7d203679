"""Makes FlashInfer's own names resolve to our calls, for engines that call FlashInfer, and gives them back."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from . import gdn, kda, mamba, materialize, ucache, update

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 7, 2), (0, 7, 4))  # from, to
VARIABLE = "REPLAYSSM_FLASHINFER"

# Per op: where FlashInfer defines what it replaces, and with what.
OPS: dict[str, tuple[tuple[str, Callable], ...]] = {
    "checkpointing_ssu": (
        ("flashinfer.mamba.checkpointing_ssu", mamba.checkpointing_ssu),
        ("flashinfer.mamba.checkpointing_ssu", mamba.allocate_checkpointing_ssu_scratch),
    ),
    "replayssm_materialize": (("flashinfer.mamba.replayssm_materialize", materialize.replayssm_materialize),),
    "selective_state_update": (("flashinfer.mamba.selective_state_update", update.selective_state_update),),
    "gated_delta_rule_mtp_ucache_flush": (
        ("flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush", ucache.gated_delta_rule_mtp_ucache_flush),
    ),
    "gated_delta_rule_decode_pretranspose": (("flashinfer.gdn_decode", gdn.gated_delta_rule_decode_pretranspose),),
    "recurrent_kda": (("flashinfer.kda", kda.recurrent_kda), ("flashinfer.kda_decode", kda.recurrent_kda)),
}


@dataclass(frozen=True)
class Binding:
    """A name of FlashInfer's that is bound to our call."""

    module: str
    name: str
    original: Callable = field(repr=False)
    ours: Callable = field(repr=False)


@dataclass(frozen=True)
class Installed:
    """What ``install`` replaced; as a context manager, gives it back at the end.

    Attributes:
        ops: those that resolve to ours now.
        absent: those that this FlashInfer cannot import, with the reason; only where none were asked for by name.
    """

    ops: tuple[str, ...]
    absent: dict[str, str]

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exception) -> None:
        uninstall(self.ops)


_installed: dict[str, list[Binding]] = {}


def install(ops: Iterable[str] | None = None) -> Installed:
    """Bind FlashInfer's names of these ops to our calls, in its packages and in the modules that define them.

    Before an engine starts: what it has bound already stays FlashInfer's. Again changes nothing. All else of FlashInfer's,
    its prefill and ``CheckpointingSSURunner`` for callers that look for it, stays as it is.

    Args:
        ops: names of ``OPS``; None takes all that this FlashInfer can import.

    Raises:
        NotImplementedError: another version of FlashInfer. ValueError: an unknown op. ImportError: an op that was asked for
            and cannot be imported. Nothing is replaced then.
    """
    check_version(importlib.import_module("flashinfer").__version__)
    names, absent = list(OPS) if ops is None else _known(list(ops)), {}
    for op in names:
        for module, _ in OPS[op]:
            try:
                importlib.import_module(module)
            except ImportError as error:
                if ops is not None:
                    raise ImportError(f"{op}: FlashInfer's {module} cannot be imported here: {error}") from error
                absent[op] = f"{module}: {error}"
    present = tuple(op for op in names if op not in absent)
    for op in present:
        held = _installed.setdefault(op, [])
        for module, ours in OPS[op]:
            original = next((b.original for b in held if (b.module, b.name) == (module, ours.__name__)), None)
            _bind(held, original or getattr(sys.modules[module], ours.__name__), ours)
    logger.info("FlashInfer's %s are ReplaySSM's", ", ".join(present))
    return Installed(present, absent)


def uninstall(ops: Iterable[str] | None = None) -> None:
    """Give FlashInfer's names back; None: all of them. Ops that are not installed are left alone.

    Raises:
        RuntimeError: something else replaced our call meanwhile; that binding stays.
    """
    foreign = []
    for op in list(_installed) if ops is None else _known(list(ops)):
        for binding in _installed.pop(op, []):
            module = sys.modules[binding.module]
            if getattr(module, binding.name) is binding.ours:
                setattr(module, binding.name, binding.original)
            else:
                foreign.append(f"{binding.module}.{binding.name}")
    if foreign:
        raise RuntimeError(f"uninstall: expected our calls, something else replaced {', '.join(foreign)}")


def install_from_environment() -> Installed | None:
    """``install`` the ops that REPLAYSSM_FLASHINFER names, separated by commas; nothing where it is not set."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    try:
        return install(_known(value.split(",")))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={value!r}: {error}") from None


def check_version(version: str) -> None:
    """NotImplementedError unless the calls were written for this FlashInfer."""
    from packaging.version import Version

    if not SUPPORTED[0] <= (Version(version).release + (0, 0))[:3] <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise NotImplementedError(f"flashinfer: supported are {low} to {high}, got {version}")


def _known(ops: list[str]) -> list[str]:
    for op in ops:
        if op not in OPS:
            raise ValueError(f"ops: expected some of {list(OPS)}, got {op!r}")
    if len(set(ops)) < len(ops):
        raise ValueError(f"ops: expected each once, got {ops}")
    return ops


def _bind(held: list[Binding], original: Callable, ours: Callable) -> None:
    """Bind every name of FlashInfer's loaded modules that holds the original."""
    bound = next((b.ours for b in held if b.original is original), None) or _with_prefill(ours, original)
    for module in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        for name, value in list(vars(sys.modules[module] or object).items()):
            if value is original:
                setattr(sys.modules[module], name, bound)
                held.append(Binding(module, name, original, bound))


def _with_prefill(ours: Callable, original: Callable) -> Callable:
    """Our call; of ``recurrent_kda`` with FlashInfer's own for prefill, which goes by the same name."""
    if ours is not kda.recurrent_kda:
        return ours
    names = list(inspect.signature(ours).parameters)

    @functools.wraps(ours)
    def recurrent_kda(q, *args, **kwargs):
        given = dict(zip(names, (q, *args), strict=False)) | kwargs
        return (original if kda.is_prefill(given) else ours)(q, *args, **kwargs)

    return recurrent_kda
