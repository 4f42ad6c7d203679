"""checkpointing_ssu through FlashInfer's layout and its caller's bookkeeping, against the oracle."""

import pytest
import torch

from replayssm.integrations import flashinfer as fi
from tests.harness import BOUND
from tests.integrations.flashinfer.harness import Mamba

SMALL = {"H": 2, "G": 1, "V": 16, "K": 16}


@pytest.mark.parametrize("T, window", [(1, 16), (4, 8), (4, 21)])
def test_many_steps(T, window):
    """200 steps of staggered rows, one of padding, some drafts accepted; windows above 16 and any T, too."""
    run = Mamba(T, window, [3, 0, 1])
    for i in range(200):
        slots = [3, 0, 1][: 1 + min(i, 2)] + [-1] * (i % 3 == 0)
        run.random.shuffle(slots)
        run.step(slots, BOUND, BOUND, pad=2 if i % 2 else -1)
    assert run.flushes > 15


def test_kernels(backend):
    """Both backends, through a flush; packed rows of their own lengths in turn."""
    run = Mamba(3, 4, [2, 0], **SMALL)
    for i in range(5):
        run.step([2, -1, 0], BOUND, BOUND, packed=i % 2 == 1)
    assert run.flushes


def test_packed_rows():
    """Rows of 1 ... T tokens, told by cu_seqlens; their flush rule looks at each row's own number."""
    run = Mamba(4, 8, [3, 0, 1])
    for i in range(80):
        run.step([3, -1, 0, 1][: 2 + i % 3], BOUND, BOUND, packed=True)
    assert run.flushes > 8


@pytest.mark.parametrize(
    "state, scaled, seed, bound",
    [
        (torch.bfloat16, False, None, 5e-2),
        (torch.float16, False, None, 5e-3),
        (torch.float16, False, 7, 1e-2),
        (torch.int16, True, None, 1e-3),
        (torch.int8, True, None, 1e-1),
        (torch.int8, True, 2**40 + 3, 2e-1),
        (torch.float8_e4m3fn, True, None, 4e-1),
        (torch.float8_e4m3fn, True, 7, 8e-1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_formats(dtype, state, scaled, seed, bound):
    """State formats and activations; the ring holds what came in: errors are the state's alone, but 16-bit outputs round."""
    run = Mamba(2, 5, [0, 2], dtype=dtype, state=torch.float32)
    scale = None
    if scaled:
        most = {torch.int8: 127.0, torch.int16: 32767.0, torch.float8_e4m3fn: 448.0}[state]
        live = run.pool["state"][run.live]
        scale = torch.full(run.pool["state"].shape[:3], float("nan"))
        scale[run.live] = live.abs().amax(-1) / most
        run.pool["state"] = torch.zeros_like(run.pool["state"]).to(state)
        run.pool["state"][run.live] = (live / scale[run.live][..., None]).round().to(state)
        run.exact = {slot: run.state(slot, scale).double() for slot in run.live}
    else:
        run.pool["state"] = run.pool["state"].to(state)
        run.exact = {slot: run.pool["state"][slot].double() for slot in run.live}
    kwargs = {} if seed is None else {"rand_seed": torch.tensor([seed])}
    for _ in range(12):
        run.step([2, 0], bound + (0 if dtype == torch.float32 else 3e-2), bound, state_scale=scale, **kwargs)
    assert run.flushes > 4


def test_random_bits_depend_on_seed_and_slot():
    """The same seed gives the same state, another seed or slot another."""

    def folded(seed, slot):
        run = Mamba(1, 3, [0, 2], state=torch.float16, **SMALL)
        run.pool["state"][2] = run.pool["state"][0]
        x = run.inputs(1, 1)
        for _ in range(5):
            out = torch.empty_like(x["x"])
            fi.checkpointing_ssu(
                **run.pool, ring_start=run.start * 0, prev_num_accepted_tokens=run.prev, **run.as_given(x), out=out,
                dt_softplus=True, state_batch_indices=torch.tensor([slot]), rand_seed=torch.tensor([seed]),
            )  # fmt: skip
            run.bookkeeping([slot], [1], [1])
        return run.pool["state"][slot]

    assert torch.equal(folded(1, 0), folded(1, 0))
    assert not torch.equal(folded(1, 0), folded(2, 0)) and not torch.equal(folded(1, 0), folded(1, 2))
