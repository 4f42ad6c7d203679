"""The calls as opaque ops ``torch.ops.replayssm.*`` for torch.compile, their schemas made from their signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

_library = torch.library.Library("replayssm", "FRAGMENT")


def opaque(
    writes: tuple[str, ...],
    out: str | None,
    like: Callable[[dict], Tensor] | None = None,
    returns: Callable[[dict], object] | None = None,
) -> Callable[[Callable], Callable]:
    """Registers a call as an op that torch.compile sees in its place; eager calls go straight to the function.

    Args:
        writes: the tensors it mutates, all of them.
        out: its output argument, if any; an op returns nothing, so under torch.compile the output is allocated before.
        like: the output to allocate where the caller gives none, from the arguments.
        returns: what the call returns, from the arguments; None: the output.
    """

    def register(call: Callable) -> Callable:
        name, signature = call.__name__, inspect.signature(call)
        schema = torch.library.infer_schema(_returning_nothing(call), mutates_args=writes)
        _library.define(f"{name}{schema}")

        def implementation(*args, **kwargs) -> None:
            call(*args, **kwargs)

        for key in ("CPU", "CUDA"):
            _library.impl(name, implementation, key)
        torch.library.register_fake(f"replayssm::{name}", lambda *args, **kwargs: None, lib=_library)
        op, names = getattr(torch.ops.replayssm, name), list(signature.parameters)

        @functools.wraps(call)
        def public(*args, **kwargs):
            if not torch.compiler.is_compiling():
                return call(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            if out is not None and given.get(out) is None and like is not None:
                given[out] = like(given)
            op(**given)
            return returns(given) if returns is not None else given[out] if out is not None else None

        return public

    return register


def _returning_nothing(call: Callable) -> Callable:
    """A function with the call's parameters, for its schema."""

    def prototype() -> None: ...

    signature = inspect.signature(call, eval_str=True)
    prototype.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    return prototype
