"""SGLang alone, run on the CPU as the other tests run it: the tokens are those of transformers."""

import functools

import pytest

from replayssm.bench.sglang.requests import Request

from .conftest import SIZES
from .serving import serve

# Of different lengths; the third and the fourth wait for a slot that the first two hold. The last is longer than a chunk.
REQUESTS = [
    Request(range(30, 42), 20),
    Request(range(60, 65), 9),
    Request(range(100, 107), 12, 3),
    Request(range(20, 90), 4, 6),
]
FEW_SLOTS = ("--max-running-requests", "2", "--disable-radix-cache")


@functools.cache
def expected(preset: str, **sizes: int) -> list[list[int]]:
    """Greedy tokens of transformers' own model for REQUESTS, with ``sizes`` in place of some in SIZES."""
    import torch

    from replayssm.integrations.transformers import presets

    model, _ = presets.build(preset, **SIZES[preset] | sizes)
    model.generation_config.update(suppress_tokens=None, eos_token_id=None)
    prompts = [torch.tensor([list(request.prompt)]) for request in REQUESTS]
    return [
        model.generate(prompt, max_new_tokens=request.tokens, do_sample=False)[0, prompt.shape[1] :].tolist()
        for prompt, request in zip(prompts, REQUESTS, strict=True)
    ]


@pytest.mark.parametrize("preset", SIZES)
def test_tokens_are_those_of_transformers(models, preset):
    answers, seen = serve(models[preset], REQUESTS, *FEW_SLOTS)
    assert [answer.tokens for answer in answers] == expected(preset)
    assert {slot for one in seen for slot in one.slots} == {1, 2}, "two slots for four requests"
    assert all(len(set(answer.tokens)) > len(answer.tokens) // 2 for answer in answers), "text that says something"
