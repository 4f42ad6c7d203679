"""``replayssm_materialize``: states after a prefix of their rings, all layers in one launch, through tables of addresses."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import MAMBA2, launch
from ...checks import expect
from ...kernels.arguments import Rows, dims, on_device
from ...kernels.formats import load_state, store_state
from ...kernels.recurrence import at, load_ring
from ...kernels.response import folded, response
from ...layout import Buffers
from . import translate
from .translate import FORMATS, SCALED, STOCHASTIC, checked, debugging, layout_of

_DEVICE_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


class Tables(NamedTuple):
    """Per layer: addresses and slot strides, in elements, of its tensors; A's has none, scales are None without one."""

    state: Tensor
    state_slot: Tensor
    x: Tensor
    x_slot: Tensor
    B: Tensor
    B_slot: Tensor
    dt: Tensor
    dt_slot: Tensor
    A: Tensor
    scale: Tensor | None
    scale_slot: Tensor | None


@triton.jit
def rows_at(address, slot, layer, TYPE: tl.constexpr, HEAD, ROW):
    """A layer's tensor [S, heads, rows, ...], contiguous within a slot. Of its own layer: the stride of layers is 0."""
    return Rows(tl.load(address + layer).to(tl.pointer_type(TYPE)), 0, tl.load(slot + layer), HEAD, ROW)


@triton.jit
def layer_of(tables, d, layer, STATE: tl.constexpr, ACT: tl.constexpr):
    """One layer's state, scale and ring."""
    none: tl.constexpr = None
    scale = None
    if tables.scale is not None:
        scale = rows_at(tables.scale, tables.scale_slot, layer, tl.float32, d.V, 1)
    state = rows_at(tables.state, tables.state_slot, layer, STATE, d.V * d.K, d.K)
    k = rows_at(tables.B, tables.B_slot, layer, ACT, d.R * d.K, d.K)
    v = rows_at(tables.x, tables.x_slot, layer, ACT, d.R * d.V, d.V)
    beta = rows_at(tables.dt, tables.dt_slot, layer, tl.float32, d.R, 1)
    return Buffers(state, scale, none, none, none, none, k, v, beta, none, none, none, none, none)


@triton.jit
def copy_stored(pool, d, src, dst, i_h, o_v):
    """Rows of a state as they are stored, scales included."""
    for i_k in tl.static_range(d.K // d.BLOCK_K):
        o = o_v[:, None] * d.K + (tl.arange(0, d.BLOCK_K) + i_k * d.BLOCK_K)[None, :]
        tl.store(at(pool.state, 0, dst, i_h) + o, tl.load(at(pool.state, 0, src, i_h) + o))
    if pool.state_scale is not None:
        tl.store(at(pool.state_scale, 0, dst, i_h) + o_v, tl.load(at(pool.state_scale, 0, src, i_h) + o_v))


@triton.jit
def _tables_kernel(
    tables,
    src_slots,
    dst_slots,
    start,
    prefix,
    active,
    seed,
    d,
    B,
    PAD,
    STATE: tl.constexpr,
    ACT: tl.constexpr,
    A_TYPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NV: tl.constexpr = d.V // BLOCK_V
    i_h = tl.program_id(0) // NV % d.H
    i_b = tl.load(active + tl.program_id(0) // NV // d.H % B)
    layer = tl.program_id(0) // NV // d.H // B
    o_v = tl.program_id(0) % NV * BLOCK_V + tl.arange(0, BLOCK_V)
    if i_b < 0:
        return
    src = tl.load(src_slots + layer * B + i_b).to(tl.int64)
    dst = tl.load(dst_slots + layer * B + i_b).to(tl.int64)
    if (src < 0) | (dst < 0) | (src == PAD) | (dst == PAD):
        return

    pool = layer_of(tables, d, layer, STATE, ACT)
    n = tl.load(prefix + i_b)
    if n == 0:
        copy_stored(pool, d, src, dst, i_h, o_v)
    else:
        A = tl.load(tables.A + layer).to(tl.pointer_type(A_TYPE))
        EXACT: tl.constexpr = ACT != tl.float32
        first, rng = tl.load(start + i_b), None
        keys, factor, mix, out, E = response(pool, A, d, layer, src, i_h, first, n, EXACT, PRECISION)
        v_j = load_ring(pool.v, d, layer, src, i_h, first, n, o_v)
        s = load_state(pool, d, layer, src, i_h, o_v)
        s = folded(s, n, keys, factor, mix, out, E, v_j, d, EXACT, PRECISION)
        if seed is not None:
            key = tl.load(seed)
            rng = dst.to(tl.int32), key.to(tl.int32), (key >> 32).to(tl.int32)
        store_state(pool, d, layer, dst, i_h, o_v, s, rng)


# No op: torch.compile copies what an op mutates, and addresses know nothing of copies. A call breaks the graph instead.
@torch.compiler.disable
def replayssm_materialize(
    state_ptrs: torch.Tensor,
    state_slot_strides: torch.Tensor,
    x_cache_ptrs: torch.Tensor,
    x_cache_slot_strides: torch.Tensor,
    B_cache_ptrs: torch.Tensor,
    B_cache_slot_strides: torch.Tensor,
    dt_cache_ptrs: torch.Tensor,
    dt_cache_slot_strides: torch.Tensor,
    A_ptrs: torch.Tensor,
    state_scale_ptrs: torch.Tensor,
    state_scale_slot_strides: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 0,
    dependency_inputs: list[torch.Tensor] | None = None,
    dependency_outputs: list[torch.Tensor] | None = None,
) -> None:
    """State dst_slots[l, b] of every layer = state src_slots[l, b] after the first tokens of its ring, which stays.

    Args:
        *_ptrs, *_slot_strides: [L] int64, a layer's address and slot stride in elements of state [S, H, dim, dstate],
            x_cache [S, H, R, dim], B_cache [S, G, R, dstate], dt_cache [S, H, R] fp32, each contiguous within a slot, A [H],
            and scales [S, H, dim] fp32 with int8, int16 and e4m3 (else not read).
        src_slots, dst_slots: [L, B] int32; pairs with ``pad_slot_id`` or a negative side are skipped.
        ring_start, replay_prefix_len: [B] int32; 0 tokens copy the stored bits.
        active_request_indices: [B] int32, the b that take part, then -1.
        state_dtype, input_dtype, matrixA_dtype: what the addresses point to.
        num_heads, heads_per_group, max_window, ring_buffer_len: H, H / G, the longest prefix, R.
        rand_seed, philox_rounds: rounds > 0 round stochastically (by ten, always) for seed, layer, slot and element.
        dependency_inputs, dependency_outputs: the tensors behind the addresses; not needed here.

    Raises:
        ValueError, NotImplementedError: what does not fit, by name. What the addresses hold cannot be checked.
    """
    tables = Tables(
        state_ptrs,
        state_slot_strides,
        x_cache_ptrs,
        x_cache_slot_strides,
        B_cache_ptrs,
        B_cache_slot_strides,
        dt_cache_ptrs,
        dt_cache_slot_strides,
        A_ptrs,
        state_scale_ptrs,
        state_scale_slot_strides,
    )
    (layers, B), device = src_slots.shape, src_slots.device
    if translate.backend_of(src_slots) != "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotImplementedError(f"src_slots: addresses need a CUDA device (or TRITON_INTERPRET=1), got {device}")
    for name, table in tables._asdict().items():
        expect(name, table, (layers,), torch.int64, device)
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        expect(name, slots, (layers, B), torch.int32, device)
        if not slots.is_contiguous():
            raise ValueError(f"{name}: expected contiguous, got strides {slots.stride()}")
    rows = {
        "ring_start": ring_start,
        "replay_prefix_len": replay_prefix_len,
        "active_request_indices": active_request_indices,
    }
    for name, one in rows.items():
        expect(name, one, (B,), torch.int32, device)
    if heads_per_group < 1 or num_heads % heads_per_group:
        raise ValueError(f"heads_per_group: expected a divisor of num_heads = {num_heads}, got {heads_per_group}")
    form, seed = _format(state_dtype, rand_seed, philox_rounds, device)
    G, R = num_heads // heads_per_group, ring_buffer_len
    layout = checked(layout_of(MAMBA2, num_heads, G, dim, dstate, max_window, 1, R, form, input_dtype, None), src_slots)
    if matrixA_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"matrixA_dtype: expected a floating dtype of up to 32 bits, got {matrixA_dtype}")
    if debugging():
        _check_rows(rows, B, max_window, R)
    if state_dtype not in SCALED:
        tables = tables._replace(scale=None, scale_slot=None)
    record = launch.materialize(layout)
    with on_device(src_slots):
        _tables_kernel[(layers * B * num_heads * (dim // record.BLOCK_V),)](
            tables,
            src_slots,
            dst_slots,
            ring_start,
            replay_prefix_len,
            active_request_indices,
            seed,
            dims(layout, record.BLOCK_K, least_W=16),  # a matrix product has at least 16 of everything
            B,
            pad_slot_id,
            STATE=_DEVICE_TYPES[state_dtype],
            ACT=_DEVICE_TYPES[input_dtype],
            A_TYPE=_DEVICE_TYPES[matrixA_dtype],
            BLOCK_V=record.BLOCK_V,
            PRECISION=launch.dot_precision(),
            num_warps=record.warps,
        )


def _format(dtype: torch.dtype, rand_seed: Tensor | None, rounds: int, device: torch.device) -> tuple[str, Tensor | None]:
    """The state's format, and the seed where it rounds stochastically."""
    if dtype not in FORMATS:
        raise NotImplementedError(f"state_dtype: supported are {list(map(str, FORMATS))}, got {dtype}")
    suffix = ":row" if dtype in SCALED else ""
    if rounds == 0:
        return FORMATS[dtype] + suffix, None
    if rounds < 0 or rand_seed is None or dtype not in STOCHASTIC:
        raise ValueError(
            f"philox_rounds: expected 0, or > 0 with a rand_seed and a state of {list(map(str, STOCHASTIC))}, "
            f"got {rounds}, {'no seed' if rand_seed is None else 'a seed'} and {dtype}"
        )
    expect("rand_seed", rand_seed.reshape(-1), (1,), torch.int64, device)
    return f"{FORMATS[dtype]}+sr{suffix}", rand_seed


def _check_rows(rows: dict[str, Tensor], B: int, window: int, R: int) -> None:
    """In debug mode: active rows' numbers are in range."""
    active = rows["active_request_indices"]
    active = active[active >= 0].long()
    for name, most in (("active_request_indices", B - 1), ("ring_start", R - 1), ("replay_prefix_len", window)):
        of = active if name == "active_request_indices" else rows[name][active]
        if bool(((of < 0) | (of > most)).any()):
            raise ValueError(f"{name}: expected 0 ... {most}, got {of.tolist()}")
