"""FlashInfer's tensors in the core's words: packed tokens, one value a head, slots, number formats, buffers of one layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ... import Layout, Recurrence, ops
from ...checks import INTEGERS, describe, expect, number_formats
from ...cursor import PLAN_WIDTH, Cursors
from ...layout import ACTIVATIONS, Buffers, Inputs, Weights
from ...state import _debug_from_environment as debugging

# State dtypes and the formats they store; those with a scale have one for each row of K, as FlashInfer's `state_scale`.
FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.float8_e4m3fn: "e4m3",
}
SCALED = (torch.int8, torch.int16, torch.float8_e4m3fn)
STOCHASTIC = (torch.float16, torch.int8, torch.float8_e4m3fn)
INPUTS = dict.fromkeys("qkvbaz")  # a step's tokens, none of them given


def backend_of(x: Tensor) -> str:
    """Kernels on a GPU, plain torch elsewhere."""
    return "triton" if x.is_cuda else "torch"


def known(name: str, value: object, values: tuple[object, ...]) -> None:
    """ValueError unless an argument has one of these values."""
    if value not in values:
        raise ValueError(f"{name}: expected one of {list(values)}, got {value!r}")


def format_of(state: Tensor, scale: Tensor | None, rand_seed: Tensor | None, philox_rounds: int) -> str:
    """The format of a state tensor, with its scale and its random rounding."""
    name = FORMATS.get(state.dtype)
    if name is None:
        raise NotImplementedError(f"state: supported are {list(map(str, FORMATS))}, got {state.dtype}")
    if (scale is not None) != (state.dtype in SCALED):
        wanted = "one fp32 value a row" if state.dtype in SCALED else "None"
        raise ValueError(f"state_scale: expected {wanted} for a state of {state.dtype}, got {describe(scale)}")
    if rand_seed is not None:
        expect("rand_seed", rand_seed.reshape(-1), (1,), torch.int64, state.device)
        if state.dtype not in STOCHASTIC:
            raise ValueError(
                f"rand_seed: expected None for a state of {state.dtype}, which rounds to nearest alone; "
                f"{list(map(str, STOCHASTIC))} round stochastically"
            )
        if philox_rounds <= 0:
            raise ValueError(f"philox_rounds: expected > 0 with rand_seed, got {philox_rounds}")
        name += "+sr"
    return name + (":row" if scale is not None else "")


@lru_cache(maxsize=1024)
def layout_of(
    row: Recurrence, H: int, G: int, V: int, K: int, W: int, T: int, R: int, state: str, act: torch.dtype, u: torch.dtype | None
) -> Layout:
    """One layer's layout. Requests fold by FlashInfer's rule alone: no window is shorter by its slot."""
    return Layout(row, H, G, V, K, W=W, T_max=T, R=R, state=state, act=act, u=u, stagger=False)


def checked(layout: Layout, x: Tensor) -> Layout:
    """The layout, if the tensor's device can convert its formats."""
    number_formats(layout, x.device)
    return layout


def one_layer(**tensors: Tensor | None) -> Buffers:
    """Buffers [1, S, ...] of one layer's tensors [S, ...]; those that are left out are None."""
    return Buffers(*(None if (x := tensors.get(name)) is None else x[None] for name in Buffers._fields))  # type: ignore[arg-type]


def pool(state: Tensor, scale: Tensor | None = None) -> Buffers:
    """States [S, H, V, K] of one layer, contiguous within a slot, with their scales [S, H, V]."""
    if not state[0].is_contiguous():
        raise ValueError(f"state: expected contiguous [H, dim, dstate] in a slot, got strides {state.stride()}")
    if scale is None:
        return one_layer(state=state)
    expect("state_scale", scale, state.shape[:3], torch.float32, state.device)
    if not scale[0].is_contiguous():
        raise ValueError(f"state_scale: expected contiguous [H, dim] in a slot, got strides {scale.stride()}")
    return one_layer(state=state, state_scale=scale[..., None])


def one_per_head(name: str, x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """[H] of a weight that is expanded over a head's dim (and dstate), as FlashInfer takes it."""
    if x is None:
        return None
    expect(name, x, shape, ACTIVATIONS, x.device, inner=False)
    if any(size > 1 and stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)):
        raise ValueError(f"{name}: expected one value a head, expanded (strides 0 from dim on), got strides {x.stride()}")
    return x[(slice(None),) + (0,) * (x.dim() - 1)].contiguous()


def one_per_token(name: str, x: Tensor) -> Tensor:
    """[..., H] of a per-token gate [..., H, dim] that is expanded over dim."""
    if x.dtype not in ACTIVATIONS:
        raise ValueError(f"{name}: expected one of {list(map(str, ACTIVATIONS))}, got {x.dtype}")
    if x.shape[-1] > 1 and x.stride(-1):
        raise ValueError(f"{name}: expected one value a head, expanded (stride 0 in dim), got strides {x.stride()}")
    return x[..., 0]


def packed(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B T, ...]: a view, unless its strides are no packed tensor's."""
    return unit_stride(x.flatten(0, 1))


def unit_stride(x: Tensor) -> Tensor:
    """The tensor, or a copy if its inner stride is not 1."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def into(out: Tensor, flat: Callable[[Tensor], Tensor], write: Callable[[Tensor], None]) -> Tensor:
    """Let ``write`` fill a packed view of ``out``, or, where strides allow none, a packed copy that is copied back."""
    view = flat(out)
    write(view)
    if view.data_ptr() != out.data_ptr():
        out.copy_(view.view(out.shape))
    return out


def slots_of(indices: Tensor | None, pad_slot_id: int, B: int, S: int, device: torch.device, name: str) -> Tensor:
    """[B] slots, -1 for padding: what equals ``pad_slot_id``, and what is negative; never clamped. None: row b has slot b."""
    if indices is None:
        return torch.arange(B, dtype=torch.int32, device=device)
    expect(name, indices, (B,), INTEGERS, device, inner=False)
    slots = indices if pad_slot_id < 0 else torch.where(indices == pad_slot_id, -1, indices)
    if pad_slot_id < -1:
        slots = torch.where(slots == pad_slot_id, -1, slots)
    if debugging():
        live = slots[slots >= 0]
        if bool((live >= S).any()) or bool((slots < -1).any()):
            raise ValueError(f"{name}: expected slots below {S} or pad_slot_id = {pad_slot_id}, got {indices.tolist()}")
        if torch.unique(live).numel() != live.numel():
            raise ValueError(f"{name}: expected each live slot once, got {indices.tolist()}")
    return slots.contiguous()


def in_range(name: str, x: Tensor, slots: Tensor, most: int) -> None:
    """In debug mode: the live rows' cursors are in range."""
    if debugging():
        of = x[slots[slots >= 0].long()]
        if bool(((of < 0) | (of > most)).any()):
            raise ValueError(f"{name}: expected 0 ... {most} in slots {slots.tolist()}, got {of.tolist()}")


def cursors_of(start: Tensor, count: Tensor, rand_seed: Tensor | None, keyed_by: Tensor | None = None) -> Cursors:
    """A copy of the caller's cursors [S] as the core's: a plan moves them. Tickets mean nothing here; random bits depend on the
    seed and on ``keyed_by`` [S], by default the slot."""
    S, device = count.shape[0], count.device
    moved = (one.clone(memory_format=torch.contiguous_format) for one in (start, count))
    pending = torch.empty(S, dtype=torch.int32, device=device)
    if rand_seed is None:
        return Cursors(*moved, pending, torch.empty_like(pending), torch.empty(S, dtype=torch.int64, device=device))
    numbers = torch.arange(S, device=device) if keyed_by is None else keyed_by
    return Cursors(*moved, pending, numbers.int(), rand_seed.reshape(1).expand(S).contiguous())


def ring_step(
    slots: Tensor,
    cursors: Cursors,
    cu_seqlens: Tensor | None,
    x: dict[str, Tensor | None],
    w: dict[str, Tensor | None],
    buffers: Buffers,
    out: Tensor,
    layout: Layout,
) -> None:
    """One layer's step by the caller's cursors: plan rows, the fold of those that flush, the tokens."""
    backend, T = backend_of(out), layout.T_max
    rows = torch.empty(slots.shape[0], PLAN_WIDTH, dtype=torch.int32, device=slots.device)
    B, tokens, weights = slots.shape[0], Inputs(**x), Weights(**w)
    ops.plan(B, T, False, cursors, layout, backend)(slots, None, None, cu_seqlens, None, rows, None)
    ops.flush(B, buffers, weights.A[None], layout, backend)(rows)
    ops.step(B, T, tokens, out, buffers, layout, backend)(rows, None, 0, tokens, weights, out)
