"""Switches a transformers model's recurrent layers to ReplaySSM and back."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType

import torch
import transformers
from torch import nn

from ... import Layout
from ...metrics import Meter, prometheus
from .cache import Replay, attach
from .families import MIXERS, Call

logger = logging.getLogger(__name__)

SUPPORTED = ("5.17", "5.20")  # from, below


@dataclass(frozen=True)
class Enabled:
    """What ``enable`` did; as a context manager, disables the model at the end.

    Attributes:
        family: the recurrence's name in ``replayssm.recurrence``.
        layers: recurrent layers that decode with ReplaySSM.
        layout: one layer's sizes and formats.
        bytes_per_request: checkpoint, read copy and ring of one row, all layers.
        meter: counts of what all caches' states did since, where ``metrics`` was asked for.
    """

    family: str
    layers: int
    layout: Layout
    bytes_per_request: int
    model: nn.Module = field(repr=False)
    meter: Meter | None = field(default=None, repr=False)

    def metrics(self) -> str:
        """Totals so far in Prometheus' format, labelled by the model's class; waits for the device.

        Raises: ValueError without ``enable(model, metrics=True)``.
        """
        if self.meter is None:
            raise ValueError("metrics: expected a model enabled with metrics=True")
        return prometheus({type(self.model).__name__: self.meter})

    def __str__(self) -> str:
        of = self.layout
        return (
            f"{type(self.model).__name__}: {self.layers} {self.family} layers, window {of.W}, state {of.state}, "
            f"read {of.read or 'none'}, u {str(of.u).removeprefix('torch.')}, {self.bytes_per_request:,} bytes per request"
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
    read: str | None = None,
    debug: bool | None = None,
    draft_tokens: int = 0,
    metrics: bool = False,
) -> Enabled:
    """Let a model's recurrent layers decode with ReplaySSM; its prefill and everything else stay transformers' own.

    Only this model's modules change, by an attribute each; no class and no transformers function does. Caches filled
    before are taken over when the model next sees them.

    Args:
        model: a transformers model of a supported class, on one device.
        window: records that a ring holds before it is folded into the checkpoint.
        backend: "triton" or "torch"; None takes triton on CUDA and torch elsewhere.
        u: dtype of the delta rule's readout helper; None takes fp32 for fp32 models and fp16 for others.
        state, read: formats of the checkpoint and of the copy that readouts use, as Layout takes them; None: they read the
            checkpoint. What rounds stochastically is keyed by the row.
        debug: check cursors and the order of calls at the price of device reads; None reads REPLAYSSM_DEBUG.
        draft_tokens: most drafts of one forward in assisted generation, below the window. 0: transformers refuses it.
        metrics: count flushes, tokens and bytes on the device, for ``Enabled.metrics``: three tiny launches a step on a GPU.

    Returns:
        What was enabled; a context manager that disables at its end.

    Raises:
        ValueError, NotImplementedError: what is not supported, by name; the model is unchanged then.
    """
    _check_version(transformers.__version__)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window: expected an integer >= 1, got {window!r}")
    if not isinstance(draft_tokens, int) or not 0 <= draft_tokens < window:
        raise ValueError(f"draft_tokens: expected an integer from 0 to window - 1 = {window - 1}, got {draft_tokens!r}")
    mixers = _mixers(model)
    family = MIXERS[type(mixers[0]).__name__]
    sizes = {tuple(getattr(mixer, name) for name in family.sizes) for mixer in mixers}
    devices = {parameter.device for mixer in mixers for parameter in mixer.parameters()}
    if len(sizes) > 1 or len(devices) > 1:
        raise NotImplementedError(
            f"model: supported are recurrent layers of one shape on one device, got H, G, V, K {sorted(sizes)} "
            f"on {sorted(map(str, devices))}"
        )
    layout = Layout(
        family.recurrence, *sizes.pop(), W=window, T_max=draft_tokens + 1, state=state, read=read, act=model.dtype, u=u
    )
    if u is not None and not layout.recurrence.delta:
        raise ValueError(f"u: expected with the delta rule alone, got {u} for {layout.recurrence.name}")

    device = devices.pop()
    meter = Meter(layout, len(mixers), device) if metrics else None

    def replay() -> Replay:
        A = family.decay(mixers)
        return Replay(layout, len(mixers), family.transposed, meter, A=A, backend=backend, debug=debug)

    replay().allocate(1, device)  # raises what a first generate() would
    indices = [mixer.layer_idx for mixer in mixers]
    call = Call()
    forward = _forward(family.rebind(type(mixers[0]).forward, call), indices, replay, call)
    if draft_tokens:
        forward.undo = _allow_drafts(model, call)
    for mixer in mixers:
        mixer.forward = MethodType(forward, mixer)
    enabled = Enabled(family.recurrence.name, len(mixers), layout, layout.slot_bytes * len(mixers), model, meter)
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
    getattr(mixers[0].forward, "undo", lambda: None)()
    for mixer in mixers:
        del mixer.forward


def _allow_drafts(model: nn.Module, call: Call) -> Callable[[], None]:
    """Let ``generate`` of this model take drafts, and see how many a forward has; returns what undoes it.

    transformers refuses by the class's ``_is_stateful``, as its own recurrent states cannot be cropped. Assisted decoding
    asks for the logits of the drafts and of the token before: the first forward holds them behind the whole prompt.
    Where a model calls its cache ``cache_params`` (Mamba2), it cannot find the cache, and goes on refusing.
    """

    def replayssm_drafts(module, args, kwargs):
        keep = kwargs.get("logits_to_keep", 0)
        call.drafts = keep - 1 if isinstance(keep, int) and keep > 0 else None

    hook = model.register_forward_pre_hook(replayssm_drafts, with_kwargs=True)
    if "past_key_values" in inspect.signature(type(model).forward).parameters:
        model._is_stateful = False

    def undo() -> None:
        hook.remove()
        vars(model).pop("_is_stateful", None)

    return undo


def _forward(rebound: Callable, indices: list[int], replay: Callable[[], Replay], call: Call) -> Callable:
    def replayssm_forward(self, hidden_states, cache_params=None, *args, **kwargs):
        call.state = None if cache_params is None else attach(cache_params, self.layer_idx, indices, replay)
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
