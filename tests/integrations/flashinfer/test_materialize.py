"""replayssm_materialize through tables of addresses, against the oracle and against the fold of a step."""

import pytest
import torch

from replayssm.integrations import flashinfer as fi
from tests.harness import BACKENDS, BOUND, relative_worst
from tests.integrations.flashinfer.harness import Mamba

pytestmark = BACKENDS[1].marks[0]
SMALL = {"H": 2, "G": 1, "V": 16, "K": 16}


def tables(layers: list[Mamba], scales: list[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Addresses and slot strides of every layer's tensors."""
    made = {}
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        made[f"{name}_ptrs"] = [layer.pool[name].data_ptr() for layer in layers]
        made[f"{name}_slot_strides"] = [layer.pool[name].stride(0) for layer in layers]
    made["A_ptrs"] = [layer.weights["A"].data_ptr() for layer in layers]
    scales = [torch.empty(0)] * len(layers) if scales is None else scales
    made["state_scale_ptrs"] = [one.data_ptr() for one in scales]
    made["state_scale_slot_strides"] = [one.stride(0) for one in scales]
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in made.items()}


def sizes(layer: Mamba, **kwargs) -> dict:
    return {
        "state_dtype": layer.pool["state"].dtype, "input_dtype": layer.dtype, "matrixA_dtype": torch.float32,
        "dim": layer.V, "dstate": layer.K, "num_heads": layer.H, "heads_per_group": layer.H // layer.G,
        "max_window": layer.L - layer.T, "ring_buffer_len": layer.L,
    } | kwargs  # fmt: skip


def ints(rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("pad", [-1, 1])
def test_prefixes(pad):
    """Two layers, rings wrapped around: prefixes of 0, some and all records; rows left out, padded pairs; rings untouched."""
    layers = [Mamba(1, 5, [3, 0, 2], seed=seed, **SMALL) for seed in (0, 1)]
    kept = []
    for layer in layers:
        layer.start.fill_(4)
        records = {slot: [] for slot in layer.live}
        for _ in range(4):
            x = layer.inputs(3, 1)
            fi.checkpointing_ssu(
                **layer.pool, ring_start=layer.start, prev_num_accepted_tokens=layer.prev, **layer.as_given(x),
                out=torch.empty_like(x["x"]), dt_softplus=True, state_batch_indices=ints(layer.live),
            )  # fmt: skip
            layer.bookkeeping(layer.live, [1] * 3, [1] * 3)
            for row, slot in enumerate(layer.live):
                records[slot].append({name: one[row] for name, one in x.items()})
        kept.append(records)
    for layer in layers:
        layer.pool["state"] = torch.cat([layer.pool["state"], torch.full((4, 2, 16, 16), 9.0)])
    before = [{name: one.clone() for name, one in layer.pool.items()} for layer in layers]
    fi.replayssm_materialize(
        **tables(layers),
        src_slots=ints([[3, 0, 2, 3], [2, pad, 3, 3]]),
        dst_slots=ints([[5, 6, 7, 8], [5, 6, 7, 8]]),
        ring_start=ints([4, 4, 4, 4]),
        replay_prefix_len=ints([3, 0, 4, 1]),
        active_request_indices=ints([2, 0, 1, -1]),
        pad_slot_id=pad,
        **sizes(layers[0]),
    )
    for i, (layer, sources) in enumerate(zip(layers, ((3, 0, 2), (2, None, 3)), strict=True)):
        state = layer.pool["state"]
        for dst, slot, n in zip((5, 6, 7), sources, (3, 0, 4), strict=True):
            if slot is None:
                assert (state[dst] == 9.0).all()
            elif n == 0:
                assert torch.equal(state[dst], before[i]["state"][slot])
            else:
                x = {name: torch.cat([one[name] for one in kept[i][slot][:n]])[None] for name in kept[i][slot][0]}
                assert relative_worst(state[dst], layer.oracle(slot, x, 0, n)[1]) < BOUND
        assert (state[8] == 9.0).all()
        for name, one in before[i].items():
            assert torch.equal(one[:5].nan_to_num(), layer.pool[name][:5].nan_to_num()), name


def test_scaled_states_and_random_rounding():
    """int8 states with their scales: a copy is bit for bit; the same seed rounds alike, another does not."""
    layer = Mamba(1, 3, [0], state=torch.float32, **SMALL)
    layer.pool["state"] = (layer.randn(4, 2, 16, 16) * 40).clamp(-100, 100).to(torch.int8)
    scale = layer.randn(4, 2, 16).abs() + 0.1
    for name in ("x_cache", "B_cache", "dt_cache"):
        layer.pool[name] = layer.randn(*layer.pool[name].shape).abs()
    first = layer.pool["state"].clone()

    def run(n, dst, **kwargs):
        fi.replayssm_materialize(
            **tables([layer], [scale]), src_slots=ints([[0]]), dst_slots=ints([[dst]]), ring_start=ints([2]),
            replay_prefix_len=ints([n]), active_request_indices=ints([0]), **sizes(layer, **kwargs),
        )  # fmt: skip
        return layer.pool["state"][dst].clone()

    assert torch.equal(run(0, 1), first[0]) and torch.equal(scale[1], scale[0])
    nearest, one, again = run(2, 2), *(run(2, 2, rand_seed=torch.tensor([5]), philox_rounds=10) for _ in range(2))
    other = run(2, 2, rand_seed=torch.tensor([6]), philox_rounds=10)
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, nearest)
    assert (one.int() - nearest.int()).abs().max() == 1
    assert nearest.abs().max() == 127 and torch.equal(layer.pool["state"][0], first[0])


def test_compiled():
    """A break in a compiled graph, whose own writes around it are seen."""
    layer = Mamba(1, 3, [0], **SMALL)
    for name in layer.pool:
        layer.pool[name] = layer.randn(*layer.pool[name].shape)
    addresses, state = tables([layer]), layer.pool["state"]
    rows = {"src_slots": ints([[0]]), "dst_slots": ints([[1]]), "ring_start": ints([0])}
    rows |= {"replay_prefix_len": ints([0]), "active_request_indices": ints([0])}

    @torch.compile(backend="aot_eager")
    def copied(state):
        state[0] += 1
        fi.replayssm_materialize(**addresses, **rows, **sizes(layer))
        return state[1] - 1

    before = state.clone()
    assert torch.equal(copied(state), before[0] + 1 - 1) and torch.equal(state[1], before[0] + 1)
    torch._dynamo.reset()
