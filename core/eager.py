"""Backend `torch`: the whole contract in vectorised torch, on any device, without kernels and without a host sync.

Functions take what a kernel's launch is called with, then what that has settled, as plain tensors; any number of tokens a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats
from .cursor import Cursors, append_row, committed, flush_rule, next_ticket, phase
from .formats import LOADED, Format, Stored
from .layout import STORED, Buffers, Inputs, Layout, Weights
from .recurrence import L2_EPS, READOUT_G_FLOOR, epilogue, gates, unit


def _live(slots: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, rows) with every padding row replaced by one live row, so that a scatter writes that row's value again.

    Without any live row, both point at row 0 and slot 0; ``scatter`` then writes what is there.
    """
    valid = slots >= 0
    rows = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), valid.int().argmax())
    return slots[rows].clamp(min=0).long(), rows


def scatter(target: Tensor, slots: Tensor, values: Tensor) -> None:
    """target[slots[i]] = values[i] along dimension 0, rows with a negative slot left alone, no host sync."""
    if slots.shape[0] == 0:
        return
    index, rows = _live(slots)
    values = values.to(target.dtype)
    if target.dtype == formats.E4M3:  # index_copy_ does not know it
        target, values = target.view(torch.uint8), values.view(torch.uint8)
    kept = torch.where((slots >= 0).any(), values[rows], target[index])
    target.index_copy_(0, index, kept)


def plan(
    slots: Tensor,
    t: Tensor | None,
    force: Tensor | None,
    cu_seqlens: Tensor | None,
    parents: Tensor | None,
    out: Tensor,
    tree: Tensor | None,
    cursors: Cursors,
    T: int,
    layout: Layout,
) -> None:
    """As kernels.cursor.plan."""
    B = slots.shape[0]
    at, live = slots.long().clamp(min=0), slots >= 0
    first = torch.arange(B, device=slots.device) * T if cu_seqlens is None else cu_seqlens[:-1]
    rows = torch.full_like(first, T) if cu_seqlens is None else cu_seqlens.diff()
    n = torch.where(live, rows if t is None else t.long(), 0)
    start, count, flushes, key = (
        torch.where(live, c[at], 0) for c in (cursors.start, cursors.count, cursors.flushes, cursors.key)
    )
    ticket = next_ticket(torch.where(live, cursors.pending[at], 0))
    forced = torch.zeros_like(n) if force is None else force
    flush = live & flush_rule(forced, count, n, layout.W, phase(at, flushes, layout.phases))
    order = flush.to(torch.int32).argsort(descending=True, stable=True)
    append, flushing = append_row(start, count, layout.R), flush.sum().expand(B)
    columns = (slots, start, count, n, flush, append, first, rows, ticket, order, flushes, key, key >> 32, flushing)
    out.copy_(torch.stack([c.to(torch.int32) for c in columns], dim=1))
    start, count = committed(start, count, flush.int(), 0, layout.R)
    _move(cursors, slots, start=start, count=count, flushes=flushes + flush, pending=ticket)
    if parents is not None and tree is not None:
        tree.copy_(_ancestors(parents))


def _ancestors(parents: Tensor) -> Tensor:
    """As kernels.cursor.ancestors, of all rows: [B, 2, T_max]."""
    o = torch.arange(parents.shape[1], device=parents.device, dtype=torch.int32)
    parent = torch.where((parents >= 0) & (parents < o), parents, -1).int()
    bits, next_up = (torch.ones_like(o) << o).expand_as(parent), parent
    for _ in range((parents.shape[1] - 1).bit_length()):
        above = next_up.clamp(min=0).long()
        bits = bits | torch.where(next_up >= 0, bits.gather(1, above), 0)
        next_up = torch.where(next_up >= 0, next_up.gather(1, above), -1)
    return torch.stack([parent, bits], 1)


def _lineage(tree: Tensor | None, B: int, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a step's tokens: parents [B, T], -1 the committed history, and whether token m is an ancestor of i or i [B, T, T]."""
    m = torch.arange(T, device=device)
    if tree is None:
        return (m - 1).expand(B, T), (m <= m[:, None]).expand(B, T, T)
    return tree[:, 0, :T].long(), (tree[:, 1, :T, None] >> m) & 1 == 1


def commit(plan: Tensor, accepted: Tensor | None, cursors: Cursors) -> None:
    """As kernels.cursor.commit."""
    slot, t, ticket = plan[:, 0], plan[:, 3], plan[:, 8]
    at = slot.long().clamp(min=0)
    pending = (slot >= 0) & (cursors.pending[at] == ticket)
    kept = cursors.count[at] + (t if accepted is None else accepted)
    _move(cursors, torch.where(pending, slot, -1), count=kept, pending=ticket + 1)


def _move(cursors: Cursors, slots: Tensor, **values: Tensor) -> None:
    """Set the named cursors of the slots, rows with a negative slot left alone."""
    for name, value in values.items():
        scatter(getattr(cursors, name), slots, value)


def compact(plan: Tensor, path: Tensor, accepted: Tensor | None, buffers: Buffers, pending: Tensor, layout: Layout) -> None:
    """As kernels.compact.compact."""
    slot, _, _, t, _, append, _, _, ticket, *_ = plan.long().unbind(1)
    at = slot.clamp(min=0)
    n = torch.where((slot >= 0) & (pending[at] == ticket), t if accepted is None else accepted, 0)
    for i in range(path.shape[1]):
        node = torch.where(i < n, path[:, i], i)
        source, target = append_row(append, node, layout.R), append_row(append, i, layout.R)
        for ring in buffers[len(STORED) :]:
            if ring is not None:
                rows = ring.movedim((1, 3), (0, 1))  # [S, R, L, heads, ...]
                _scatter_rows(rows, torch.where(i < n, slot, -1), target, rows[at, source])


def _load(stored: Stored, slot: Tensor, one: Format) -> Tensor:
    """The fp32 states [B, H, V, K] of these slots of one layer."""
    return one.decode(Stored(*(None if x is None else x[slot] for x in stored)))


def _store(buffers: Buffers, slots: Tensor, state: Tensor, layer: int, flushes: Tensor, key: Tensor, layout: Layout) -> None:
    """Round fp32 states [B, H, V, K] to one layer's checkpoints and, independently, to its read copies."""
    draws = None
    if layout.format.stochastic:
        draws = formats.draws(layout.seed, layer, key, flushes, layout.H, layout.V, layout.K)
    encoded = [*zip(buffers.checkpoint, layout.format.encode(state, draws), strict=True)]
    if layout.read_format is not None:
        encoded += zip(buffers.copy, layout.read_format.encode(state), strict=True)
    for target, values in encoded:
        if target is not None:
            scatter(target, slots, values)


def _fold(state: Tensor, ring: Buffers, A: Tensor | None, slot: Tensor, start: Tensor, n: Tensor, layout: Layout) -> Tensor:
    """The fp32 states [B, H, V, K] after each row's first n raw records, one token of the recurrence at a time."""
    row, heads = layout.recurrence, layout.H // layout.G
    for j in range(layout.W):
        at, live = append_row(start, j, layout.R), j < n
        k = unit(row, ring.k[slot, :, at].float()).repeat_interleave(heads, 1)
        u = ring.v[slot, :, at].float()
        beta = u.new_ones(u.shape[:2]) if ring.beta is None else ring.beta[slot, :, at]
        g = ring.g[slot, :, at] if row.stores_g else (A * beta)[..., None]
        s = state * torch.exp(g)[:, :, None, :]
        if row.delta:
            u = u - torch.einsum("bhvk,bhk->bhv", s, k)
        s = s + torch.einsum("bhv,bhk->bhvk", beta[..., None] * u, k)
        state = torch.where(live[:, None, None, None], s, state)
    return state


def flush(plan: Tensor, buffers: Buffers, A: Tensor | None, layout: Layout) -> None:
    """As kernels.materialize.flush."""
    slots, start, count, _, flush, *_, flushes, key_low, key_high, _ = (c.long() for c in plan.unbind(1))
    slot, to, key = slots.clamp(min=0), torch.where(flush > 0, slots, -1), (key_high << 32) | (key_low & 0xFFFFFFFF)
    for layer in range(buffers.state.shape[0]):
        ring = buffers.layer(layer)
        state = _load(ring.checkpoint, slot, layout.format)
        state = _fold(state, ring, None if A is None else A[layer], slot, start, flush * count, layout)
        _store(ring, to, state, layer, flushes, key, layout)


def step(
    plan: Tensor,
    tree: Tensor | None,
    layer: int,
    x: Inputs,
    w: Weights,
    out: Tensor,
    buffers: Buffers,
    T: int,
    layout: Layout,
) -> None:
    """One step of one layer, up to T tokens per row; reads plan rows, writes ``out`` [N, H, V] and the layer's buffers."""
    row, heads = layout.recurrence, layout.H // layout.G
    ring = buffers.layer(layer)
    slots, start, count, t, flush, append, first, *_ = (c.long() for c in plan.unbind(1))
    out.zero_()
    slot, count = slots.clamp(min=0), torch.where(flush > 0, 0, count)
    if layout.read_format is None:
        state = _load(ring.checkpoint, slot, layout.format)
    else:
        state = _load(ring.copy, slot, layout.read_format)

    # History, oldest first: [B, W, heads, ...]; what a dead row holds is masked away before any arithmetic.
    j = torch.arange(layout.W, device=plan.device)
    at, live = append_row(start[:, None], j, layout.R), j < count[:, None]

    def records(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)[slot[:, None], at].float()
        return torch.where(live.view(*live.shape, *[1] * (x.dim() - 2)), x, 0.0)

    k_j = unit(row, records(ring.k)).repeat_interleave(heads, 2)
    if row.delta:
        u_j = records(ring.u)
    else:
        u_j = records(ring.v) if ring.beta is None else records(ring.v) * records(ring.beta)[..., None]
    if row.stores_g:
        gsum_j = records(ring.gsum)
        newest = ring.gsum[slot, :, append_row(start, count.clamp(min=1) - 1, layout.R)]
        gsum_m = torch.where((count > 0)[:, None, None], newest, 0.0)[:, None]  # of the history's end, then of the tokens
    else:
        g_j = (w.A * records(ring.beta))[..., None]
        g_m = g_j[:, :0]

    # Tokens of this step, [B, i, heads, ...]: on a token's path, or masked away before any arithmetic.
    k_m, u_m = k_j[:, :0], u_j[:, :0]
    parents, path = _lineage(tree, plan.shape[0], T, plan.device)

    def before(i: int, history: Tensor, x: Tensor) -> Tensor:
        return torch.cat([history, torch.where(path[:, i, :i, None, None], x, 0.0)], 1)

    for i in range(T if x.q.shape[0] else 0):
        n, on = (first + i).clamp(max=x.q.shape[0] - 1), i < t
        token = {
            name: one if one is None else torch.where(on.view(-1, *[1] * (one.dim() - 1)), one[n], 0)
            for name, one in x._asdict().items()
        }
        x_v = token["v"].float()
        beta, g = gates(row, token["b"], token["a"], w.A, w.dt_bias, x_v)
        q_t = (unit(row, token["q"].float()) * row.q_scale(layout.K)).repeat_interleave(heads, 1)
        k_t = unit(row, token["k"].float()).repeat_interleave(heads, 1)
        if row.stores_g:
            gsum = gsum_m[torch.arange(len(slot), device=plan.device), parents[:, i] + 1] + g.clamp(min=READOUT_G_FLOOR)
            E_j, E_0 = torch.exp(gsum[:, None] - before(i, gsum_j, gsum_m[:, 1:])), torch.exp(gsum)
        else:
            gsum = None
            E = torch.exp(torch.cat([before(i, g_j, g_m), g[:, None]], 1).flip(1).cumsum(1).flip(1))  # from before record j on
            E_j, E_0 = E[:, 1:], E[:, 0]
        k_E, u_i = before(i, k_j, k_m) * E_j, before(i, u_j, u_m)
        u = beta[..., None] * (x_v - _readout(k_t, state, E_0, k_E, u_i) if row.delta else x_v)
        o = _readout(q_t, state, E_0, k_E, u_i) + u * torch.einsum("bhk,bhk->bh", k_t, q_t)[..., None]
        scatter(out, torch.where(on, first + i, -1), epilogue(o, x_v, w.D, token["z"]))

        finite = torch.finfo(layout.u).max  # saturate: a helper's overflow must not become an infinity
        new = {"k": token["k"], "v": token["v"], "beta": beta, "g": g, "u": u.clamp(-finite, finite)}
        new |= {"gsum": gsum, "rnorm": torch.rsqrt((token["k"].float() ** 2).sum(-1) + L2_EPS)}
        at_new = append_row(append, i, layout.R)
        for name, value in new.items():
            target = getattr(ring, name)
            if target is not None:
                _scatter_rows(target.transpose(1, 2), torch.where(on, slots, -1), at_new, value)
        k_m, u_m = torch.cat([k_m, k_t[:, None]], 1), torch.cat([u_m, u[:, None]], 1)
        if gsum is None:
            g_m = torch.cat([g_m, g[:, None]], 1)
        else:
            gsum_m = torch.cat([gsum_m, gsum[:, None]], 1)


def _readout(x: Tensor, state: Tensor, E_0: Tensor, k_j: Tensor, u_j: Tensor) -> Tensor:
    """P(x) = S0 (E(0,t) * x) + sum_j u_j (k_j^T x), the k_j decayed to t: [B, H, V] of x [B, H, K]."""
    weight = torch.einsum("bjhk,bhk->bjh", k_j, x)
    return torch.einsum("bhvk,bhk->bhv", state, E_0 * x) + torch.einsum("bjh,bjhv->bhv", weight, u_j)


def _scatter_rows(target: Tensor, slots: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[slots[i], rows[i]] = values[i], rows with a negative slot left alone."""
    if slots.shape[0] == 0:
        return
    index, live = _live(slots)
    at = rows[live]
    new = values[live].to(target.dtype).reshape(-1, *target.shape[2:])
    target[index, at] = torch.where((slots >= 0).any(), new, target[index, at])


def materialize(
    source: Buffers,
    from_slots: Tensor,
    cursors: Cursors | None,
    n: Tensor | None,
    target: Buffers,
    to_slots: Tensor,
    key: Tensor | None,
    A: Tensor | None,
    layer: int,
    layout: Layout,
) -> None:
    """As kernels.materialize.materialize."""
    slot = from_slots.long().clamp(min=0)
    to = torch.where(from_slots >= 0, to_slots, -1)
    flushes = torch.full_like(slot, LOADED) if cursors is None else cursors.flushes[slot]
    one = formats.plain(source.state.dtype) if cursors is None else layout.format
    for i in range(source.state.shape[0]):
        buffers = source.layer(i)
        state = _load(buffers.checkpoint, slot, one)
        if cursors is not None:
            records = cursors.count[slot] if n is None else torch.minimum(cursors.count[slot], n)
            state = _fold(state, buffers, None if A is None else A[i], slot, cursors.start[slot], records, layout)
        if key is None:
            scatter(target.state[i], to, state)
        else:
            _store(target.layer(layer + i), to, state, layer + i, flushes, key[to.long().clamp(min=0)], layout)


def conv(
    plan: Tensor,
    tree: Tensor | None,
    layer: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    ring: Tensor,
    T: int,
    silu: bool,
    layout: Layout,
) -> None:
    """As kernels.conv.conv; ring [L, S, 1, R, C]."""
    slots, _, _, t, _, append, first, *_ = (c.long()[:, None] for c in plan.unbind(1))
    B, taps, slot = plan.shape[0], weight.shape[1], slots.clamp(min=0)
    out.zero_()
    if x.shape[0] == 0:
        return
    i = torch.arange(1 - taps, T, device=x.device)
    inputs = torch.cat(
        [ring[layer, slot, 0, (append + i[: taps - 1]) % layout.R], x[(first + i[taps - 1 :]).clamp(max=x.shape[0] - 1)]], 1
    )  # [B, taps - 1 + T, C]: input a, < 0 for a committed one, stands at taps - 1 + a
    parents, _ = _lineage(tree, B, T, x.device)
    a, i = i[taps - 1 :].expand(B, T), i[taps - 1 :]
    y = torch.zeros(B, T, x.shape[1], device=x.device) if bias is None else bias.float().expand(B, T, -1)
    for back in range(taps):
        y = y + inputs[torch.arange(B, device=x.device)[:, None], taps - 1 + a].float() * weight[:, taps - 1 - back].float()
        a = torch.where(a >= 0, parents.gather(1, a.clamp(min=0)), a - 1)
    on = i < t
    y = torch.nn.functional.silu(y) if silu else y
    scatter(out, torch.where(on, first + i, -1).flatten(), y.flatten(0, 1))
    rows = append_row(append, i, layout.R).flatten()
    _scatter_rows(ring[layer].transpose(1, 2), torch.where(on, slots, -1).flatten(), rows, inputs[:, taps - 1 :].flatten(0, 1))
