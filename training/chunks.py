"""The many-token recurrences of training: flash-linear-attention's where it is installed and agrees, else transformers'."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MODULES = {"mamba2": "nemotron_h", "gdn": "qwen3_5", "kda": "kimi_linear"}
NAMES = {"mamba2": "mamba2_chunk_scan", "gdn": "torch_chunk_gated_delta_rule", "kda": "chunk_kimi_delta_attention"}
TOLERANCE = 5e-2  # bf16 inputs; a wrong kernel errs by 1


def install(family: str, device: str) -> str:
    """Replace the family's chunk function in transformers' module; returns what computes it from now on.

    Gated DeltaNet runs as KDA with equal decays: its own backward kernel is refused on Hopper with Triton 3.4 to 3.7.
    """
    folder = MODULES[family]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    plain = inspect.unwrap(getattr(module, NAMES[family]))
    chunk, kind = plain, "transformers' torch code"
    if family != "mamba2":  # whose [64, 64, K] decays per chunk fill the memory otherwise
        chunk = partial(checkpoint, plain, use_reentrant=False)
    if family != "mamba2" and device != "cpu":
        try:
            from fla.ops.kda import chunk_kda
        except ImportError:
            chunk_kda = None
        if chunk_kda is not None and _agree(kda := _as_kda(chunk_kda), plain, family, device):
            chunk, kind = kda, "flash-linear-attention's chunk_kda"
    setattr(module, NAMES[family], _without_autocast(chunk, device))
    return kind


def _without_autocast(chunk: Callable, device: str) -> Callable:
    def exact(*args, **kwargs):
        with torch.autocast(device, enabled=False):
            return chunk(*args, **kwargs)

    return exact


def _as_kda(chunk_kda: Callable) -> Callable:
    def chunk(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
        if g.dim() == 3:
            g = g[..., None].expand(*g.shape, key.shape[-1]).contiguous()
        q, k, v = (x.contiguous() for x in (query, key, value))
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        return chunk_kda(q, k, v, g, beta.to(q.dtype), use_qk_l2norm_in_kernel=True, **states)

    return chunk


def _agree(ours: Callable, plain: Callable, family: str, device: str) -> bool:
    """Whether outputs, final states and gradients of two chunk functions are equal to bf16 precision."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 256, 2, 64)] * 3 + [(2, 256, 2, 64) if family == "kda" else (2, 256, 2), (2, 256, 2), (2, 2, 64, 64)]
    x = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    scale = torch.tensor([0.1, 10.0], device=device)  # a slow and a fast head
    x[3], x[4] = -F.softplus(x[3]) * (scale[:, None] if family == "kda" else scale), torch.sigmoid(x[4])
    x = [one.bfloat16() if i in (0, 1, 2, 4) else one for i, one in enumerate(x)]

    def results(chunk: Callable) -> list[Tensor]:
        leaves = [one.detach().clone().requires_grad_() for one in x]
        *inputs, initial = leaves
        o, state = chunk(*inputs, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True)
        (o.float().sin().sum() + state.float().sin().sum()).backward()
        return [o, state, *(leaf.grad for leaf in leaves)]

    try:
        pairs = list(zip(results(ours), results(plain), strict=True))
    except Exception as error:  # kernels of another project: whatever they raise, transformers' code remains
        print(f"flash-linear-attention: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    print("flash-linear-attention, relative differences:", " ".join(f"{error:.1e}" for error in errors), flush=True)
    return all(error < TOLERANCE for error in errors)
