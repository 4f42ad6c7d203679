"""A prefill server and a decode server of SGLang, two processes: requests go over with exact states and decode as in one."""

from dataclasses import dataclass, field

import pytest

from replayssm.bench.sglang import launch

from .alone import alone, together
from .conftest import SIZES
from .cpu_options import OPTIONS
from .test_parity import OURS
from .test_stock import FEW_SLOTS, REQUESTS, expected

WINDOWS = {"prefill": 4, "decode": 6, "null": 6}


@dataclass
class Worker:
    """What one server saw.

    Attributes:
        tokens: of each request.
        pending: records that were in the rings of slots whose states were sent.
        folds: windows folded in each slot.
    """

    tokens: list[list[int]]
    pending: list[int] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)


def worker(folder, options, mode):
    from . import cpu  # noqa: F401  before what imports SGLang
    from replayssm.bench.sglang import transfer  # isort: skip
    from replayssm.bench.sglang.serving import Server  # isort: skip

    pending, send = [], transfer.Manager.send

    def watched(self, room, pages, states, aux):
        if states is not None:
            pending.extend(server.pool.replay.state.cursors.count[states[0][0].tolist()].reshape(-1).tolist())
        send(self, room, pages, states, aux)

    transfer.Manager.send = watched
    window = f"--replayssm-window={WINDOWS[mode]}"
    server = Server(folder, [*OPTIONS, *FEW_SLOTS, *options, window, "--disaggregation-mode", mode])
    answers = server.run(REQUESTS)
    return Worker([one.tokens for one in answers], pending, server.pool.replay.state.cursors.flushes.tolist())


def half(folder, options, rank):
    return worker(folder, options, ("prefill", "decode")[rank])


def apart(folder, preset, *options):
    """Prefill and decode."""
    return together(2, half, folder, [*OURS[preset], *options, *launch.apart()], plugins="replayssm")


@pytest.mark.parametrize("preset", [pytest.param(one, marks=[] if one == "kimi-linear" else pytest.mark.slow) for one in SIZES])
def test_tokens(models, preset):
    prefill, decode = apart(models[preset], preset)
    assert decode.tokens == expected(preset)
    assert [len(one) for one in prefill.tokens] == [1] * len(REQUESTS)
    assert prefill.pending == [0] * len(REQUESTS), "states are sent as SGLang's prefill wrote them"
    assert max(prefill.folds) == 0 and max(decode.folds) >= 2


@pytest.mark.slow
def test_read_copy(models):
    """Decoding reads a copy that only the decode server makes: as one server that has it."""
    read = "--replayssm-read", "e4m3"
    _, decode = apart(models["qwen3-next"], "qwen3-next", *read)
    one = alone(worker, models["qwen3-next"], [*OURS["qwen3-next"], *read], "null", plugins="replayssm")
    assert decode.tokens == one.tokens != expected("qwen3-next")
