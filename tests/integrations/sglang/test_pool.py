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
    """Request 1's state goes to the host and comes back in the slot that request 3 leaves."""
    unit, truth = begun("gdn")
    pool = unit.pool.mamba_pool
    saved = pool.get_cpu_copy(unit.slots([1]).long())
    step(unit, truth, [2, 3], 2)
    pool.load_cpu_copy(saved, unit.reassign(3, 1))
    step(unit, truth, [2, 1], 7)
    truth[1].check(1)
    truth[2].check(2)


def test_retraction_and_resume():
    alone(retract, plugins="replayssm")


def share():
    """The prefix cache takes request 1's slot; request 4 starts from it, in a slot that decoded before."""
    from types import SimpleNamespace

    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    unit, truth = begun("kda")
    component = MambaComponent.__new__(MambaComponent)
    component.cache = SimpleNamespace(req_to_token_pool=unit.pool, enable_mamba_extra_buffer=False)
    slot = unit.slots([1])
    req = SimpleNamespace(kv=SimpleNamespace(mamba_pool_idx=slot[0]))
    assert component.prepare_for_caching_req(req, SimpleNamespace(), 7, True) == 7
    truth[1].check(1, snapshot=int(slot))
    unit.pool.copy_mamba_state(slot, unit.reassign(3, 4))
    truth[4] = truth[1].branch()
    step(unit, truth, [4, 2], 7)
    truth[4].check(4)
    truth[1].check(1, snapshot=int(slot))


def test_prefix_cache_entries_are_exact():
    alone(share, plugins="replayssm")


def fill():
    """A state that comes from elsewhere, a prefill server or a host cache, straight into a slot that decoded before."""
    from tests.integrations.sglang.test_backends import Truth

    unit, truth = begun("gdn")
    slot, cache = int(unit.reassign(2, 4)), unit.pool.mamba_pool.mamba_cache
    step(unit, truth, [3, 1], 1)  # a batch before the transfer is complete
    cache.temporal[:, slot] = cache.temporal[:, 3]
    cache.conv[0][:, slot] = cache.conv[0][:, 3]
    truth[4] = Truth(unit, 4)
    step(unit, truth, [4, 3], 7)
    truth[4].check(4)


def test_states_from_elsewhere():
    alone(fill, plugins="replayssm")


def fill_and_copy():
    """The same where decoding reads a copy of the state, which nobody sends."""
    from types import SimpleNamespace

    from replayssm.integrations.sglang import hooks
    from tests.integrations.sglang.test_backends import Truth
    from tests.integrations.sglang.units import Unit

    unit = Unit("gdn", options=("--replayssm-read", "int8"))
    unit.begin()
    slot, truth = unit.reassign(2, 4), Truth(unit, 4)
    queue = SimpleNamespace(scheduler=SimpleNamespace(req_to_token_pool=unit.pool))
    hooks.arrive(lambda *_: None, queue, SimpleNamespace(req=SimpleNamespace(kv=SimpleNamespace(mamba_pool_idx=slot[0]))))
    for _ in range(2):
        inputs = unit.tokens(1)
        for got, expected in zip(unit.decode([4], inputs), truth.token(inputs, 0), strict=True):
            assert (got[0] - expected).norm() < 0.02 * expected.norm()


def test_states_from_elsewhere_get_a_read_copy():
    alone(fill_and_copy, plugins="replayssm")


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_a_requests_slot_in_every_version(version):
    from types import SimpleNamespace

    from replayssm.integrations.sglang import names

    slots = {"mamba_pool_idx": 5}
    req = SimpleNamespace(kv=None, **slots) if version == "0.5.17" else SimpleNamespace(kv=SimpleNamespace(**slots))
    assert names.slot_of(req) == 5
