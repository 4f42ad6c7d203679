"""``checkpointing_ssu``: Mamba-2 by FlashInfer's ring, which is the core's own."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ... import MAMBA2, Layout
from ...checks import expect
from ...layout import ACTIVATIONS
from .library import opaque
from .translate import (
    INPUTS,
    checked,
    cursors_of,
    format_of,
    in_range,
    into,
    known,
    layout_of,
    one_per_head,
    one_per_token,
    packed,
    pool,
    ring_step,
    slots_of,
    unit_stride,
)

READY = dataclasses.replace(MAMBA2, name="mamba2 without softplus", beta="ready")


def allocate_checkpointing_ssu_scratch(
    batch_size: int,
    num_heads: int,
    num_predicted_tokens: int,
    max_window: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scratch of FlashInfer's sizes for callers that allocate it; our kernels need and touch none."""
    for name, value in (
        ("batch_size", batch_size),
        ("num_heads", num_heads),
        ("num_predicted_tokens", num_predicted_tokens),
        ("max_window", max_window),
    ):
        if value < 1:
            raise ValueError(f"{name}: expected >= 1, got {value}")
    tokens, window = -(-num_predicted_tokens // 16) * 16, -(-max_window // 8) * 8
    return (
        torch.empty(batch_size, num_heads, 32, tokens // 2, dtype=dtype, device=device),
        torch.empty(batch_size, num_heads, tokens, dtype=torch.float32, device=device),
        torch.empty(batch_size, num_heads, 32, window // 2, dtype=dtype, device=device),
    )


@opaque(writes=("state", "x_cache", "B_cache", "dt_cache", "out", "state_scale"), out="out")
def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    """A step of up to T tokens per row by FlashInfer's contract: its tensors are the core's ring, untouched by copies.

    Rows with ``prev + t > L - T`` fold their ``prev`` old tokens into the state first. The caller moves its cursors
    afterwards: such rows ``start = (start + prev) % L, prev = accepted``, others ``prev += accepted``.

    Args:
        state: [S, H, dim, dstate] fp32, bf16, fp16, int8, int16 or e4m3, contiguous within a slot; written by rows that fold.
        x_cache, B_cache, dt_cache: [S, H, L, dim] and [S, G, L, dstate] in x's dtype, [S, H, L] fp32 (processed dt), any
            slot, head and row strides; the new tokens' rows are written.
        ring_start, prev_num_accepted_tokens: [S] int32, read.
        x, z, out: [B, T, H, dim] of fp32, bf16 or fp16, out written and returned; dt the same, expanded over dim, of any
            floating dtype; B, C: [B, T, G, dstate]. With cu_seqlens [B + 1] int32: [1, tokens, ...], rows of at most
            ``max_seqlen``.
        A: [H, dim, dstate], D, dt_bias: [H, dim], one value a head, expanded.
        state_batch_indices: [B] int32 or int64 slots; ``pad_slot_id`` and negative ones are padding: outputs 0.
        state_scale: [S, H, dim] fp32, with int8, int16 and e4m3 states; written with them.
        rand_seed: [1] int64, for stochastic rounding of fp16, int8 and e4m3 states, by ten rounds of Philox always.
        d_split, enable_pdl, precompute_heads_per_cta, algorithm, cb_scaled, cumAdt_vec, cb_old: choices among
            FlashInfer's kernels; checked, without effect.

    Raises:
        ValueError, NotImplementedError: what does not fit, by name; nothing is written then.
    """
    known("algorithm", algorithm, ("auto", "monolith", "two-kernel"))
    scratch = {"cb_scaled": cb_scaled, "cumAdt_vec": cumAdt_vec, "cb_old": cb_old}
    missing = [name for name, one in scratch.items() if one is None]
    if 0 < len(missing) < 3 or (missing and algorithm == "two-kernel"):
        wanted = "all of them" if algorithm == "two-kernel" else "all of them or none"
        raise ValueError(f"{', '.join(scratch)}: expected {wanted}, got none for {', '.join(missing)}")
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError(f"max_seqlen: expected with cu_seqlens and only then, got {max_seqlen}")
    (S, H, V, K), (rows, N, *_) = state.shape, x.shape
    G, L, T = B.shape[2], x_cache.shape[2], N if max_seqlen is None else max_seqlen
    batch, device = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1, x.device
    if cu_seqlens is not None:
        expect("cu_seqlens", cu_seqlens, (batch + 1,), torch.int32, device)
        expect("x", x, (1, N, H, V), ACTIVATIONS, device, inner=False)
    form = format_of(state, state_scale, rand_seed, philox_rounds)
    if L < 2 * T:
        raise ValueError(f"x_cache: expected at least 2 T = {2 * T} rows (window and new tokens), got {L}")
    layout = checked(layout_of(MAMBA2 if dt_softplus else READY, H, G, V, K, L - T, T, L, form, x.dtype, None), x)
    buffers = pool(state, state_scale)._replace(**_rings(x_cache, B_cache, dt_cache))
    layout.check(buffers)
    given = mamba_tokens(layout, (rows, N), x, dt, B, C, z, dt_bias if not dt_softplus else None)
    expect("out", out, x.shape, x.dtype, device, inner=False)
    weights = mamba_weights(layout, A, D, dt_bias if dt_softplus else None)
    for name, one in (("ring_start", ring_start), ("prev_num_accepted_tokens", prev_num_accepted_tokens)):
        expect(name, one, (S,), torch.int32, device, inner=False)
    slots = slots_of(state_batch_indices, pad_slot_id, batch, S, device, "state_batch_indices")
    in_range("ring_start", ring_start, slots, L - 1)
    in_range("prev_num_accepted_tokens", prev_num_accepted_tokens, slots, L - T)
    cursors = cursors_of(ring_start, prev_num_accepted_tokens, rand_seed)
    return into(out, packed, lambda o: ring_step(slots, cursors, cu_seqlens, given, weights, buffers, o, layout))


def _rings(x_cache: Tensor, B_cache: Tensor, dt_cache: Tensor) -> dict[str, Tensor]:
    return {"k": B_cache[None], "v": x_cache[None], "beta": dt_cache[None]}


def mamba_tokens(
    layout: Layout,
    lead: tuple[int, ...],
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
) -> dict[str, Tensor | None]:
    """The core's inputs of tokens [*lead, heads, dim]; ``bias`` is added to dt where no softplus follows."""
    H, G, V, K = layout.H, layout.G, layout.V, layout.K
    for name, one, shape in (("x", x, (H, V)), ("z", z, (H, V)), ("B", B, (G, K)), ("C", C, (G, K))):
        if one is not None:
            expect(name, one, (*lead, *shape), layout.act, x.device, inner=False)
    expect("dt", dt, (*lead, H, V), ACTIVATIONS, x.device, inner=False)
    dt = one_per_token("dt", dt)
    if bias is not None:
        dt = dt.float() + one_per_head("dt_bias", bias, (H, V))
    given = {"q": C, "k": B, "v": x, "b": dt, "z": z}
    flat = packed if len(lead) == 2 else unit_stride
    return INPUTS | {name: None if one is None else flat(one) for name, one in given.items()}


def mamba_weights(layout: Layout, A: Tensor, D: Tensor | None, dt_bias: Tensor | None) -> dict[str, Tensor | None]:
    H, V, K = layout.H, layout.V, layout.K
    a = one_per_head("A", A, (H, V, K))
    return {
        "A": None if a is None else a.float(),
        "dt_bias": one_per_head("dt_bias", dt_bias, (H, V)),
        "D": one_per_head("D", D, (H, V)),
    }
