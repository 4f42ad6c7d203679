"""Speculation with temperature: the tokens that a cache of snapshots would give, and their distribution without drafts."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch

hf = pytest.importorskip("transformers")

from replayssm.integrations.transformers import enable, presets, speculation_of
from tests.integrations.test_transformers import LOGITS, built, forced, inputs_of, largest_difference, new_cache, text
from tests.integrations.test_transformers_speculation import DRAFTS, attention_model


class Snapshots(hf.DynamicCache):
    """transformers' own states, taken back the plain way: copied before a forward, whose kept tokens are read again."""

    def __init__(self, model):
        super().__init__(config=model.config)
        self.model = model

    def activate_past_recording(self):
        """Nothing is recorded: ``crop`` needs the copy alone."""

    def crop(self, tokens_to_remove):
        if tokens_to_remove:
            layers, ids = self.copied
            self.layers = layers
            self.model(input_ids=ids[:, :tokens_to_remove], past_key_values=self)


@contextmanager
def snapshots(model):
    """transformers decodes with drafts on a ``Snapshots`` cache, which it otherwise refuses for a recurrent model."""

    def copied(module, args, kwargs):
        cache = kwargs["past_key_values"]
        cache.copied = copy.deepcopy(cache.layers), kwargs["input_ids"]

    hook, model._is_stateful = model.register_forward_pre_hook(copied, with_kwargs=True), False
    try:
        yield
    finally:
        hook.remove()
        del model._is_stateful


def sampled(model, ids, n, seed, cache, **options):
    """n tokens; the same seed draws the same random numbers, as long as the same drafts are made and kept."""
    torch.manual_seed(seed)
    return model.generate(ids, do_sample=True, max_new_tokens=n, past_key_values=cache, **options)


def ways(letters, temperature):
    """(the prompt's tokens, prompt lookup's options, an assistant's): of a text of few letters many drafts are right."""
    ids = inputs_of("qwen3.5", ["".join(letter for letter in text if letter in letters)[:40]])["input_ids"]
    other = [token for token in range(presets.VOCAB) if token not in set(ids[0].tolist())]
    shared = {"temperature": temperature, "top_k": 0, "suppress_tokens": other}
    lookup, assistant = {"prompt_lookup_num_tokens": DRAFTS}, {"assistant_model": attention_model()}
    return ids, {"prompt lookup": lookup | shared, "assistant": assistant | shared}


@pytest.mark.parametrize("way", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "kimi-linear"])
def test_tokens_are_those_of_snapshots(name, way):
    """Drafts are drawn, accepted and replaced by the same random numbers, so equal states give equal tokens."""
    model, (ids, options) = built(name)[0], ways("etao", 8.0)
    with snapshots(model):
        expected = [sampled(model, ids, 40, seed, Snapshots(model), **options[way]) for seed in range(3)]
    assert len({tuple(tokens[0].tolist()) for tokens in expected}) == 3
    with enable(model, window=8, draft_tokens=DRAFTS, debug=True):
        for seed, tokens in enumerate(expected):
            cache = new_cache(model)
            assert torch.equal(sampled(model, ids, 40, seed, cache, **options[way]), tokens)
            assert 1.1 < speculation_of(cache).acceptance < DRAFTS  # some drafts stayed and some did not


@pytest.mark.parametrize("way", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "kimi-linear"])
def test_distribution_is_that_without_drafts(name, way):
    """The logits that each token is drawn by are those of transformers' own decoding of the same text, token by token."""
    model, (ids, options) = built(name)[0], ways("etao", 8.0)
    with enable(model, window=8, draft_tokens=DRAFTS):
        output = sampled(model, ids, 60, 0, new_cache(model), **options[way], return_dict_in_generate=True, output_logits=True)
    expected = forced(model, new_cache(model), output.sequences, [ids.shape[1]] + [1] * 59)
    assert largest_difference(torch.stack(output.logits, 1), expected) < LOGITS
