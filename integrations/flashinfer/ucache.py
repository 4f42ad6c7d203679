"""``gated_delta_rule_mtp_ucache_flush``: GDN by FlashInfer's ring of corrections, which folds open-loop.

FlashInfer's contract is that its three tensors are all there is of a request's window: callers copy, move and materialize
them. So nothing is kept beside them, and they hold what FlashInfer's hold: normalised k, u = beta (v - S k), and the sum of g
since the checkpoint. Readouts take these as they are; a fold cannot start from raw inputs, which are not there, and takes u:

    S = exp(G_P) S0 + sum_j exp(G_P - G_j) u_j k_j^T

Its error is that of u's dtype, which may be fp32 here. ReplayState keeps raw inputs and has no such error.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import GDN, Layout, formats, launch, ops
from ...checks import expect
from ...cursor import PLAN_WIDTH
from ...eager import scatter
from ...formats import Stored
from ...kernels import arguments
from ...kernels.arguments import dims, on_device
from ...kernels.formats import load_state, planned_rng, store_state
from ...kernels.recurrence import at, decayed, load_chunks, updated, wrap
from ...layout import ACTIVATIONS, Buffers, Inputs, Weights
from ...recurrence import unit
from . import translate
from .library import opaque
from .translate import INPUTS, checked, cursors_of, debugging, format_of, into, known, layout_of, packed, pool, slots_of


@triton.jit
def _fold_kernel(plan, pool, d, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr):
    NV: tl.constexpr = d.V // BLOCK_V
    i_h = tl.program_id(0) // NV % d.H
    i_g = i_h // (d.H // d.G)
    o_v = tl.program_id(0) % NV * BLOCK_V + tl.arange(0, BLOCK_V)
    p_plan = plan + tl.program_id(0) // NV // d.H * WIDTH
    slot, start, count = tl.load(p_plan).to(tl.int64), tl.load(p_plan + 1), tl.load(p_plan + 2)
    if tl.load(p_plan + 4) == 0:
        return

    s = load_state(pool, d, 0, slot, i_h, o_v)
    last = 0.0
    for j in range(count):
        row = wrap(start + j, d.R)
        gsum = tl.load(at(pool.gsum, 0, slot, i_h) + row * pool.gsum.row)
        k = load_chunks(at(pool.k, 0, slot, i_g) + row * pool.k.row, True, d)
        u = tl.load(at(pool.u, 0, slot, i_h) + row * pool.u.row + o_v).to(tl.float32)
        s = updated(decayed(s, gsum - last, d), u, k, d)
        last = gsum
    store_state(pool, d, 0, slot, i_h, o_v, s, planned_rng(p_plan))


def fold(plan: Tensor, buffers: Buffers, layout: Layout, backend: str) -> None:
    """Fold the corrections of the plan rows that flush into their states, in place."""
    if backend == "triton":
        record = launch.materialize(layout)
        with on_device(plan):
            _fold_kernel[(plan.shape[0] * layout.H * (layout.V // record.BLOCK_V),)](
                plan,
                arguments.pool(buffers),
                dims(layout, record.BLOCK_K),
                WIDTH=PLAN_WIDTH,
                BLOCK_V=record.BLOCK_V,
                num_warps=record.warps,
            )
        return
    ring = buffers.layer(0)
    slots, start, count, _, flush, *_, flushes, low, high, _ = plan.long().unbind(1)
    slot, last = slots.clamp(min=0), 0.0
    state = layout.format.decode(Stored(*(None if x is None else x[slot] for x in ring.checkpoint)))
    for j in range(layout.W):
        row = (start + j) % layout.R
        gsum, u = ring.gsum[slot, :, row], ring.u[slot, :, row].float()
        k = ring.k[slot, :, row].float().repeat_interleave(layout.H // layout.G, 1)
        s = state * torch.exp(gsum - last)[..., None] + torch.einsum("bhv,bhk->bhvk", u, k)
        state, last = torch.where((j < count)[:, None, None, None], s, state), gsum
    draws = None
    if layout.format.stochastic:
        key = (high << 32) | (low & 0xFFFFFFFF)
        draws = formats.draws(layout.seed, 0, key, flushes, layout.H, layout.V, layout.K)
    for target, values in zip(ring.checkpoint, layout.format.encode(state, draws), strict=True):
        if target is not None:
            scatter(target, torch.where(flush > 0, slots, -1), values)


@opaque(
    writes=("initial_state_source", "output", "k_cache", "u_cache", "g_cache", "hist_len", "cache_base"),
    out="output",
    like=lambda given: torch.empty_like(given["v"]),
)
def gated_delta_rule_mtp_ucache_flush(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    accepted_steps: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
    k_cache: torch.Tensor | None = None,
    u_cache: torch.Tensor | None = None,
    g_cache: torch.Tensor | None = None,
    hist_len: torch.Tensor | None = None,
    cache_base: torch.Tensor | None = None,
    flush_min: int | None = None,
    restart_hist_on_flush: bool = True,
    pdl_trigger: bool = False,
    backend: str = "auto",
    stochastic_rounding: str | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
) -> torch.Tensor:
    """A step of T tokens per row by a ring of R rows, of which the window holds W = R / 2 (FlashInfer's: 32 and 16).

    Rows with ``hist_len >= flush_min`` fold their window into the state first. The caller moves its cursors afterwards:
    such rows ``base = (base + hist_len) % R, hist_len = accepted``, others ``hist_len += accepted``; with
    ``restart_hist_on_flush`` the call does the former itself, with nothing accepted yet.

    Args:
        A_log, dt_bias: [H] floating, taken in fp32.
        q, k: [B, T, G, K]; v, output: [B, T, H, V] of fp32, bf16 or fp16; a, b: [B, T, H] floating. T at most W, any.
        initial_state_source: [S, H, V, K] fp32, bf16 or fp16, contiguous within a slot; written by rows that fold.
        initial_state_indices: [B] slots; negative ones are padding: outputs 0. None: row b has slot b.
        k_cache, u_cache, g_cache: [S, G, R, K] bf16 or fp16 (fp32 with fp32 tokens) of normalised keys, [S, H, R, V] of
            corrections in fp32, bf16 or fp16, [S, H, R] fp32 of sums of g since the checkpoint, each token's no lower than
            -20; the new tokens' rows are written.
        hist_len, cache_base: [B] int32, by row of the batch; with ``restart_hist_on_flush`` written.
        flush_min: 1 ... W - T + 1, which is the default.
        stochastic_rounding: "philox" with rand_seed [1] int64 rounds fp16 states so; by ten rounds, always.
        disable_state_update, pdl_trigger, backend: without effect, as in FlashInfer or choices among its kernels.

    Returns:
        output.

    Raises:
        ValueError, NotImplementedError: what does not fit, by name; nothing is written then.
    """
    known("backend", backend, ("auto", "umma", "hmma"))
    _refuse(
        output_state_indices=output_state_indices,
        intermediate_states_buffer=intermediate_states_buffer,
        accepted_steps=accepted_steps,
        ssm_state_indices=ssm_state_indices,
        disable_output=disable_output or None,
        recovery_steps=recovery_steps or None,
    )
    known("softplus_beta", softplus_beta, (1.0,))
    known("softplus_threshold", softplus_threshold, (20.0,))
    known("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel, (True,))
    required = {"q": q, "k": k, "v": v, "b": b, "initial_state_source": initial_state_source, "k_cache": k_cache}
    for name, one in (required | {"u_cache": u_cache, "g_cache": g_cache, "hist_len": hist_len}).items():
        if one is None:
            raise ValueError(f"{name}: expected a tensor, got None")
    (B, T, G, K), (H, V), R, state = q.shape, v.shape[2:], k_cache.shape[2], initial_state_source
    W = R // 2
    if T > W:
        raise ValueError(f"q: expected at most {W} tokens a row with a ring of {R} rows, got {T}")
    flush_min = W - T + 1 if flush_min is None else flush_min
    if not 1 <= flush_min <= W - T + 1:
        raise ValueError(f"flush_min: expected 1 ... {W - T + 1} with {T} tokens a row, got {flush_min}")
    row = dataclasses.replace(GDN, normalize=False, scale=K**-0.5 if scale is None else float(scale))
    form = format_of(state, None, _seed(stochastic_rounding, rand_seed), philox_rounds)
    layout = checked(layout_of(row, H, G, V, K, W, T, R, form, q.dtype, u_cache.dtype), q)
    rings = _rings(layout, state.shape[0], k_cache, u_cache, g_cache)
    x = _tokens(layout, B, q, k, v, a, b, k_cache.dtype)
    output = torch.empty_like(v) if output is None else output
    expect("output", output, v.shape, layout.act, v.device, inner=False)
    w = {"A": _per_head("A_log", A_log, H).exp().neg(), "dt_bias": _per_head("dt_bias", dt_bias, H), "D": None}
    base = _cursors(B, R, W, hist_len, cache_base, restart_hist_on_flush)
    slots = slots_of(initial_state_indices, -1, B, state.shape[0], q.device, "initial_state_indices")
    buffers = _buffers(layout, state, *rings)
    seed = rand_seed if layout.format.stochastic else None
    into(output, packed, lambda o: _step(slots, hist_len, base, flush_min, x, w, buffers, o, layout, seed))
    if restart_hist_on_flush:
        flushed = hist_len >= flush_min
        cache_base.copy_((cache_base + hist_len * flushed) % R)
        hist_len.masked_fill_(flushed, 0)
    return output


def _step(
    slots: Tensor,
    hist_len: Tensor,
    base: Tensor,
    flush_min: int,
    x: dict[str, Tensor | None],
    w: dict[str, Tensor | None],
    buffers: Buffers,
    out: Tensor,
    layout: Layout,
    seed: Tensor | None,
) -> None:
    """Plan rows from cursors by row of the batch, the fold of corrections of those that flush, the tokens."""
    B, T, backend = slots.shape[0], layout.T_max, translate.backend_of(out)
    rows = torch.empty(B, PLAN_WIDTH, dtype=torch.int32, device=slots.device)
    live = torch.where(slots < 0, -1, torch.arange(B, dtype=torch.int32, device=slots.device))
    force, cursors = (hist_len >= flush_min).int(), cursors_of(base, hist_len, seed, slots)
    ops.plan(B, T, False, cursors, layout, backend)(live, None, force, None, None, rows, None)
    rows[:, 0] = slots
    fold(rows, buffers, layout, backend)
    tokens = Inputs(**x)
    ops.step(B, T, tokens, out, buffers, layout, backend)(rows, None, 0, tokens, Weights(**w), out)


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: supported is None or its default here, as in FlashInfer")


def _seed(mode: str | None, rand_seed: Tensor | None) -> Tensor | None:
    """The seed that rounding takes, if it is stochastic."""
    known("stochastic_rounding", mode, (None, "none", "philox", "lcg"))
    if mode == "lcg":
        raise NotImplementedError("stochastic_rounding: supported are 'philox' and None, got 'lcg'")
    if mode == "philox" and rand_seed is None:
        raise ValueError("rand_seed: expected [1] int64 with stochastic_rounding='philox', got None")
    return rand_seed if mode == "philox" else None


def _per_head(name: str, x: Tensor, H: int) -> Tensor:
    expect(name, x, (H,), ACTIVATIONS, x.device, inner=False)
    return x.float().contiguous()


def _rings(layout: Layout, S: int, k: Tensor, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    H, G, V, K, R = layout.H, layout.G, layout.V, layout.K, layout.R
    dtypes = (torch.float32,) if layout.act == torch.float32 else (torch.bfloat16, torch.float16)
    expect("k_cache", k, (S, G, R, K), dtypes, k.device)
    expect("u_cache", u, (S, H, R, V), ACTIVATIONS, k.device)
    expect("g_cache", g, (S, H, R), torch.float32, k.device, inner=False)
    return k, u, g


def _buffers(layout: Layout, state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Buffers:
    """The caller's tensors, and room for the raw inputs that a step writes: nothing reads it, in kernels all slots share it."""
    (S, H, R, V), one = u.shape, 1 if translate.backend_of(u) == "triton" else u.shape[0]
    v = torch.empty(one, H, R, V, dtype=torch.float16, device=u.device).expand(S, H, R, V)
    beta, raw_g = (torch.empty(one, H, R, 1, device=u.device).expand(S, H, R, 1) for _ in range(2))
    ring = {"k": k[None], "u": u[None], "gsum": g[None, ..., None], "v": v[None], "beta": beta[None, ..., 0]}
    return pool(state)._replace(**ring, g=raw_g[None])


def _tokens(layout: Layout, B: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, ring: torch.dtype) -> dict:
    """Packed tokens, k normalised and rounded as the ring keeps it."""
    T, H, G, V, K = layout.T_max, layout.H, layout.G, layout.V, layout.K
    for name, one, shape in (("q", q, (G, K)), ("k", k, (G, K)), ("v", v, (H, V))):
        expect(name, one, (B, T, *shape), layout.act, q.device, inner=False)
    for name, one in (("a", a), ("b", b)):
        expect(name, one, (B, T, H), ACTIVATIONS, q.device, inner=False)
    q, k = (unit(GDN, one.float()).to(ring) for one in (q, k))
    given = {"q": q, "k": k, "v": v, "a": a, "b": b}
    return INPUTS | {name: packed(one) for name, one in given.items()}


def _cursors(B: int, R: int, W: int, hist_len: Tensor, cache_base: Tensor | None, restart: bool) -> Tensor:
    """The rows' bases, zeros by default; in debug mode the cursors are in range."""
    if restart and cache_base is None:
        raise ValueError("cache_base: expected [B] int32 with restart_hist_on_flush, which writes it, got None")
    expect("hist_len", hist_len, (B,), torch.int32, hist_len.device, inner=False)
    if cache_base is None:
        return torch.zeros_like(hist_len)
    expect("cache_base", cache_base, (B,), torch.int32, hist_len.device, inner=False)
    for name, one, most in (("hist_len", hist_len, W), ("cache_base", cache_base, R - 1)):
        if debugging() and bool(((one < 0) | (one > most)).any()):
            raise ValueError(f"{name}: expected 0 ... {most}, got {one.tolist()}")
    return cache_base
