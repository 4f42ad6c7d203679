"""SGLang with --tp-size 2: two processes that talk over gloo, each with its heads and groups, and with the same plans."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from replayssm.bench.sglang import folders, launch

from .alone import together
from .conftest import SIZES
from .test_parity import OURS, WINDOW
from .test_stock import FEW_SLOTS, REQUESTS, expected

# The value heads and key groups of a whole layer, and what the preset has otherwise.
CASES = {
    "qwen3-next": (4, 2, {"linear_num_value_heads": 4, "linear_num_key_heads": 2}),
    "nemotron-h": (4, 2, {"mamba_num_heads": 4, "n_groups": 2}),
    "nemotron-h, one group for both": (2, 1, {}),
    "kimi-linear": (2, 2, {}),
}


@dataclass
class Rank:
    """What one process saw.

    Attributes:
        tokens: of each request.
        layout: of its layers.
        slot_bytes: what a slot of its pool takes: states, rings and convolution windows.
        charged: what its memory budget was charged with for a slot.
        cursors: before each iteration of the scheduler, of all slots.
    """

    tokens: list[list[int]]
    layout: Any = None
    slot_bytes: float = 0.0
    charged: float = 0.0
    cursors: list[dict[str, list[int]]] = field(default_factory=list)


def stock(folder, options, rank):
    return Rank([one.tokens for one in _server(folder, options, rank).run(REQUESTS)])


def ours(folder, options, rank):
    from sglang.srt.runtime_context import get_schedule

    from . import cpu  # noqa: F401  before what imports SGLang
    from replayssm.integrations.sglang import hooks  # isort: skip

    charged, size = [], hooks.size

    def watched(original, self, rest):
        left = size(original, self, rest)
        charged.append((rest - left) * 2**30 / (get_schedule().max_mamba_cache_size + 1))
        return left

    hooks.size = watched  # registered when SGLang loads the plugin
    server = _server(folder, [*options, *WINDOW], rank)
    state, windows, cursors = server.pool.replay.state, server.pool.mamba_cache.conv, []
    answers = server.run(REQUESTS, lambda *_: cursors.append({k: v.tolist() for k, v in state.cursors._asdict().items()}))
    held = server.slot_bytes[0] + sum(x.nbytes for x in windows) / (server.pool.size + 1)
    return Rank([one.tokens for one in answers], server.pool.replay.layout, held, charged[0], cursors)


def _server(folder, options, rank):
    from . import cpu  # noqa: F401
    from .cpu_options import OPTIONS
    from replayssm.bench.sglang.serving import Server  # isort: skip

    return Server(folder, [*OPTIONS, *FEW_SLOTS, *options], rank)


def pair(case, tmp_path, function, *options, plugins="none"):
    """Both ranks, whose tokens are those of one, and the case's heads and groups."""
    preset, (H, G, sizes) = case.partition(",")[0], CASES[case]
    folder = folders.write(preset, tmp_path, **SIZES[preset] | sizes)
    ranks = together(2, function, folder, [*options, *launch.parallel(2)], plugins=plugins)
    assert [rank.tokens for rank in ranks] == [expected(preset, **sizes)] * 2
    return ranks, H, G


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sglang_alone(case, tmp_path):
    pair(case, tmp_path, stock)


@pytest.mark.parametrize("case", [pytest.param(one, marks=[] if one == "nemotron-h" else pytest.mark.slow) for one in CASES])
def test_tokens_plans_and_memory(case, tmp_path):
    """Tokens as on one; cursors alike before every step; each rank holds, and is charged with, its heads and groups alone."""
    ranks, H, G = pair(case, tmp_path, ours, *OURS[case.partition(",")[0]], plugins="replayssm")
    assert ranks[0].cursors == ranks[1].cursors and max(ranks[0].cursors[-1]["flushes"]) >= 2
    for rank in ranks:
        assert (rank.layout.H, rank.layout.G) == (H // 2, max(1, G // 2))
        assert rank.charged == pytest.approx(rank.slot_bytes, rel=1e-6)
