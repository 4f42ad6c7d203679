"""``gated_delta_rule_decode_pretranspose``: GDN's conventional step, of one token a row or several."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor

from ... import GDN, Recurrence, conventional
from ...checks import INTEGERS, expect
from ...layout import ACTIVATIONS
from . import translate
from .library import opaque
from .translate import INPUTS, checked, format_of, into, known, layout_of, packed, pool, slots_of


@lru_cache(maxsize=64)
def row_of(row: Recurrence, **changes) -> Recurrence:
    """The family with what a call chooses."""
    return dataclasses.replace(row, **changes)


@opaque(
    writes=("state", "output", "initial_state", "intermediate_states_buffer"),
    out="output",
    like=lambda given: torch.empty_like(given["v"]),
    returns=lambda given: (given["output"], given["state"] if given.get("initial_state") is None else given["initial_state"]),
)
def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The conventional step of T tokens a row: states are read, take the tokens and are written back.

    Args:
        q, k: [B, T, G, K]; v, output: [B, T, H, V] of fp32, bf16 or fp16; a, b: [B, T, H] floating. None allocates output.
        state: [B, H, V, K] fp32, bf16 or fp16, contiguous within a row; or None and a pool
        initial_state: [S, H, V, K] with initial_state_indices [B]; negative ones are padding: outputs 0, no writes.
        output_state_indices: [B] slots that take the states; None: where rows started; negative: none.
        A_log, dt_bias: [H] floating, taken in fp32.
        intermediate_states_buffer: [B, at least T, H, V, K] in the state's dtype, takes the state after each token.
        disable_state_update: leave the states alone.
        backend: choices among FlashInfer's kernels; checked, without effect.

    Returns:
        (output, state or initial_state).

    Raises:
        ValueError, NotImplementedError: what does not fit, by name; nothing is written then.
    """
    known("backend", backend, ("auto", "flashinfer", "cake_gdn", "rubin"))
    if (initial_state is None) != (initial_state_indices is None):
        raise ValueError("initial_state_indices: expected with initial_state and only then")
    if (state is None) == (initial_state is None):
        raise ValueError("state: expected either a state or initial_state, got " + ("none" if state is None else "both"))
    if output_state_indices is not None and initial_state is None:
        raise ValueError("output_state_indices: expected None without initial_state")
    given = state if initial_state is None else initial_state
    (B, T, G, K), (H, V), device = q.shape, v.shape[2:], q.device
    expect("state" if initial_state is None else "initial_state", given, (given.shape[0], H, V, K), given.dtype, device)
    row = row_of(GDN, normalize=use_qk_l2norm, scale=K**-0.5 if scale is None else float(scale))
    layout = checked(layout_of(row, H, G, V, K, 1, 1, 2, format_of(given, None, None, 0), q.dtype, None), q)
    for name, one, shape in (("q", q, (G, K)), ("k", k, (G, K)), ("v", v, (H, V))):
        expect(name, one, (B, T, *shape), layout.act, device, inner=False)
    for name, one in (("a", a), ("b", b)):
        expect(name, one, (B, T, H), ACTIVATIONS, device, inner=False)
    for name, one in (("A_log", A_log), ("dt_bias", dt_bias)):
        expect(name, one, (H,), ACTIVATIONS, device, inner=False)
    output = torch.empty_like(v) if output is None else output
    expect("output", output, v.shape, ACTIVATIONS, device, inner=False)
    slots = slots_of(initial_state_indices, -1, B, given.shape[0], device, "initial_state_indices")
    last = None if disable_state_update else slots
    if output_state_indices is not None and not disable_state_update:
        expect("output_state_indices", output_state_indices, (B,), INTEGERS, device, inner=False)
        last = output_state_indices.contiguous()
    trail, to = None, None
    if intermediate_states_buffer is not None:
        trail, to = _snapshots(intermediate_states_buffer, given, B, T)
    x = INPUTS | {name: packed(one) for name, one in {"q": q, "k": k, "v": v, "a": a, "b": b}.items()}
    w = {"A": -A_log.float().exp(), "dt_bias": dt_bias.contiguous(), "D": None}
    targets, states, backend = {"last": last, "trail": trail, "to": to}, pool(given), translate.backend_of(q)
    into(output, packed, lambda o: conventional.step(slots, T, x, w, states, layout, backend, out=o, **targets))
    return output, given


def _snapshots(buffer: Tensor, state: Tensor, B: int, T: int) -> tuple:
    """A buffer [B, steps, H, V, K], or the first steps of one, as a pool, and the slots of it that rows' tokens take."""
    steps, own = buffer.shape[1], state.shape[1:].numel()
    expect("intermediate_states_buffer", buffer, (B, steps, *state.shape[1:]), state.dtype, state.device)
    if steps < T or not buffer[0, 0].is_contiguous() or buffer.stride(0) % own or buffer.stride(1) != own:
        raise ValueError(
            f"intermediate_states_buffer: expected at least {T} steps, one after the other, got {list(buffer.shape)}, "
            f"strides {buffer.stride()}"
        )
    rows = buffer.stride(0) // own  # steps of the buffer that this may be a slice of
    states = buffer.as_strided(((B - 1) * rows + steps, *buffer.shape[2:]), (own, *buffer.stride()[2:]))
    at = torch.arange(B, device=state.device)[:, None] * rows + torch.arange(T, device=state.device)
    return pool(states), at
