"""The same requests with ReplaySSM: equal tokens over windows, over slots used again, and whatever befalls requests."""

import pytest

from replayssm.bench.sglang.requests import Request

from .conftest import SIZES
from .serving import serve
from .test_stock import FEW_SLOTS, REQUESTS, expected

OURS = {
    "qwen3-next": ("--linear-attn-decode-backend", "replayssm"),
    "kimi-linear": ("--linear-attn-decode-backend", "replayssm"),
    "nemotron-h": ("--mamba-backend", "replayssm"),
}
WINDOW = ("--replayssm-window", "4")


@pytest.mark.parametrize("preset", SIZES)
def test_tokens(models, preset):
    answers, seen = serve(models[preset], REQUESTS, *FEW_SLOTS, *OURS[preset], *WINDOW, plugin=True)
    assert [answer.tokens for answer in answers] == expected(preset)
    assert seen[0].folds >= 4
    assert {slot for one in seen for slot in one.slots} == {1, 2}, "two slots for four requests"


def both(folder, preset, requests, *options):
    """Answers without and with ReplaySSM, which are equal, what the prefix cache found included; and what befell requests."""
    options = [*options, "--max-running-requests", "4", "--max-mamba-cache-size", "24"]
    stock, _ = serve(folder, requests, *options)
    ours, seen = serve(folder, requests, *options, *OURS[preset], *WINDOW, plugin=True)
    assert [(one.tokens, one.cached, one.retracted) for one in ours] == [
        (one.tokens, one.cached, one.retracted) for one in stock
    ]
    return stock, seen


# The states at the end of an answer, and at a multiple of 64 tokens within it.
CACHES = {
    "no_buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    "extra_buffer": ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"),
}


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("preset", SIZES)
def test_prefix_hits(models, preset, cache):
    """A second turn goes on from a state that decoding left, at the position where SGLang has it without us."""
    first = Request(range(30, 130), 34)
    (answer,), _ = serve(models[preset], [first], *FEW_SLOTS)
    turn = Request([*first.prompt, *answer.tokens, 7], 10, at=45)
    stock, seen = both(models[preset], preset, [first, turn, Request(range(60, 65), 9, at=2)], *CACHES[cache])
    assert stock[1].cached > len(first.prompt) and seen[0].folds >= 4


@pytest.mark.slow
@pytest.mark.parametrize("preset", SIZES)
def test_mixed_batches(models, preset):
    """A prompt in pieces of 8 tokens, each in one forward pass with requests that have decoded; SGLang tells no logits then."""
    requests = [Request(range(30, 42), 32, logits=False), Request(range(20, 50), 4, at=12, logits=False)]
    _, seen = both(
        models[preset], preset, requests, "--disable-radix-cache", "--enable-mixed-chunk", "--chunked-prefill-size", "8"
    )
    assert {"MIXED", "DECODE"} <= seen[0].batches


@pytest.mark.slow
@pytest.mark.parametrize("preset", SIZES)
def test_retraction(models, preset):
    """Admitted with room for a tenth of what they will generate."""
    requests = [Request(range(30, 42), 24), Request(range(60, 70), 24, 3), Request(range(100, 107), 24, 6)]
    stock, seen = both(
        models[preset],
        preset,
        requests,
        "--disable-radix-cache",
        "--max-total-tokens",
        "72",
        "--schedule-conservativeness",
        "0.1",
    )
    assert any(one.retracted for one in stock) and seen[0].folds >= 4
