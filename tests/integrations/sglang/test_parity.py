"""The same requests with ReplaySSM: equal tokens over windows, over slots used again, and whatever befalls requests."""

import pytest

from .conftest import SIZES
from .serving import Request, serve
from .test_stock import FEW_SLOTS, REQUESTS, expected

OURS = {
    "qwen3-next": ("--linear-attn-decode-backend", "replayssm"),
    "kimi-linear": ("--linear-attn-decode-backend", "replayssm"),
    "nemotron-h": ("--mamba-backend", "replayssm"),
}
WINDOW = ("--replayssm-window", "4")


@pytest.mark.parametrize("preset", SIZES)
def test_tokens(models, preset):
    answers = serve(models[preset], REQUESTS, *FEW_SLOTS, *OURS[preset], *WINDOW, plugin=True)
    assert [answer.tokens for answer in answers] == expected(preset)
    assert answers[0].folds >= 4
    assert {slot for answer in answers for slot in answer.slots} == {1, 2}, "two slots for four requests"


# The later ones begin as the first one did, and go on elsewhere: prompt, and prompt with what was generated.
TURNS = [Request(range(30, 102), 30), Request([*range(30, 102), 7], 10, 36), Request(range(60, 65), 9, 2)]
# Admitted with room for a tenth of what they will generate: there is not enough.
GROWING = [Request(range(30, 42), 24), Request(range(60, 70), 24, 3), Request(range(100, 107), 24, 6)]
PATHS = {
    "prefix hits": (TURNS, ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]),
    "prefix hits of snapshots": (TURNS, ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"]),
    "mixed batches": (REQUESTS, ["--disable-radix-cache", "--enable-mixed-chunk", "--chunked-prefill-size", "8"]),
    "retraction": (GROWING, ["--disable-radix-cache", "--max-total-tokens", "72", "--schedule-conservativeness", "0.1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("preset", SIZES)
def test_paths(models, preset, path):
    """As without us, what the prefix cache finds included."""
    requests, options = PATHS[path][0], [*PATHS[path][1], "--max-running-requests", "4", "--max-mamba-cache-size", "24"]
    stock = serve(models[preset], requests, *options)
    ours = serve(models[preset], requests, *options, *OURS[preset], *WINDOW, plugin=True)
    assert [(one.tokens, one.cached) for one in ours] == [(one.tokens, one.cached) for one in stock]
    assert [one.retracted for one in ours] == [one.retracted for one in stock]
    assert not path.startswith("prefix") or stock[1].cached
    assert path != "retraction" or any(one.retracted for one in stock)
    assert ours[0].folds >= 4
