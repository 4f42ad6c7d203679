"""The many-token recurrences of training: matrix products, or flash-linear-attention's kernels where they are
installed; what does not agree with transformers' code is not used."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

MODULES = {"mamba2": "nemotron_h", "gdn": "qwen3_5", "kda": "kimi_linear"}
NAMES = {"mamba2": "mamba2_chunk_scan", "gdn": "torch_chunk_gated_delta_rule", "kda": "chunk_kimi_delta_attention"}
TOLERANCE = 5e-2  # bf16 inputs; a wrong kernel errs by 1


def install(family: str, device: str) -> str:
    """Replace the family's chunk function in transformers' module; returns what computes it from now on.

    Gated DeltaNet runs as KDA with equal decays: its own backward kernel is refused on Hopper with Triton 3.4 to 3.7. Mamba-2
    needs none of that package.
    """
    folder = MODULES[family]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    plain = inspect.unwrap(getattr(module, NAMES[family]))
    chunk, kind = plain, "transformers' torch code"
    if family == "mamba2":
        if _agree(_ssd, plain, family, device):
            chunk, kind = _ssd, "matrix products of chunks"
    else:
        chunk = partial(checkpoint, plain, use_reentrant=False)  # [64, 64, K] decays per chunk fill the memory otherwise
        fast = _flash_linear_attention() if device != "cpu" else None
        if fast is not None and _agree(fast, plain, family, device):
            chunk, kind = fast, "flash-linear-attention's kernels"
    setattr(module, NAMES[family], _without_autocast(chunk, device))
    return kind


def _flash_linear_attention() -> Callable | None:
    """The chunk function of GDN and KDA by that package, or None without it."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    _untuned("fla")
    return _as_kda(chunk_kda)


def _untuned(package: str) -> None:
    """One launch setting for each kernel of a package, near four warps: tuning them takes longer than training."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        for kernel in vars(sys.modules[name]).values():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None) if isinstance(kernel, KernelInterface) else None
            if kernel is not None:
                kernel.configs = sorted(kernel.configs, key=lambda one: (abs(one.num_warps - 4), one.num_stages))[:1]


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


def _ssd(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
         dt_limit=(0.0, float("inf")), return_final_states=False, **kwargs):  # fmt: skip
    """Mamba-2 as matrix products of chunks ("Transformers are SSMs", listing 1); transformers' code forms them elementwise."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).float().clamp(*dt_limit)
    heads, tokens = hidden_states.shape[2] // B.shape[2], hidden_states.shape[1]
    short = -tokens % chunk_size  # padding neither decays nor adds
    chunked = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, short)).unflatten(1, (-1, chunk_size)) for x in (hidden_states, dt, B, C))
    x, step, k, q = chunked
    k, q = (one.repeat_interleave(heads, 3) for one in (k, q))
    total = (A.float() * step).cumsum(2).transpose(2, 3)  # [B, chunks, H, tokens]
    v = (x * step[..., None]).to(x.dtype)
    lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    inside = torch.einsum("bclhk,bcshk->bchls", q, k) * decay
    o = torch.einsum("bchls,bcshv->bclhv", inside.to(v.dtype), v)
    to_end = (total[..., -1:] - total).exp().transpose(2, 3)[..., None]
    added = torch.einsum("bcshv,bcshk->bchvk", v, (k * to_end).to(v.dtype)).float()
    state = torch.zeros_like(added[:, 0]) if initial_states is None else initial_states.float()
    before = []
    for chunk in range(added.shape[1]):
        before.append(state)
        state = state * total[:, chunk, :, -1].exp()[..., None, None] + added[:, chunk]
    from_start = (q * total.exp().transpose(2, 3)[..., None]).to(v.dtype)
    o = o + torch.einsum("bclhk,bchvk->bclhv", from_start, torch.stack(before, 1).to(v.dtype))
    o = o.flatten(1, 2)[:, :tokens]
    o = o if D is None else o + D[..., None] * hidden_states
    return (o, state) if return_final_states else o


def _case(family: str, device: str) -> tuple[list[Tensor], Callable[[Callable, list[Tensor]], tuple[Tensor, Tensor]]]:
    """Inputs of a chunk function, each of which has a gradient, and how it is called with them."""
    generator = torch.Generator().manual_seed(0)
    wide, flat, scale = (2, 256, 2, 64), (2, 256, 2), torch.tensor([0.1, 10.0])  # a slow and a fast head
    decays = wide if family == "kda" else flat
    x = [torch.randn(shape, generator=generator) for shape in (wide, wide, wide, decays, flat, (2, 2, 64, 64))]
    if family == "mamba2":
        x = [x[0], F.softplus(x[3]), -scale, x[1] / 8, x[2] / 8, x[5]]
        exact = (1, 2, 5)
    else:
        x[3], x[4] = -F.softplus(x[3]) * (scale[:, None] if family == "kda" else scale), torch.sigmoid(x[4])
        exact = (3, 5)
    inputs = [one.to(device) if i in exact else one.to(device, torch.bfloat16) for i, one in enumerate(x)]

    def call(chunk: Callable, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        *given, initial = leaves
        if family == "mamba2":
            return chunk(*given, chunk_size=64, initial_states=initial, return_final_states=True)
        return chunk(*given, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return inputs, call


def _agree(ours: Callable, plain: Callable, family: str, device: str) -> bool:
    """Whether outputs, final states and gradients of two chunk functions are equal to bf16 precision."""
    x, call = _case(family, device)

    def results(chunk: Callable) -> list[Tensor]:
        leaves = [one.detach().clone().requires_grad_() for one in x]
        o, state = call(chunk, leaves)
        (o.float().sin().sum() + state.float().sin().sum()).backward()
        return [o, state, *(leaf.grad for leaf in leaves)]

    try:
        pairs = list(zip(results(ours), results(plain), strict=True))
    except Exception as error:  # kernels of another project: whatever they raise, transformers' code remains
        print(f"{family}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    print("relative differences from transformers:", " ".join(f"{error:.1e}" for error in errors), flush=True)
    return all(error < TOLERANCE for error in errors)
