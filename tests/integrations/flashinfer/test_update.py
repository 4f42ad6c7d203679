"""selective_state_update in every form that FlashInfer takes, against the oracle."""

import pytest
import torch

from replayssm import MAMBA2, reference
from replayssm.integrations import flashinfer as fi
from tests.harness import BOUND, relative_worst
from tests.integrations.flashinfer.harness import Mamba

S = 9


class Layer(Mamba):
    """A pool of whole states and some tokens of it."""

    def __init__(self, seed: int = 0):
        super().__init__(1, 1, [0], seed, H=2, G=1, V=16, K=16)
        self.states = self.randn(S, self.H, self.V, self.K)
        self.before = self.states.clone()

    def after(self, slot: int, x: dict[str, torch.Tensor], row, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's outputs and state of the first n of some tokens."""
        token = {ours: x[theirs][row][:n] for ours, theirs in zip("qkvbz", ("C", "B", "x", "dt", "z"), strict=True)}
        return reference.decode(MAMBA2, self.before[slot], **token, **self.weights)

    def unchanged(self, *written: int) -> None:
        kept = [slot for slot in range(S) if slot not in written]
        assert torch.equal(self.states[kept], self.before[kept])


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("pad", [-1, 0])
def test_one_token(backend, pad):
    """[B, H, dim] tokens; padding by either sentinel; the state in place, into another slot, or left alone."""
    run = Layer()
    x = run.inputs(3, 1)
    given = run.as_given({name: one[:, 0] for name, one in x.items()})
    for kwargs, written in (
        ({"disable_state_update": True}, {}),
        ({}, {4: (0, 4), 7: (2, 7)}),
        ({"dst_state_batch_indices": ints(5, pad, 6)}, {5: (0, 4), 6: (2, 7)}),
    ):
        run.states.copy_(run.before)
        out = torch.full((3, run.H, run.V), 9.0)
        slots = ints(4, pad, 7)
        o = fi.selective_state_update(
            run.states, **given, dt_softplus=True, state_batch_indices=slots, pad_slot_id=pad, out=out, **kwargs
        )
        assert o is out and not out[1].any()
        for row, slot in ((0, 4), (2, 7)):
            assert relative_worst(out[row], run.after(slot, x, row, 1)[0][0]) < BOUND
        for slot, (row, source) in written.items():
            assert relative_worst(run.states[slot], run.after(source, x, row, 1)[1]) < BOUND
        run.unchanged(*written)


def test_several_tokens_and_snapshots(backend):
    """[B, T, H, dim] tokens; the state after each into a buffer's rows, the pool's left alone or not."""
    run, T = Layer(1), 3
    x = run.inputs(2, T)
    for disabled in (True, False):
        run.states.copy_(run.before)
        buffer = torch.full((4, T + 1, run.H, run.V, run.K), 9.0)
        out = fi.selective_state_update(
            run.states,
            **run.as_given(x),
            dt_softplus=True,
            state_batch_indices=ints(3, 8),
            disable_state_update=disabled,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=ints(2, 1),
            cache_steps=T,
        )
        assert out.shape == (2, T, run.H, run.V)
        for row, (slot, kept) in enumerate(((3, 2), (8, 1))):
            for n in range(1, T + 1):
                o, s = run.after(slot, x, row, n)
                assert relative_worst(buffer[kept, n - 1], s) < BOUND
            assert relative_worst(out[row], o) < BOUND
            assert disabled or relative_worst(run.states[slot], s) < BOUND
        run.unchanged(*(() if disabled else (3, 8)))
        assert (buffer[[0, 3]] == 9.0).all() and (buffer[:, T] == 9.0).all()


def test_packed_speculation(backend):
    """Packed rows that start from what was accepted of the last step's states and leave one after each token."""
    run, T = Layer(2), 3
    lengths, first = [3, 1, 2], [0, 3, 4]
    x = {name: one[0] for name, one in run.inputs(1, 6).items()}
    out = torch.full((7, run.H, run.V), 9.0)
    given = run.as_given(x)
    o = fi.selective_state_update(
        run.states,
        **given,
        dt_softplus=True,
        state_batch_indices=torch.stack([ints(0, 1, 2), ints(-1, 3, 3), ints(4, 5, 6)]),
        dst_state_batch_indices=torch.stack([ints(0, 1, -1), ints(7, 7, 7), ints(3, 8, 4)]),
        num_accepted_tokens=ints(3, 0, 2, dtype=torch.int64),
        cu_seqlens=ints(0, 3, 4, 6),
        cache_steps=T,
        out=out[:6],
    )
    assert o.data_ptr() == out.data_ptr() and (out[6] == 9.0).all() and not out[3].any()
    for row, source, targets in ((0, 2, {0: 1, 1: 2}), (2, 5, {3: 1, 8: 2})):
        mine = slice(first[row], first[row] + lengths[row])
        assert relative_worst(out[mine], run.after(source, x, mine, lengths[row])[0]) < BOUND
        for slot, n in targets.items():
            assert relative_worst(run.states[slot], run.after(source, x, mine, n)[1]) < BOUND
    run.unchanged(0, 1, 3, 8)


def test_dimensions_left_out():
    """One head without the dimension of heads; weights without it; no softplus with a bias; no slots: row b has slot b."""
    run = Layer(3)
    run.H = run.G = 1
    x = {name: one[:, 0, 0] for name, one in run.inputs(2, 1).items()}
    w = {name: one[:1] for name, one in run.weights.items()}
    states = run.states[:, 0].contiguous()
    out = fi.selective_state_update(
        states,
        x["x"],
        x["dt"].abs()[:, None].expand(2, run.V),
        w["A"][:, None].expand(run.V, run.K),
        x["B"],
        x["C"],
        w["D"].expand(run.V),
        z=x["z"],
        dt_bias=w["dt_bias"].expand(run.V),
    )
    assert out.shape == (2, 1, run.V)
    ready = fi.mamba.READY
    for row in range(2):
        token = {"q": x["C"], "k": x["B"], "v": x["x"], "z": x["z"]}
        token = {name: one[row][None, None] for name, one in token.items()}
        b = (x["dt"].abs()[row] + w["dt_bias"])[None]
        o, s = reference.decode(ready, run.before[row, :1], **token, b=b, A=w["A"], D=w["D"])
        assert relative_worst(out[row], o[0]) < BOUND
        assert relative_worst(states[row], s[0]) < BOUND
