"""``selective_state_update``: Mamba-2's conventional step, of one token a row or several."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import MAMBA2, Layout, conventional
from ...checks import INTEGERS, expect
from ...layout import Buffers
from . import translate
from .library import opaque
from .mamba import READY, mamba_tokens, mamba_weights
from .translate import checked, format_of, into, known, layout_of, packed, pool, slots_of


def _with_heads(x: Tensor | None, dims: int, at: int = 0) -> Tensor | None:
    """A tensor with the head dimension that callers may leave out."""
    return x.unsqueeze(at) if x is not None and x.dim() == dims - 1 else x


def _with_tokens(x: Tensor | None, several: bool, varlen: bool) -> Tensor | None:
    """[B, H, dim], or with several tokens a row [B, T, H, dim], of what may lack H or T; packed tokens as they are."""
    if x is None or varlen:
        return x
    x = x.unsqueeze(1) if x.dim() == 2 else x
    return x.unsqueeze(1) if several and x.dim() == 3 else x


def _output(given: dict) -> Tensor:
    varlen = given.get("cu_seqlens") is not None and given["x"].dim() == 3
    return torch.empty_like(_with_tokens(given["x"], given.get("cache_steps", 0) >= 1, varlen))


@opaque(
    writes=("state", "state_scale", "out", "intermediate_states_buffer", "intermediate_state_scales"), out="out", like=_output
)
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The conventional step: states are read, take a row's tokens and are written back.

    Args:
        state: [S, H, dim, dstate] (or without H) fp32, bf16, fp16, int8, int16 or e4m3, contiguous within a slot.
        x, dt, z, out: [B, H, dim] (or without H), with ``cache_steps`` [B, T, H, dim], with cu_seqlens [N + 1] packed
            [tokens, H, dim] of at most ``cache_steps`` a row; B, C likewise [..., G, dstate]. None allocates out.
        A, D, dt_bias: one value a head, expanded.
        state_batch_indices: [B] or [B, at least T] slots; ``pad_slot_id`` and negative ones are padding: outputs 0. With
            num_accepted_tokens [B], a row starts from its column ``max(accepted - 1, 0)``, else from the first.
        dst_state_batch_indices: [B], or [B, at least T] for the state after each token; None: where the row started.
        disable_state_update: leave ``state`` alone.
        intermediate_states_buffer: [M, at least T, H, dim, dstate] in state's dtype, takes the state after each token, in row
            ``intermediate_state_indices`` [B], which it requires.
        state_scale, intermediate_state_scales: [S, H, dim] and [M, steps, H, dim] fp32 with int8, int16 and e4m3.
        rand_seed: as in ``checkpointing_ssu``.
        algorithm, backend: choices among FlashInfer's kernels; checked, without effect.

    Returns:
        out.

    Raises:
        ValueError, NotImplementedError: what does not fit, by name; nothing is written then.
    """
    known("algorithm", algorithm, ("auto", "simple", "vertical", "horizontal", "async_horizontal"))
    known("backend", backend, ("auto", "flashinfer", "cake"))
    varlen, several = cu_seqlens is not None and x.dim() == 3, cache_steps >= 1
    state, A, D, dt_bias = _with_heads(state, 4, 1), _with_heads(A, 3), _with_heads(D, 2), _with_heads(dt_bias, 2)
    x, dt, B, C, z = (_with_tokens(one, several, varlen) for one in (x, dt, B, C, z))
    if state_scale is not None and state_scale.dim() == 4:
        state_scale = state_scale.squeeze(-1)
    out = torch.empty_like(x) if out is None else out
    expect("out", out, x.shape, x.dtype, x.device, inner=False)
    (S, H, V, K), G, lead, device = state.shape, B.shape[-2], x.shape[:-2], x.device
    batch, T = (cu_seqlens.shape[0] - 1, cache_steps) if varlen else (lead[0], lead[1] if len(lead) > 1 else 1)
    first, t = None, None
    if varlen:
        expect("cu_seqlens", cu_seqlens, (batch + 1,), INTEGERS, device)
        first, t = cu_seqlens[:-1], cu_seqlens.diff()
    form = format_of(state, state_scale, rand_seed, philox_rounds)
    layout = checked(layout_of(MAMBA2 if dt_softplus else READY, H, G, V, K, 1, 1, 2, form, x.dtype, None), x)
    given = mamba_tokens(layout, lead, x, dt, B, C, z, None if dt_softplus else dt_bias)
    weights = mamba_weights(layout, A, D, dt_bias if dt_softplus else None)
    column = None if num_accepted_tokens is None else (num_accepted_tokens.long() - 1).clamp(min=0)
    slots = slots_of(_column(state_batch_indices, column, batch), pad_slot_id, batch, S, device, "state_batch_indices")
    states = pool(state, state_scale)
    last, trail, to = _targets(slots, states, batch, T, pad_slot_id, dst_state_batch_indices, disable_state_update)
    if intermediate_states_buffer is not None:
        if trail is not None or dst_state_batch_indices is not None:
            raise ValueError("dst_state_batch_indices: expected None with intermediate_states_buffer, got both")
        trail, to = _snapshots(
            layout, intermediate_states_buffer, intermediate_state_scales, intermediate_state_indices, batch, T
        )
    targets = {"last": last, "trail": trail, "to": to, "first": first, "t": t, "seed": rand_seed}
    backend = translate.backend_of(x)
    flat = packed if len(lead) == 2 else lambda one: one
    return into(out, flat, lambda o: conventional.step(slots, T, given, weights, states, layout, backend, out=o, **targets))


def _column(indices: Tensor | None, column: Tensor | None, batch: int) -> Tensor | None:
    """Each row's index: of [B] itself, of [B, steps] the given column or the first."""
    if indices is None or indices.dim() == 1:
        return indices if indices is None else indices[:batch]
    return indices[:batch, 0] if column is None else indices[:batch].gather(1, column[:, None])[:, 0]


def _targets(
    slots: Tensor, states: Buffers, batch: int, T: int, pad: int, dst: Tensor | None, disabled: bool
) -> tuple[Tensor | None, Buffers | None, Tensor | None]:
    """Where states go in the pool: (slots of the last one, the pool and slots of each)."""
    if dst is None:
        return (None if disabled else slots), None, None
    if disabled:
        raise ValueError("disable_state_update: expected False with dst_state_batch_indices, got True")
    expect("dst_state_batch_indices", dst[:batch], (batch, *dst.shape[1:]), INTEGERS, slots.device, inner=False)
    dst = dst[:batch] if pad < 0 else torch.where(dst[:batch] == pad, -1, dst[:batch])
    if dst.dim() == 1 or T == 1:
        return dst.reshape(batch, -1)[:, 0].contiguous(), None, None
    if dst.shape[1] < T:
        raise ValueError(f"dst_state_batch_indices: expected at least {T} columns, got {list(dst.shape)}")
    return None, states, dst[:, :T].contiguous()


def _snapshots(
    layout: Layout, buffer: Tensor, scales: Tensor | None, indices: Tensor | None, batch: int, T: int
) -> tuple[Buffers, Tensor]:
    """The buffer as a pool of a slot a row and step, and the slots [B, T] of the rows' tokens."""
    rows, steps = buffer.shape[:2]
    expected = (rows, steps, layout.H, layout.V, layout.K)
    expect("intermediate_states_buffer", buffer, expected, layout.format.dtype, buffer.device)
    if steps < T or not buffer.is_contiguous():
        raise ValueError(
            f"intermediate_states_buffer: expected contiguous with at least {T} steps, got {list(buffer.shape)}, "
            f"strides {buffer.stride()}"
        )
    if indices is None:
        raise ValueError(
            "intermediate_state_indices: expected [B] with intermediate_states_buffer, got None: FlashInfer's documentation "
            "means the batch row then, its kernels the slot"
        )
    expect("intermediate_state_indices", indices, (batch,), INTEGERS, buffer.device, inner=False)
    step = torch.arange(T, device=buffer.device, dtype=indices.dtype)
    to = torch.where(indices[:, None] < 0, -1, indices[:, None] * steps + step)
    return pool(buffer.flatten(0, 1), None if scales is None else scales.reshape(rows * steps, layout.H, layout.V)), to
