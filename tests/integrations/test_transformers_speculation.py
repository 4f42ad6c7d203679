"""transformers' own assisted generation with ReplaySSM: tokens as without drafts, rejected drafts leave no trace."""

from __future__ import annotations

import copy
import functools
import math
import os

import pytest
import torch

hf = pytest.importorskip("transformers")

from transformers.generation.candidate_generator import CandidateGenerator

from replayssm import GDN, Layout
from replayssm.integrations.transformers import Speculation, disable, enable, presets, speculation_of, state_of
from replayssm.integrations.transformers.families import MIXERS
from tests.integrations.test_transformers import (
    LOGITS,
    forced,
    inputs_of,
    largest_difference,
    new_cache,
    rows_of_text,
    text,
)

EVERY = list(presets.PRESETS)
# Mamba2 calls its cache cache_params, which transformers' assisted decoding does not look for.
ALLOWED = [name for name in EVERY if name != "mamba2"]
DRAFTS = 4


@pytest.fixture(scope="module")
def models():
    """Each preset once."""
    return functools.cache(lambda name: presets.build(name)[0])


@pytest.fixture(autouse=True)
def off(models):
    """Whatever a test enabled is off again for the next."""
    yield
    for name in EVERY:
        if any("forward" in vars(module) for module in models(name).modules() if type(module).__name__ in MIXERS):
            disable(models(name))


class Told(CandidateGenerator):
    """Drafts a known continuation; of the i-th draft the first ``right[i]`` tokens are right and the rest is not."""

    def __init__(self, tokens, right):
        self.tokens, self.right, self.calls, self.drafted = tokens, right, 0, []

    def get_candidates(self, input_ids):
        at = input_ids.shape[1]
        draft = self.tokens[:, at : min(at + DRAFTS, self.tokens.shape[1] - 1)].clone()
        draft[:, self.right[self.calls % len(self.right)] :] ^= 1
        self.calls += 1
        self.drafted.append(draft.shape[1])
        return torch.cat([input_ids, draft], 1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        pass


def attention_model():
    """A small model without recurrence, to draft with."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=presets.VOCAB, pad_token_id=presets.PAD, **small)).eval()
    model.generation_config.num_assistant_tokens = DRAFTS
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def lengths(model, run):
    """What ``run()`` returns, and the tokens of every forward it made."""
    seen = []
    hook = model.register_forward_hook(lambda *call: seen.append(call[2]["input_ids"].shape[1]), with_kwargs=True)
    try:
        return run(), seen
    finally:
        hook.remove()


def greedy(model, ids, n, **options):
    return model.generate(ids, do_sample=False, max_new_tokens=n, **options)


# ---- generate() ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALLOWED)
def test_prompt_lookup(models, name):
    """The end of the text occurred before, so that there are drafts from the first forward on."""
    model, ids = models(name), inputs_of(name, [text[:300]])["input_ids"]
    tokens = greedy(model, ids, 128)
    with enable(model, draft_tokens=DRAFTS, debug=True):
        ours, seen = lengths(model, lambda: greedy(model, ids, 128, prompt_lookup_num_tokens=DRAFTS))
    assert torch.equal(tokens, ours)
    assert seen[0] == 300 + DRAFTS
    assert len(seen) < 128  # some drafts were accepted
    assert sum(seen) - 300 > 128  # and some were not
    assert max(seen[1:]) == DRAFTS + 1


@pytest.mark.parametrize("window", [5, 16])
@pytest.mark.parametrize("name", ALLOWED)
def test_acceptance(models, name, window, monkeypatch):
    """Drafts of which 0 to 4 tokens are right: as many forwards as that many accepted drafts leave."""
    model, ids = models(name), inputs_of(name, [text[:150]])["input_ids"]
    tokens = greedy(model, ids, 101)
    right = [2, 4, 0, 1, 3, 4, 4, 0, 0]
    told = Told(tokens, right)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: told)
    with enable(model, window=window, draft_tokens=DRAFTS, debug=True):
        cache = new_cache(model)
        options = {"prompt_lookup_num_tokens": DRAFTS, "past_key_values": cache}
        ours, seen = lengths(model, lambda: greedy(model, ids, 101, **options))
    assert torch.equal(tokens, ours)
    assert seen == [150 + DRAFTS] + [1 + drafted for drafted in told.drafted[1:]]
    kept = [1 + min(right[i % len(right)], drafted) for i, drafted in enumerate(told.drafted)]
    assert sum(kept) == 101
    of = speculation_of(cache)  # the first step is drafts alone: the token before them is the prompt's
    assert (of.steps, of.tokens, of.kept) == (len(seen), sum(seen) - 150, 100)
    assert of.acceptance == 100 / len(seen)
    cursors = state_of(cache).cursors  # as the host follows them
    assert [of.flushes] == cursors.flushes.tolist()
    assert [100 - of.folded] == cursors.count.tolist()
    assert of.snapshots_avoided == of.tokens * sum(type(module).__name__ in MIXERS for module in model.modules())


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "kimi-linear"])
def test_assistant_model(models, name):
    """An attention model drafts. A recurrent one, ours or not, would have to take back several forwards."""
    model, ids = models(name), inputs_of(name, [text[:100]])["input_ids"]
    tokens = greedy(model, ids, 40)
    with enable(model, draft_tokens=DRAFTS, debug=True):
        ours, seen = lengths(model, lambda: greedy(model, ids, 40, assistant_model=attention_model()))
    assert torch.equal(tokens, ours)
    assert max(seen[1:]) == DRAFTS + 1


@pytest.mark.parametrize("name", ALLOWED)
def test_second_prompt_on_the_same_cache(models, name):
    """After drafts, a new prompt on the same cache, which still records. Without drafts: with them transformers, whatever
    the model, reads all of the text again."""
    model = models(name)
    first = inputs_of(name, [text[:80] * 2])["input_ids"]
    more = inputs_of(name, [text[300:360] * 2])["input_ids"]

    def run(**options):
        cache = new_cache(model)
        said = greedy(model, first, 31, past_key_values=cache, **options)
        return greedy(model, torch.cat([said, more], 1), 40, past_key_values=cache)

    tokens = run()
    with enable(model, draft_tokens=DRAFTS, debug=True):
        assert torch.equal(tokens, run(prompt_lookup_num_tokens=DRAFTS))


@pytest.mark.parametrize("name", ALLOWED)
def test_short_prompt(models, name):
    """Fewer tokens than drafts, drafts or not."""
    model, ids = models(name), inputs_of(name, ["abab"])["input_ids"]
    tokens = greedy(model, ids, 20)
    with enable(model, draft_tokens=DRAFTS, debug=True):
        assert torch.equal(tokens, greedy(model, ids, 20, prompt_lookup_num_tokens=DRAFTS))
        assert torch.equal(tokens, greedy(model, ids, 20))


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h", "kimi-linear"])
def test_triton_kernels(models, name, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    model, ids = copy.deepcopy(models(name)).to(device), inputs_of(name, [text[:30]], device)["input_ids"]
    tokens = greedy(model, ids, 10)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: Told(tokens, [2, 4]))
    with enable(model, window=6, draft_tokens=DRAFTS, backend="triton", debug=True):
        assert torch.equal(tokens, greedy(model, ids, 10, prompt_lookup_num_tokens=DRAFTS))


def test_speculation_counts_bytes_by_hand():
    """The layer of test_layout's hand counts, three times: S = 262144, T_max = 4, a ring row 3640 of which a readout reads
    2584 and a fold 1568. A step that finds 12 records and one that finds 15, and so flushes; they keep 3 and 1 of 4 and 2."""
    of = Speculation(Layout(GDN, 4, 2, 128, 128, W=16, T_max=4, u=torch.float32), layers=3)
    assert math.isnan(of.acceptance) and math.isnan(of.replay_bytes.total) and of.snapshots_avoided == 0
    of = of.and_a_step(4, 3, count=12, flush=0).and_a_step(2, 1, count=15, flush=1)
    assert of.acceptance == 2.0 and of.snapshots_avoided == 18
    assert (of.snapshot_bytes.read, of.snapshot_bytes.written) == (3 * 2 * 262144 / 4, 3 * 6 * 262144 / 4)
    assert of.replay_bytes.read == 3 * (3 * 262144 + 12 * 2584 + 15 * 1568) / 4
    assert of.replay_bytes.written == 3 * (6 * 3640 + 262144) / 4
    assert of.snapshot_memory == 3 * 5 * 262144 and of.replay_memory == 3 * (262144 + 20 * 3640)


def test_plain_decoding_is_no_speculation(models):
    model, ids = models("qwen3.5"), inputs_of("qwen3.5", [text[:20]])["input_ids"]
    with enable(model, draft_tokens=2):
        cache = new_cache(model)
        with pytest.raises(ValueError, match="cache: expected one that a model filled"):
            speculation_of(cache)
        greedy(model, ids, 5, past_key_values=cache)
        assert speculation_of(cache).steps == 0


# ---- caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_crop(models, name):
    """Three rows; forwards of several tokens of which the cache forgets some, and the text goes on where it was cut."""
    model, tokens = models(name), rows_of_text(name, 3, 80)
    steps = forced(model, new_cache(model), tokens, [30, *[1] * 50])
    with enable(model, window=7, draft_tokens=DRAFTS, debug=True):
        cache = new_cache(model)
        cache.activate_past_recording()
        forced(model, cache, tokens, [30])
        cache.crop(0)
        at = 30
        for t, dropped in [(5, 2), (5, 5), (1, 0), (4, 0), (3, 2), (5, 1), (2, 1), (5, 4), (5, 0), (1, 0)]:
            logits = forced(model, cache, tokens[:, at:], [t])[:, -1]
            assert largest_difference(logits, steps[:, at + t - 30]) < LOGITS
            cache.crop(-dropped)
            at += t - dropped
        twin = copy.deepcopy(cache)
        forced(model, twin, tokens[:, at:], [4])
        twin.crop(-3)
        forced(model, cache, tokens[:, at:], [5])
        cache.crop(-3)
        for one, length in ((twin, 1), (cache, 2)):
            logits = forced(model, one, tokens[:, at + length :], [3])
            assert largest_difference(logits[:, 0], steps[:, at + length + 3 - 30]) < LOGITS
        assert not (state_of(cache).cursors.pending % 2).any()  # who asks for the state gets it with all tokens


@pytest.mark.parametrize("name", EVERY)
def test_reset_and_reorder_with_drafts_under_way(models, name):
    """The second row has folded then and the first has not: the host follows what the first becomes."""
    model, tokens = models(name), rows_of_text(name, 2, 60)
    order = torch.tensor([1, 1])
    steps = forced(model, new_cache(model), tokens[order], [30, *[1] * 10])
    with enable(model, window=6, draft_tokens=DRAFTS, debug=True):
        cache = new_cache(model)
        cache.activate_past_recording()
        forced(model, cache, tokens, [30, 4, 2])
        replay = next(layer.recurrent_states[0].replay for layer in cache.layers if hasattr(layer, "recurrent_states"))

        def followed() -> bool:
            return int(state_of(cache).cursors.count[0]) == replay.count

        assert followed() and state_of(cache).cursors.count.tolist() == [6, 2]
        forced(model, cache, tokens[:, 36:], [1])
        cache.reorder_cache(order)
        assert followed() and replay.count == 3
        assert largest_difference(forced(model, cache, tokens[order][:, 37:], [3])[:, -1], steps[:, 10]) < LOGITS
        assert followed() and replay.count == 6
        for layer in cache.layers:
            if hasattr(layer, "recurrent_states"):
                layer.reset()
        assert not state_of(cache).materialize(torch.arange(2)).any() and followed()


# ---- on, off, and what is refused ----------------------------------------------------------------------------------


def test_refused_without_draft_tokens(models):
    model, ids = models("qwen3.5"), inputs_of("qwen3.5", [text[:50] * 2])["input_ids"]
    with enable(model), pytest.raises(ValueError, match="not supported with stateful models"):
        greedy(model, ids, 10, prompt_lookup_num_tokens=2)
    hooks = len(model._forward_pre_hooks)
    with enable(model, draft_tokens=2):
        greedy(model, ids, 10, prompt_lookup_num_tokens=2)
    assert "_is_stateful" not in vars(model) and len(model._forward_pre_hooks) == hooks
    with pytest.raises(ValueError, match="not supported with stateful models"):
        greedy(model, ids, 10, prompt_lookup_num_tokens=2)


def test_mamba2_is_refused_by_transformers(models):
    ids = inputs_of("mamba2", [text[:50] * 2])["input_ids"]
    with enable(models("mamba2"), draft_tokens=2), pytest.raises(ValueError, match="such as Mamba2ForCausalLM"):
        greedy(models("mamba2"), ids, 10, prompt_lookup_num_tokens=2)


def test_more_drafts_than_enabled(models, monkeypatch):
    model, ids = models("qwen3.5"), inputs_of("qwen3.5", [text[:50]])["input_ids"]
    told = Told(greedy(model, ids, 20), [1])
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: told)
    with enable(model, draft_tokens=2), pytest.raises(NotImplementedError, match="cache.crop: .* draft_tokens"):
        greedy(model, ids, 20, prompt_lookup_num_tokens=DRAFTS)


@pytest.mark.parametrize("name", ["kimi-linear", "glm5-next"])
def test_kda_takes_no_single_token_back(models, name):
    """Its modules move the convolution window of a single token in place: there is nothing to restore it from."""
    tokens = rows_of_text(name, 1, 40)
    with enable(models(name), draft_tokens=2):
        cache = new_cache(models(name))
        cache.activate_past_recording()
        forced(models(name), cache, tokens, [30])
        cache.crop(0)
        forced(models(name), cache, tokens[:, 30:], [1])
        with pytest.raises(NotImplementedError, match="cache.crop: expected at most the 0 tokens"):
            cache.crop(-1)


def test_an_enabled_model_does_not_draft(models):
    """Its drafts are single steps, of which the cache is asked to take several back."""
    model, other = models("qwen3.5"), copy.deepcopy(models("qwen3.5"))
    other.generation_config.num_assistant_tokens = DRAFTS
    ids = inputs_of("qwen3.5", [text[:50]])["input_ids"]
    with enable(model, draft_tokens=DRAFTS), enable(other), pytest.raises(NotImplementedError, match="assisted decoding"):
        greedy(model, ids, 20, assistant_model=other)


@pytest.mark.parametrize("draft_tokens", [-1, 16, "4"])
def test_draft_tokens_refused(models, draft_tokens):
    with pytest.raises(ValueError, match="draft_tokens: expected an integer from 0 to window - 1 = 15"):
        enable(models("qwen3.5"), draft_tokens=draft_tokens)
