"""The recurrent modules of TensorRT-LLM's models: which of their calls become steps of the core.

Only a model's own modules change, by attributes of theirs; no class and no function of TensorRT-LLM does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from . import engine
from .contract import Family
from .engine import Refused
from .recurrent import Batch, Recurrent
from .settings import Settings


def rebound(module: nn.Module, method: str, names: dict[str, Callable]) -> Callable:
    """A module's method, its class's code, that finds other functions under some of its file's names. Raises Refused."""
    function = getattr(type(module), method)
    called = function.__code__.co_names if isinstance(function, FunctionType) else ()
    missing = set(names) - set(called)
    if missing:
        raise Refused(f"{type(module).__name__}.{method}: expected calls of {sorted(missing)}, found none")
    copy = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, module)


class Hook(ABC):
    """One recurrent module: its step, begun and finished with its forward.

    Attributes:
        recurrent, layer: of the forward under way; None where TensorRT-LLM decodes by itself.
    """

    family: Family
    recurrent: Recurrent | None

    def __init__(self, module: nn.Module, hooks: Hooks) -> None:
        self.module, self.hooks, self.recurrent, self.layer = module, hooks, None, 0
        self.A: Tensor | None = None
        self.attach()
        module.replayssm_hook = True

    @abstractmethod
    def attach(self) -> None:
        """Put ours in the place of the module's calls."""

    @abstractmethod
    def ready(self) -> None:
        """Weights are loaded: take what steps need of them."""

    def run(self, forward: Callable, attn_metadata: Any, mamba_metadata: Any, engine_decodes: bool, *args, **kwargs) -> Any:
        """A forward of the module, as part of a step."""
        manager = attn_metadata.kv_cache_manager
        self.recurrent = self.hooks.recurrent(manager)
        if self.recurrent is None:
            return forward(*args, **kwargs)
        self.layer = manager.mamba_layer_offsets[self.module.layer_idx]
        if self.layer == 0:
            self.recurrent.begin(Batch.of(attn_metadata, mamba_metadata), engine_decodes)
        o = forward(*args, **kwargs)
        self.recurrent.finish(self.layer)
        self.recurrent = None
        return o

    def step(self, **inputs: Tensor | None) -> Tensor:
        """This layer's part of the step under way."""
        assert self.recurrent is not None
        return self.recurrent.step(self.layer, **inputs)


class Mamba2(Hook):
    """Mamba2Mixer calls one function for plain steps, which it holds, and one for verify steps, which its file holds."""

    family = "mamba2"

    def attach(self) -> None:
        module, name = self.module, "replay_selective_state_update"
        if not getattr(module, "delta_softplus", True):
            raise Refused(f"{type(module).__name__}.delta_softplus: expected True, got False")
        self.forward = rebound(module, "forward", {name: self.verify})
        self.plain, self.replay = module.selective_state_update_func, type(module).forward.__globals__[name]
        module.selective_state_update_func = self.decode

        def forward(hidden_states, attn_metadata, mamba_metadata, *args, **kwargs):
            given = (hidden_states, attn_metadata, mamba_metadata, *args)
            return self.run(self.forward, attn_metadata, mamba_metadata, False, *given, **kwargs)

        module.forward = forward

    def ready(self) -> None:
        module = self.module
        self.A, self.dt_bias, self.D = (x.detach().float() for x in (module.A, module.dt_bias, module.D))
        for name in ("_use_mtp_custom_op", "_stochastic_rounding_for_flashinfer", "_stochastic_rounding_for_replay"):
            setattr(module, name, False)  # ways around the functions above; rounding is the core's own

    def decode(self, state, x, dt, A, B, C, D=None, *, out=None, **rest) -> Tensor:
        """x [rows, H, V] or [rows, T, H, V]; dt likewise, expanded over V, as A, D and dt_bias of the module's weights are."""
        if self.recurrent is None:
            return self.plain(state, x, dt, A, B, C, D, out=out, **rest)
        v, b, k, q = (t if t.dim() == 3 else t.flatten(0, 1) for t in (x, dt, B, C))
        o = None if out is None else out.view(v.shape)
        return self.step(q=q, k=k, v=v, b=b[..., 0], dt_bias=self.dt_bias, D=self.D, out=o).view(x.shape)

    def verify(self, state, old_x, old_B, old_dt, old_dA_cumsum, cache_buf_idx, prev, x, dt, A, B, C, **rest) -> Tensor:
        """As ``decode``; the engine's history is not read."""
        if self.recurrent is None:
            old = (old_x, old_B, old_dt, old_dA_cumsum, cache_buf_idx, prev)
            return self.replay(state, *old, x, dt, A, B, C, **rest)
        return self.decode(state, x, dt, A, B, C, rest.pop("D"), **rest)


class GatedDeltaNet(Hook):
    """Qwen3NextGatedDeltaNet calls a function of its file for plain steps and a method of its own for verify steps.

    A batch of prompts and plain rows runs all rows through its chunked prefill, in the pool: the rings are folded before.
    """

    family = "gdn"

    def attach(self) -> None:
        module, name = self.module, "fused_sigmoid_gating_delta_rule_update"
        self.plain, self.replay = module.forward_decode.__globals__[name], module._replay_verify_recurrent
        self.core = module.forward_core
        module.forward_decode = rebound(module, "forward_decode", {name: self.decode})
        module._replay_verify_recurrent = self.verify

        def forward_core(mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata=None, output=None):
            verifies = spec_metadata is not None and attn_metadata.kv_cache_manager.is_speculative()
            engine_decodes = attn_metadata.num_contexts > 0 and not verifies
            given = (mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata, output)
            return self.run(self.core, attn_metadata, mamba_metadata, engine_decodes, *given)

        module.forward_core = forward_core

    def ready(self) -> None:
        self.A = -torch.exp(self.module.A_log.detach().float())
        self.dt_bias = self.module.dt_bias.detach()

    def decode(self, A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, *state, output=None, **rest) -> Tensor:
        """q, k [1, N, G, K], v [1, N, H, V], a and b [N, H]."""
        if self.recurrent is None:
            given = (A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, *state)
            return self.plain(*given, output=output, **rest)
        out = None if output is None else output[0]
        return self.step(q=q[0], k=k[0], v=v[0], b=b, a=a, A=self.A, dt_bias=self.dt_bias, out=out)[None]

    def verify(self, query, key, value, a, b, *rest, output_d=None, **more) -> Tensor:
        """query, key [rows, T, G, K], value [rows, T, H, V], a and b [rows, T, H]."""
        if self.recurrent is None:
            return self.replay(query, key, value, a, b, *rest, output_d=output_d, **more)
        q, k, v, a, b = (x.flatten(0, 1) for x in (query, key, value, a, b))
        out = None if output_d is None else output_d.flatten(0, 1)
        return self.step(q=q, k=k, v=v, b=b, a=a, A=self.A, dt_bias=self.dt_bias, out=out).view(value.shape)


class KimiDelta(Hook):
    """KimiKDALinearAttention's ops hold convolution, recurrence and output norm in one; the two methods that call them become
    its own projections and norm around the core's convolution and step."""

    family = "kda"

    def attach(self) -> None:
        module = self.module
        self.impl, self.plain, self.sequence = module._forward_impl, module.forward_decode, module.forward_verify

        def forward_impl(hidden_states, attn_metadata, output=None):
            return self.run(self.impl, attn_metadata, attn_metadata.mamba_metadata, False, hidden_states, attn_metadata, output)

        module._forward_impl, module.forward_decode, module.forward_verify = forward_impl, self.decode, self.verify

    def ready(self) -> None:
        self.A = -torch.exp(self.module.A_log.detach().float())
        self.dt_bias = self.module.dt_bias.detach().view(self.module.num_heads, self.module.head_dim)

    def decode(self, x2d, *pools, output=None, **rest) -> Tensor:
        """x2d [rows, hidden]."""
        if self.recurrent is None:
            return self.plain(x2d, *pools, output=output, **rest)
        return self.generate(x2d, 1, output)

    def verify(self, x2d, num_steps, *pools, output=None, **rest) -> Tensor:
        """x2d [rows * num_steps, hidden]."""
        if self.recurrent is None:
            return self.sequence(x2d, num_steps, *pools, output=output, **rest)
        return self.generate(x2d, num_steps, output)

    def generate(self, x2d: Tensor, tokens: int, output: Tensor | None) -> Tensor:
        """The module's output before its last projection, [rows * tokens, H, V]."""
        assert self.recurrent is not None
        module, N = self.module, x2d.shape[0]
        H, D = module.num_heads, module.head_dim
        x = x2d.view(N // tokens, tokens, -1)
        q, k, v, g, beta, gate = module._project_verify_inputs(x, N) or self.project(x)
        packed = torch.cat((q, k, v), -1).flatten(0, 1)
        q, k, v = self.recurrent.conv(self.layer, packed, module._packed_conv_weight).view(N, 3, H, D).unbind(1)
        gates = {"b": beta.reshape(N, H), "a": g.reshape(N, H, D), "A": self.A, "dt_bias": self.dt_bias}
        o = self.step(q=q, k=k, v=v, **gates)
        return module._store_core(module._output_gate(x, o.view(*x.shape[:2], H, D), gate), output)

    def project(self, x: Tensor) -> tuple:
        """What ``_project_verify_inputs`` returns, where the module fused no weights."""
        module = self.module
        return (
            *(getattr(module, name)(x) for name in ("q_proj", "k_proj", "v_proj")),
            module.f_b_proj(module.f_a_proj(x)),
            module.b_proj(x),
            None,
        )


# By class name: importing three files to compare classes would need their ops.
HOOKS: dict[str, type[Hook]] = {
    "Mamba2Mixer": Mamba2,
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "KimiKDALinearAttention": KimiDelta,
}


class Hooks:
    """All recurrent modules of one model, hooked.

    Raises: Refused: a model that has none, or whose modules call other functions.
    """

    def __init__(self, model: nn.Module, family: Family, settings: Settings) -> None:
        self.settings = settings
        kinds = {name for name, hook in HOOKS.items() if hook.family == family}
        modules = [one for one in model.modules() if type(one).__name__ in kinds]
        if not modules:
            raise Refused(f"{type(model).__name__}: expected modules {sorted(kinds)}, found none")
        # A composite model holds a model that may have hooked its own.
        self.hooks = [HOOKS[type(one).__name__](one, self) for one in modules if not hasattr(one, "replayssm_hook")]
        self._ready: Recurrent | None = None

    def recurrent(self, manager: Any) -> Recurrent | None:
        """The state behind a cache manager; None where TensorRT-LLM keeps it by itself, which mode "require" refuses."""
        adapter = getattr(manager, "replayssm", None)
        found = None if adapter is None else adapter.recurrent
        if found is None:
            reason = Refused(f"{type(manager).__name__}: expected a cache manager with ReplaySSM's state, got one without")
            if self.settings.mode == "require":
                raise reason
            engine.fallback(reason)
        elif found is not self._ready:
            self._take_weights(found, manager)
        return found

    def _take_weights(self, recurrent: Recurrent, manager: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("ReplaySSM: expected an eager step before the first CUDA graph is captured, got none")
        for hook in self.hooks:
            layer = manager.mamba_layer_offsets.get(hook.module.layer_idx)
            if layer is None:
                continue  # another rank's
            hook.ready()
            if recurrent.A is not None:
                recurrent.A[layer] = hook.A
        self._ready = recurrent
