"""SGLang's own pool of recurrent states, ours inside it: bytes, owners of slots, host copies, the prefix cache's own slots."""

import pytest

pytest.importorskip("sglang")

from tests.integrations.sglang.alone import alone


def step(unit, truth, rows, count):
    """Some decode steps, beside the truth."""
    from tests.integrations.sglang.test_backends import close

    for _ in range(count):
        inputs = unit.tokens(len(rows))
        for n, got in enumerate(zip(*unit.decode(rows, inputs), strict=True)):
            for one, expected in zip(got, truth[rows[n]].token(inputs, n), strict=True):
                close(one, expected)


def begun(family):
    """A unit whose requests 1, 2 and 3 have decoded some tokens."""
    from tests.integrations.sglang.test_backends import Truth
    from tests.integrations.sglang.units import Unit

    unit = Unit(family)
    unit.begin()
    truth = {row: Truth(unit, row) for row in (1, 2, 3)}
    step(unit, truth, [1, 2, 3], 7)
    assert unit.state.cursors.count[unit.slots([1, 2, 3]).long()].all()  # rings hold what SGLang's states do not
    return unit, truth


def charge(family, drafts):
    """SGLang sets aside what is allocated, to the byte, for its slots and the padding slot."""
    from sglang.srt.runtime_context import get_schedule

    from tests.integrations.sglang.units import Unit

    unit = Unit(family, drafts=drafts)
    cache, size = unit.pool.mamba_pool.mamba_cache, unit.pool.mamba_pool.size
    held = sum(x.nbytes for x in (*unit.state.buffers, *cache.conv) if x is not None) / (size + 1)
    if drafts:
        requests = unit.pool.size + 1
        held += sum(x.nbytes for x in cache.intermediate_conv_window) / requests
        assert not cache.intermediate_ssm.numel()
    charged = (1.0 - unit.left) * 2**30 / (get_schedule().max_mamba_cache_size + 1)
    assert charged == pytest.approx(held, rel=1e-6), (charged, held)
    assert unit.parameters.mamba_cache_per_req < charged  # SGLang's own figure is its own again


@pytest.mark.parametrize("family, drafts", [("gdn", 0), ("kda", 0), ("gdn", 3)])
def test_every_byte_is_charged(family, drafts):
    alone(charge, family, drafts, plugins="replayssm")


def retract():
    """Request 1's state goes to the host and comes back in another slot, which another request left."""
    unit, truth = begun("gdn")
    pool, old, new = unit.pool.mamba_pool, unit.slots([1]), unit.slots([3])
    saved = pool.get_cpu_copy(old.long())
    step(unit, truth, [2, 3], 2)
    pool.clear_slots(old.long())
    pool.load_cpu_copy(saved, new.long())
    unit.pool.req_index_to_mamba_index_mapping[1] = new[0]
    unit.pool.req_index_to_mamba_index_mapping[3] = old[0]
    step(unit, truth, [2, 1], 7)
    truth[1].check(1)
    truth[2].check(2)


def test_retraction_and_resume():
    alone(retract, plugins="replayssm")


def share():
    """The prefix cache takes request 1's slot; request 3 starts from it, in a slot that decoded before."""
    from types import SimpleNamespace

    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    unit, truth = begun("kda")
    component = MambaComponent.__new__(MambaComponent)
    component.cache = SimpleNamespace(req_to_token_pool=unit.pool, enable_mamba_extra_buffer=False)
    slot = unit.slots([1])
    req = SimpleNamespace(kv=SimpleNamespace(mamba_pool_idx=slot[0]))
    assert component.prepare_for_caching_req(req, SimpleNamespace(), 7, True) == 7
    truth[1].check(1, snapshot=int(slot))
    unit.pool.copy_mamba_state(slot, unit.slots([3]))
    truth[3] = truth[1].branch()
    step(unit, truth, [3, 2], 7)
    truth[3].check(3)
    truth[1].check(1, snapshot=int(slot))


def test_prefix_cache_entries_are_exact():
    alone(share, plugins="replayssm")


def clear():
    """A slot's next request sees nothing of the one before."""
    unit, truth = begun("gdn")
    slots = unit.slots([2])
    unit.pool.mamba_pool.clear_slots(slots.long())
    assert not unit.state.materialize(slots).any()


def test_cleared_slots_are_empty():
    alone(clear, plugins="replayssm")
