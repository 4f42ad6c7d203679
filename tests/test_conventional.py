"""The conventional step against the oracle: outputs, the state after any token, what it leaves alone."""

import dataclasses

import pytest
import torch

from replayssm import conventional, reference
from replayssm.layout import Buffers, states
from tests.cases import AWKWARD, FAMILY, inputs, weights
from tests.harness import BACKENDS, BOUND, DEVICE, relative_worst

T = 3
NONE = dict.fromkeys("qkvbaz")


def pool_of(layout, slots, generator):
    """A pool of random states, one of them a view with a gap between its slots."""
    H, V, K = layout.H, layout.V, layout.K
    wide = torch.randn(slots, H * V * K + 16, generator=generator) * K**-0.5
    return states(wide[:, : H * V * K].view(slots, H, V, K)[None].to(DEVICE))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*FAMILY.values(), AWKWARD[1]], ids=str)
def test_rows_of_their_own_lengths(case, backend):
    """Rows of 3, 0, 1 and 2 tokens, one of padding; states after the last token, and into another pool after each."""
    layout, g = case.layout(), torch.Generator().manual_seed(0)
    w, slots = weights(layout, g), [2, 0, -1, 3]
    t, first = [3, 0, 1, 2], [0, 3, 3, 4]
    x = NONE | inputs(layout, 6, g, z=case.recurrence.beta == "softplus")
    pool = pool_of(layout, 5, g)
    before = pool.state.clone()
    trail = states(torch.full((1, 6, layout.H, layout.V, layout.K), 9.0, device=DEVICE))
    u = torch.full((5, layout.H, T, layout.V), 9.0, device=DEVICE)
    out = torch.full((6, layout.H, layout.V), 9.0, dtype=layout.act, device=DEVICE)

    def ints(rows):
        return torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    to = ints([[4, -1, 0], [1, 1, 1], [2, 2, 2], [3, 5, 5]])
    conventional.step(
        ints(slots),
        T,
        {n: None if one is None else one.to(DEVICE) for n, one in x.items()},
        {n: None if one is None else one.to(DEVICE) for n, one in w.items()},
        pool,
        layout,
        backend,
        out=out,
        last=ints([2, 1, 1, 4]),
        trail=trail,
        to=to,
        corrections=u,
        first=ints(first),
        t=ints(t),
    )
    assert not out[3].any(), "rows of padding are zero"
    taken = {2: [0, 1, 2], 3: [4, 5]}
    for (slot, rows), last, kept in zip(taken.items(), (2, 4), ({4: 1, 0: 3}, {3: 1, 5: 2}), strict=True):
        token = {n: one[rows] for n, one in x.items() if one is not None}
        o, s = reference.decode(case.recurrence, before[0, slot].cpu(), **token, **w)
        assert relative_worst(out[rows].cpu(), o) < BOUND
        assert relative_worst(pool.state[0, last].cpu(), s) < BOUND
        for to_slot, n in kept.items():
            _, s = reference.decode(case.recurrence, before[0, slot].cpu(), **{k: v[:n] for k, v in token.items()}, **w)
            assert relative_worst(trail.state[0, to_slot].cpu(), s) < BOUND
    assert (trail.state[0, [1, 2]] == 9.0).all() and torch.equal(pool.state[0, [0, 1, 3]], before[0, [0, 1, 3]])
    assert (u[[0, 1, 4]] == 9.0).all() and (u[3, :, 2] == 9.0).all() and not (u[2] == 9.0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_corrections_fold_to_the_same_state(name, backend):
    """u of a row's tokens, taken as values without the delta rule and without outputs, gives the state after them."""
    case = FAMILY[name]
    layout, g = case.layout(), torch.Generator().manual_seed(1)
    w, x = weights(layout, g), NONE | inputs(layout, T, g)
    pool = pool_of(layout, 1, g)
    start = pool.state[0, 0].cpu().clone()
    slots, u = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, layout.H, T, layout.V, device=DEVICE)
    raw = torch.zeros(1, layout.H, T, 2 * layout.K, device=DEVICE) if case.recurrence.per_channel else None
    on = {n: None if one is None else one.to(DEVICE) for n, one in x.items()}
    w_on = {n: None if one is None else one.to(DEVICE) for n, one in w.items()}
    out = torch.empty(T, layout.H, layout.V, device=DEVICE)
    conventional.step(slots, T, on, w_on, pool, layout, backend, out=out, corrections=u, raw=raw)
    assert torch.equal(pool.state[0, 0].cpu(), start), "without last nothing is written"
    if raw is not None:
        assert torch.equal(raw[0].transpose(0, 1), torch.cat([on["k"], on["a"]], -1))
    open_loop = dataclasses.replace(layout, recurrence=dataclasses.replace(case.recurrence, delta=False, beta="one"))
    values = NONE | {"k": on["k"], "v": u[0].transpose(0, 1), "a": on["a"]}
    conventional.step(slots, T, values, w_on, pool, open_loop, backend, last=slots)
    _, s = reference.decode(case.recurrence, start, **{n: one for n, one in x.items() if one is not None}, **w)
    assert relative_worst(pool.state[0, 0].cpu(), s) < BOUND


@pytest.mark.parametrize("state", ["fp16", "fp16+sr", "e4m3:row", "e4m3+sr:row", "int8:row"])
def test_formats_round_alike(state):
    """Both backends store the same numbers, but where their fp32 states lie on two sides of a step; padding draws nothing."""
    if len(BACKENDS) < 2 or BACKENDS[1].marks[0].args[0]:
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    layout = FAMILY["gdn"].layout(state=state)
    seed = torch.tensor([7], device=DEVICE) if layout.format.stochastic else None
    stored = []
    for backend in ("torch", "triton"):
        g = torch.Generator().manual_seed(2)
        w, x = weights(layout, g), NONE | inputs(layout, 2, g)
        allocated = layout.allocate(1, 3, DEVICE)
        pool = Buffers(*(one if i < 3 else None for i, one in enumerate(allocated)))
        slots = torch.tensor([1, -1], device=DEVICE)
        on = {n: None if one is None else one.to(DEVICE) for n, one in x.items()}
        w = {n: None if one is None else one.to(DEVICE) for n, one in w.items()}
        conventional.step(slots, 1, on, w, pool, layout, backend, out=torch.empty_like(on["v"]), last=slots, seed=seed)
        stored.append(layout.format.decode(pool.checkpoint)[0])
    assert stored[0][1].any() and not stored[0][[0, 2]].any() and not stored[1][[0, 2]].any()
    assert ((stored[0] - stored[1]).abs() <= 1e-6 * stored[0].abs()).float().mean() > 0.999
