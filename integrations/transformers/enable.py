"""Switches a transformers model's recurrent layers to ReplaySSM and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType

import torch
import transformers
from torch import nn

from ... import Layout
from .cache import Replay, attach
from .families import MIXERS

logger = logging.getLogger(__name__)

SUPPORTED = ("5.17", "5.20")  # from, below


@dataclass(frozen=True)
class Enabled:
    """What ``enable`` did; as a context manager, disables the model at the end.

    Attributes:
        family: the recurrence's name in ``replayssm.recurrence``.
        layers: recurrent layers that decode with ReplaySSM.
        layout: one layer's sizes and formats.
        bytes_per_request: checkpoint and ring of one row, all layers.
    """

    family: str
    layers: int
    layout: Layout
    bytes_per_request: int
    model: nn.Module = field(repr=False)

    def __str__(self) -> str:
        of = self.layout
        return (
            f"{type(self.model).__name__}: {self.layers} {self.family} layers, window {of.W}, state {of.state}, "
            f"u {str(of.u).removeprefix('torch.')}, {self.bytes_per_request:,} bytes per request"
        )

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception) -> None:
        disable(self.model)


def enable(
    model: nn.Module,
    window: int = 16,
    backend: str | None = None,
    u: torch.dtype | None = None,
    state: str = "fp32",
    debug: bool | None = None,
) -> Enabled:
    """Let a model's recurrent layers decode with ReplaySSM; its prefill and everything else stay transformers' own.

    Only this model's modules change, by an attribute each; no class and no transformers function does. Caches filled
    before are taken over when the model next sees them.

    Args:
        model: a transformers model of a supported class, on one device.
        window: records that a ring holds before it is folded into the checkpoint.
        backend: "triton" or "torch"; None takes triton on CUDA and torch elsewhere.
        u: dtype of the delta rule's readout helper; None takes fp32 for fp32 models and fp16 for others.
        state: the checkpoint's format, "fp32", "bf16" or "fp16".
        debug: check cursors and the order of calls at the price of device reads; None reads REPLAYSSM_DEBUG.

    Returns:
        What was enabled; a context manager that disables at its end.

    Raises:
        ValueError, NotImplementedError: what is not supported, by name; the model is unchanged then.
    """
    _check_version(transformers.__version__)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window: expected an integer >= 1, got {window!r}")
    mixers = _mixers(model)
    family = MIXERS[type(mixers[0]).__name__]
    sizes = {tuple(getattr(mixer, name) for name in family.sizes) for mixer in mixers}
    devices = {parameter.device for mixer in mixers for parameter in mixer.parameters()}
    if len(sizes) > 1 or len(devices) > 1:
        raise NotImplementedError(
            f"model: supported are recurrent layers of one shape on one device, got H, G, V, K {sorted(sizes)} "
            f"on {sorted(map(str, devices))}"
        )
    layout = Layout(family.recurrence, *sizes.pop(), W=window, state=state, act=model.dtype, u=u)

    def replay() -> Replay:
        return Replay(layout, len(mixers), family.transposed, family.decay(mixers), backend, debug)

    replay().allocate(1, devices.pop())  # raises what a first generate() would
    indices = [mixer.layer_idx for mixer in mixers]
    forward = _forward(family.rebind(type(mixers[0]).forward), indices, replay)
    for mixer in mixers:
        mixer.forward = MethodType(forward, mixer)
    enabled = Enabled(family.recurrence.name, len(mixers), layout, layout.slot_bytes * len(mixers), model)
    logger.info("%s", enabled)
    return enabled


def disable(model: nn.Module) -> None:
    """Give a model its own recurrent layers back. Caches it filled while enabled serve no more.

    Raises:
        ValueError: a model that is not enabled.
    """
    mixers = [module for module in model.modules() if _is_ours(module)]
    if not mixers:
        raise ValueError("model: expected one that enable(model) changed, got one that it did not")
    for mixer in mixers:
        del mixer.forward


def _forward(rebound: Callable, indices: list[int], replay: Callable[[], Replay]) -> Callable:
    def replayssm_forward(self, hidden_states, cache_params=None, *args, **kwargs):
        if cache_params is not None:
            attach(cache_params, self.layer_idx, indices, replay)
        return rebound(self, hidden_states, cache_params, *args, **kwargs)

    return replayssm_forward


def _is_ours(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__name__", "") == "replayssm_forward"


def _mixers(model: nn.Module) -> list[nn.Module]:
    """The model's recurrent modules in layer order."""
    supported = f"supported are models with {', '.join(MIXERS)}"
    mixers = [module for module in model.modules() if type(module).__name__ in MIXERS]
    if not mixers:
        raise NotImplementedError(f"model: {type(model).__name__} has no recurrent layer that ReplaySSM knows; {supported}")
    if any(_is_ours(mixer) for mixer in mixers):
        raise ValueError(f"model: {type(model).__name__} is enabled already; call disable(model) first")
    if any("forward" in vars(mixer) for mixer in mixers):
        raise NotImplementedError(
            "model: its recurrent layers have forwards of their own (a device map with hooks, or hub kernels); "
            "load it on one device, without use_kernels"
        )
    return sorted(mixers, key=lambda mixer: mixer.layer_idx)


def _check_version(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2])
    low, below = (tuple(map(int, bound.split("."))) for bound in SUPPORTED)
    if not low <= numbers < below:
        raise NotImplementedError(f"transformers: supported are >= {SUPPORTED[0]} and < {SUPPORTED[1]}, got {version}")
