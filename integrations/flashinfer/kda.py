"""KDA: ``recurrent_kda`` in decode, speculative decode and frozen verification, and the commit of the latter."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import KDA, KDA_SAFE, Layout, Recurrence, conventional
from ...checks import INTEGERS, expect
from ...layout import ACTIVATIONS
from . import translate
from .gdn import row_of
from .library import opaque
from .translate import INPUTS, checked, format_of, into, known, layout_of, pool, slots_of

_PREFILL = (
    "seq_order",
    "prefill_workspace",
    "state_checkpoints",
    "checkpoint_cu_starts",
    "checkpoint_state_indices",
)
_BACKENDS = (None, "auto", "cute-dsl", "cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn")


def is_prefill(given: dict) -> bool:
    """Whether a call of ``recurrent_kda`` with these arguments is none of its decode contracts: it takes what only prefill
    takes, or more tokens than sequences without drafts."""
    if any(given.get(name) is not None for name in _PREFILL) or given.get("checkpoint_every_n_tokens"):
        return True
    if given.get("num_spec_tokens") is not None or given.get("disable_state_update"):
        return False
    cu_seqlens = given.get("cu_seqlens")
    return given["q"].shape[1] > (1 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    seq_order: torch.Tensor | None = None,
    prefill_workspace: object | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_state_indices: torch.Tensor | None = None,
    *,
    disable_state_update: bool = False,
    correction_cache: torch.Tensor | None = None,
    kg_cache: torch.Tensor | None = None,
    backend: str | None = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The conventional step, of one token a row or of 1 + ``num_spec_tokens``; or one that leaves the states alone.

    Args:
        q, k: [B, T, G, K]; v, output: [B, T, H, V] of fp32, bf16 or fp16; g: [B, T, H, K], beta: [B, T, H] floating. With
            cu_seqlens [N + 1] int: [1, tokens, ...]. None allocates output.
        A_log, dt_bias: [G] or [H], and as many times K, floating, with ``use_gate_in_kernel``; else g is the log decay.
        initial_state: [S, H, V, K] fp32, bf16 or fp16, contiguous within a slot, written; None: zeros of q's dtype.
        ssm_state_indices: [N] slots, or with num_spec_tokens [N, 1 + num_spec_tokens], one for the state after each token;
            negative ones are padding: outputs 0, no writes. None: row b has slot b, or ``b T`` on.
        num_accepted_tokens: [N], with num_spec_tokens: a row starts from the state after so many tokens of the last step.
        initial_state_source, initial_state_indices: a pool and [N] slots of it that rows start from instead; read alone.
        disable_state_update: any number of tokens, no state written. Then
        correction_cache, kg_cache: [S, H, at least T, V] fp32 takes u of each token, [S, H, at least T, 2 K] its k and g as
            they came, for ``recurrent_kda_commit``.
        backend: choices among FlashInfer's kernels; checked, without effect.

    Returns:
        (output, initial_state if ``output_final_state`` else None).

    Raises:
        NotImplementedError: prefill. ValueError: what does not fit, by name; nothing is written then.
    """
    known("backend", backend, _BACKENDS)
    if is_prefill(locals()):
        raise NotImplementedError(
            f"recurrent_kda: supported are one token a row, num_spec_tokens or disable_state_update, got q {list(q.shape)}; "
            "prefill and its arguments are FlashInfer's own"
        )
    if initial_state is None and not disable_state_update:
        if ssm_state_indices is not None:
            raise ValueError("initial_state: expected a pool with ssm_state_indices, got None")
        rows = q.shape[0] * q.shape[1] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = q.new_zeros(rows, v.shape[2], v.shape[3], k.shape[3])
    out, state = recurrent_kda_decode(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
        cu_seqlens, ssm_state_indices, num_spec_tokens, num_accepted_tokens, output, initial_state_source,
        initial_state_indices, beta_is_logit, disable_state_update, correction_cache, kg_cache,
    )  # fmt: skip
    return out, state if output_final_state else None


@opaque(
    writes=("initial_state", "output", "correction_cache", "kg_cache"),
    out="output",
    like=lambda given: torch.empty_like(given["v"]),
    returns=lambda given: (given["output"], given["initial_state"]),
)
def recurrent_kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
    ssm_state_indices: torch.Tensor | None,
    num_spec_tokens: int | None,
    num_accepted_tokens: torch.Tensor | None,
    output: torch.Tensor | None,
    initial_state_source: torch.Tensor | None,
    initial_state_indices: torch.Tensor | None,
    beta_is_logit: bool,
    disable_state_update: bool,
    correction_cache: torch.Tensor | None,
    kg_cache: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``recurrent_kda`` without what concerns prefill alone: the op."""
    if (initial_state_source is None) != (initial_state_indices is None) and not disable_state_update:
        raise ValueError("initial_state_indices: expected with initial_state_source and only then")
    source = initial_state if initial_state_source is None else initial_state_source
    if source is None:
        raise ValueError("initial_state: expected a pool with disable_state_update, got None")
    if (correction_cache is None) != (kg_cache is None) or (kg_cache is not None and not disable_state_update):
        raise ValueError("correction_cache, kg_cache: expected both or neither, and with disable_state_update alone")
    (rows, N, G, K), (H, V), device = q.shape, v.shape[2:], q.device
    batch = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    T = _tokens_of_a_row(N, cu_seqlens, num_spec_tokens, correction_cache, disable_state_update)
    row = _family(use_gate_in_kernel, lower_bound, beta_is_logit, use_qk_l2norm_in_kernel, scale, K)
    layout = checked(layout_of(row, H, G, V, K, 1, 1, 2, format_of(source, None, None, 0), q.dtype, None), q)
    x, w = _inputs(layout, rows, N, q, k, v, g, beta), _gate(layout, A_log, dt_bias)
    output = torch.empty_like(v) if output is None else output
    expect("output", output, v.shape, ACTIVATIONS, device, inner=False)
    first, t = (None, None) if cu_seqlens is None else (cu_seqlens[:-1], cu_seqlens.diff())
    targets = {"first": first, "t": t}
    if disable_state_update:
        given = initial_state_indices if initial_state_indices is not None else ssm_state_indices
        slots = slots_of(given, -1, batch, source.shape[0], device, "initial_state_indices")
        targets |= _caches(layout, source.shape[0], T, correction_cache, kg_cache)
    else:
        slots, moved = _slots(
            batch, T, initial_state, ssm_state_indices, num_accepted_tokens, initial_state_source, initial_state_indices
        )
        targets |= moved
    states, backend = pool(source), translate.backend_of(q)
    into(
        output,
        lambda one: one.flatten(0, 1),
        lambda o: conventional.step(slots, T, x, w, states, layout, backend, out=o, **targets),
    )
    return output, initial_state


@opaque(writes=("checkpoint_state",), out=None)
def recurrent_kda_commit(
    checkpoint_state: torch.Tensor,
    correction_cache: torch.Tensor,
    kg_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    null_block_id: int = -1,
) -> None:
    """Take the first tokens of a frozen verification into the states, in place; FlashInfer has no such call.

    Args:
        checkpoint_state: [S, H, V, K], as the verification read it; written.
        correction_cache, kg_cache: as ``recurrent_kda`` filled them: [S, H, T, V] fp32, [S, H, T, 2 K].
        state_indices: [B] slots; ``null_block_id`` and negative ones are skipped. accept_lens: [B] int, 0 ... T tokens.
        A_log, dt_bias, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel: as in the verification.
    """
    (S, H, V, K), B, T = checkpoint_state.shape, state_indices.shape[0], correction_cache.shape[2]
    row = _family(use_gate_in_kernel, lower_bound, False, use_qk_l2norm_in_kernel, None, K)
    row = row_of(row, delta=False, beta="one")
    form = format_of(checkpoint_state, None, None, 0)
    layout = checked(layout_of(row, H, H, V, K, 1, 1, 2, form, kg_cache.dtype, None), checkpoint_state)
    _caches(layout, S, T, correction_cache, kg_cache)
    expect("accept_lens", accept_lens, (B,), INTEGERS, state_indices.device, inner=False)
    slots = slots_of(state_indices, null_block_id, B, S, checkpoint_state.device, "state_indices")
    at = slots.long().clamp(min=0)
    u, kg = (one[at].transpose(1, 2).flatten(0, 1) for one in (correction_cache, kg_cache))  # [B T, H, ...]
    x = INPUTS | {"k": kg[..., :K], "v": u, "a": kg[..., K:]}
    backend, w = translate.backend_of(u), _gate(layout, A_log, dt_bias)
    conventional.step(slots, T, x, w, pool(checkpoint_state), layout, backend, last=slots, t=accept_lens.contiguous())


def _family(
    in_kernel: bool, lower_bound: float | None, logit: bool, normalize: bool, scale: float | None, K: int
) -> Recurrence:
    """The recurrence that a call's choices of gates mean."""
    if lower_bound is not None and (not in_kernel or lower_bound >= 0):
        raise ValueError(f"lower_bound: expected < 0 with use_gate_in_kernel, else None, got {lower_bound}")
    row = KDA if lower_bound is None else KDA_SAFE
    return row_of(
        row,
        beta="sigmoid" if logit else "ready",
        decay=row.decay if in_kernel else "ready",
        normalize=normalize,
        scale=K**-0.5 if scale is None else float(scale),
        lower_bound=0.0 if lower_bound is None else float(lower_bound),
    )


def _gate(layout: Layout, A_log: Tensor | None, dt_bias: Tensor | None) -> dict[str, Tensor | None]:
    """A [H] and dt_bias [H, K]; one a key group serves its value heads."""
    H, G, K = layout.H, layout.G, layout.K
    if layout.recurrence.decay == "ready":
        return {"A": None, "dt_bias": None, "D": None}
    if A_log is None:
        raise ValueError("A_log: expected [H] with use_gate_in_kernel, got None")
    if A_log.numel() not in (G, H):
        raise ValueError(f"A_log: expected {G} or {H} values, got {list(A_log.shape)}")
    A = -A_log.reshape(-1).float().exp().repeat_interleave(H // A_log.numel())
    if dt_bias is not None:
        if dt_bias.numel() not in (G * K, H * K):
            raise ValueError(f"dt_bias: expected {G * K} or {H * K} values, got {list(dt_bias.shape)}")
        dt_bias = dt_bias.reshape(-1, K)
        dt_bias = dt_bias.repeat_interleave(H // dt_bias.shape[0], 0).contiguous()
    return {"A": A, "dt_bias": dt_bias, "D": None}


def _inputs(
    layout: Layout, B: int, N: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> dict[str, Tensor | None]:
    H, G, V, K = layout.H, layout.G, layout.V, layout.K
    shapes = {"q": (q, (G, K)), "k": (k, (G, K)), "v": (v, (H, V))}
    for name, (one, shape) in shapes.items():
        expect(name, one, (B, N, *shape), layout.act, q.device, inner=False)
    for name, one, shape in (("g", g, (H, K)), ("beta", beta, (H,))):
        expect(name, one, (B, N, *shape), ACTIVATIONS, q.device, inner=False)
    return INPUTS | {name: translate.packed(one) for name, one in {"q": q, "k": k, "v": v, "a": g, "b": beta}.items()}


def _tokens_of_a_row(
    N: int, cu_seqlens: Tensor | None, num_spec_tokens: int | None, corrections: Tensor | None, frozen: bool
) -> int:
    """The most tokens of a row."""
    if num_spec_tokens is not None:
        if num_spec_tokens < 1 or (cu_seqlens is None and N != 1 + num_spec_tokens):
            raise ValueError(f"num_spec_tokens: expected >= 1 and one less than a row's tokens, got {num_spec_tokens} for {N}")
        return 1 + num_spec_tokens
    if cu_seqlens is None:
        return N
    if not frozen:
        return 1
    if corrections is None:
        raise ValueError("num_spec_tokens: expected with cu_seqlens and disable_state_update, or the caches, got None")
    return corrections.shape[2]


def _caches(layout: Layout, S: int, T: int, corrections: Tensor | None, kg: Tensor | None) -> dict[str, Tensor | None]:
    if corrections is not None and kg is not None:
        H, V, K = layout.H, layout.V, layout.K
        steps = corrections.shape[2] if corrections.dim() == 4 else -1
        if steps < T:
            raise ValueError(f"correction_cache: expected [{S}, {H}, at least {T}, {V}], got {list(corrections.shape)}")
        expect("correction_cache", corrections, (S, H, steps, V), torch.float32, corrections.device)
        expect("kg_cache", kg, (S, H, steps, 2 * K), layout.act, corrections.device)
    return {"corrections": corrections, "raw": kg}


def _slots(
    batch: int,
    T: int,
    states: Tensor,
    indices: Tensor | None,
    accepted: Tensor | None,
    source: Tensor | None,
    source_indices: Tensor | None,
) -> tuple[Tensor, dict]:
    """The slots that rows start from, and where their states go."""
    if indices is None:
        indices = torch.arange(batch * T, dtype=torch.int32, device=states.device)
        indices = indices.view(batch, T) if T > 1 else indices
    if T > 1:
        expect("ssm_state_indices", indices, (batch, T), INTEGERS, states.device)
    column = 0 if accepted is None else (accepted.long() - 1).clamp(0, T - 1)
    start = indices if T == 1 else indices[:, 0] if accepted is None else indices.gather(1, column[:, None])[:, 0]
    slots = slots_of(start.reshape(-1), -1, batch, states.shape[0], states.device, "ssm_state_indices")
    if source is not None:
        taken = slots_of(source_indices, -1, batch, source.shape[0], states.device, "initial_state_indices")
        slots = torch.where(slots < 0, -1, taken)
    elif T == 1:
        return slots, {"last": slots}
    return slots, {"trail": pool(states), "to": indices.reshape(batch, T).contiguous()}
