"""SGLang's own package, whole, on a machine without a GPU: its kernels run in Triton's interpreter.

Importing this module prepares the process, so it comes before any other import of SGLang, in a process of its own:
what it changes is global. Nothing is computed by stand-ins; test_stock compares with transformers.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang's experts would be compiled by C++, longer than they run
os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # as the models
os.environ["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"  # it waits for a GPU's events

import torch
import triton.language as tl
from transformers.utils import import_utils
from triton.language.extra import libdevice
from triton.runtime import autotuner, interpreter


class _Nothing(types.ModuleType):
    """A package that SGLang imports from and, here, never uses: every name is an empty class."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _absent_packages() -> None:
    """torchvision's wheel is built for CUDA, and vLLM's rotary embedding is for no platform of ours."""
    import_utils.is_torchvision_available()  # cached: transformers takes it for absent
    for name in ("torchvision", "vllm"):
        for part in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional", ".io", ".ops",
                     "._custom_ops"):  # fmt: skip
            module = sys.modules[name + part] = _Nothing(name + part)
            if part:
                parent, _, child = module.__name__.rpartition(".")
                setattr(sys.modules[parent], child, module)


def _interpreter() -> None:
    """What Triton's interpreter lacks: a device to tune on, bf16 products, and ``tl.exp`` under a name of the caller's own."""
    made = autotuner.Autotuner.__init__

    def first_configuration(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.configs = self.configs[:1]

    autotuner.Autotuner.__init__ = first_configuration
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *args):
        """Its numpy has no bf16: the operands' bits would be multiplied as integers."""
        return multiply(self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *args)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # a third of the time
    torch.cpu.device = lambda *_: contextlib.nullcontext()
    torch.Tensor.pin_memory = lambda tensor: tensor
    from sglang.kernels.ops.attention.fla import layernorm_gated, op

    layernorm_gated._get_sm_count = lambda _: 1
    for name in ("exp", "exp2", "log", "log2"):
        setattr(op, name, lambda x, name=name: getattr(tl, name)(x))
    libdevice.exp = op.exp


def _platform() -> None:
    """Choices that SGLang makes by platform: its Triton convolution, absorbed latent attention, GDN prefill in fp32,
    snapshots for prefix caching."""
    from sglang.kernels.ops.attention.fla import chunk
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.configs import update_config
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.models.deepseek_common import attention_backend_handler as latent

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        setattr(mamba, name, getattr(causal_conv1d_triton, name))
        setattr(mamba, f"{name}_triton", getattr(causal_conv1d_triton, name))
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    update_config.adjust_config_with_unaligned_cpu_tp = lambda config, *_: config  # widens what its own CPU kernels shard
    latent.AttentionBackendRegistry.register("torch_native", lambda *_: latent.AttnForwardMethod.MLA)

    def gdn_prefill(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, inplace_update=True, **_):
        """Its own function refuses fp32; its kernels do not."""
        scale = k.shape[-1] ** -0.5
        where = (scale, initial_state, initial_state_indices, cu_seqlens)
        o, h = chunk.ChunkGatedDeltaRuleFunction.apply(q, k, v, g, beta, *where, True, inplace_update)
        return o, None, h

    gdn_triton.chunk_gated_delta_rule = gdn_prefill


_absent_packages()
_interpreter()
_platform()

from replayssm.bench.sglang.requests import Answer, Request
from replayssm.bench.sglang.serving import Server
from replayssm.integrations.sglang.names import slot_of

from .cpu_options import OPTIONS
from .serving import Seen


class Watch:
    """Writes down what becomes of requests, before each iteration of the scheduler."""

    def __init__(self, server: Server, requests: int):
        self.scheduler, self.replay = server.scheduler, getattr(server.pool, "replay", None)
        self.seen = [Seen() for _ in range(requests)]

    def __call__(self, iteration: int, decoding: int) -> None:
        batch = self.scheduler.last_batch
        for request in batch.reqs if batch else ():
            seen, slot = self.seen[int(request.rid)], slot_of(request)
            seen.batches.add(batch.forward_mode.name)
            if slot is not None:
                seen.slots.add(int(slot))
                if self.replay is not None:
                    seen.folds = max(seen.folds, int(self.replay.state.cursors.flushes[slot]))


def serve(folder: Path, requests: Sequence[Request], options: Sequence[str]) -> list[tuple[Answer, Seen]]:
    """Runs SGLang's scheduler and model runner in this process until all requests are answered; once a process."""
    server = Server(folder, [*OPTIONS, *options])
    watch = Watch(server, len(requests))
    return list(zip(server.run(requests, watch), watch.seen, strict=True))
