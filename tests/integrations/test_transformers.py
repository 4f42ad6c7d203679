"""Hugging Face models decode with ReplaySSM as without: tokens, logits, states, on every path that touches a cache."""

from __future__ import annotations

import copy
import functools
import os
from itertools import groupby

import pytest
import torch

hf = pytest.importorskip("transformers")

from replayssm import formats
from replayssm.integrations.transformers import disable, enable, presets, state_of
from replayssm.integrations.transformers.enable import _check_version
from replayssm.integrations.transformers.families import MIXERS
from tests.cases import relative

EVERY = list(presets.PRESETS)
ONE_PER_FAMILY = ["qwen3.5", "nemotron-h", "glm5-next"]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
# Logits have a standard deviation of about 4; two fp32 evaluations of these models are seen to differ by up to 3e-4.
LOGITS = 2e-3
text = presets.book()


@functools.cache
def built(name: str, device: str = "cpu"):
    model, tokenizer = presets.build(name)
    return model.to(device), tokenizer


@pytest.fixture
def off():
    """Whatever a test enabled is off again for the next."""
    yield
    for model in (built(name)[0] for name in EVERY if built.cache_info().currsize):
        if any("forward" in vars(module) for module in model.modules() if type(module).__name__ in MIXERS):
            disable(model)


class Recorder(hf.LogitsProcessor):
    def __init__(self):
        self.steps = []

    def __call__(self, input_ids, scores):
        self.steps.append(scores.cpu())
        return scores


def inputs_of(name: str, prompts: list[str], device: str = "cpu"):
    tokens = built(name, device)[1](prompts, return_tensors="pt", padding=True)
    return {key: tokens[key].to(device) for key in ("input_ids", "attention_mask")}


def generate(model, inputs, max_new_tokens, **kwargs):
    """(tokens [B, N], logits [B, N, vocabulary]) of greedy decoding."""
    recorder = Recorder()
    processors = hf.LogitsProcessorList([recorder])
    kwargs = {"do_sample": False, "max_new_tokens": max_new_tokens, "logits_processor": processors} | kwargs
    sequences = model.generate(**inputs, **kwargs)
    return sequences[:, inputs["input_ids"].shape[1] :].cpu(), torch.stack(recorder.steps, 1)


def on_and_off(model, run, **options):
    """What ``run()`` returns with the model's own decoding, and with ReplaySSM."""
    stock = run()
    with enable(model, **{"debug": True} | options):
        return stock, run()


def largest_difference(a, b):
    return torch.where(a == b, 0.0, (a - b).abs()).max().item()


def forced(model, cache, tokens, parts):
    """Feed ``tokens`` [B, T] in parts of these lengths; the logits after each part."""
    name = "cache_params" if isinstance(model, hf.Mamba2ForCausalLM) else "past_key_values"
    logits, at = [], 0
    for length in parts:
        with torch.no_grad():
            out = model(tokens[:, at : at + length], use_cache=True, **{name: cache})
        logits.append(out.logits[:, -1])
        at += length
    return torch.stack(logits, 1)


def rows_of_text(name, batch, length):
    """[batch, length] tokens from different places of the book."""
    ids = built(name)[1](text, return_tensors="pt")["input_ids"][0]
    return torch.stack([ids[row * 100 : row * 100 + length] for row in range(batch)])


def new_cache(model):
    return hf.DynamicCache(config=model.config)


def recurrent_states(model, cache):
    """The model's own state tensors, all recurrent layers, in the core's shape [L, B, H, V, K]."""
    mixers = sorted((m for m in model.modules() if type(m).__name__ in MIXERS), key=lambda m: m.layer_idx)
    transposed = MIXERS[type(mixers[0]).__name__].transposed
    states = torch.stack([cache.layers[mixer.layer_idx].recurrent_states[0] for mixer in mixers])
    return states.transpose(-1, -2) if transposed else states


# ---- generate() ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", EVERY)
def test_greedy_tokens_are_identical(name, batch, device):
    """256 tokens; batch 4 is left padded. The stock output wanders, or identity of tokens would mean nothing."""
    model, _ = built(name, device)
    inputs = inputs_of(name, presets.pieces(text, batch), device)
    assert batch == 1 or len(set(inputs["attention_mask"].sum(1).tolist())) == batch
    (tokens, logits), (ours, our_logits) = on_and_off(model, lambda: generate(model, inputs, 256))

    assert tokens.shape == (batch, 256)
    for row in tokens.tolist():
        assert len(set(row)) >= 64
        assert max(len(list(run)) for _, run in groupby(row)) <= 8
    top = logits.topk(2, -1).values
    margin = (top[..., 0] - top[..., 1]).min().item()
    if device == "cpu":  # where the seeds were chosen
        assert margin >= 1e-3
    assert torch.equal(tokens, ours)
    assert largest_difference(logits, our_logits) < min(LOGITS, margin)


@pytest.mark.parametrize("window", [1, 2, 7, 32])
@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_any_window(name, window):
    model, _ = built(name)
    inputs = inputs_of(name, [text[:90], text[:40]])
    (tokens, logits), (ours, our_logits) = on_and_off(model, lambda: generate(model, inputs, 70), window=window)
    assert torch.equal(tokens, ours)
    assert largest_difference(logits, our_logits) < LOGITS


@pytest.mark.parametrize("name", EVERY)
def test_rows_that_stop_early(name):
    """One row ends at a token of its own; the others go on, and padding is decoded in its place."""
    model, _ = built(name)
    inputs = inputs_of(name, presets.pieces(text[:200], 3))
    tokens, _ = generate(model, inputs, 40)
    end = next(token for token in tokens[1, 5:].tolist() if token not in tokens[0] and token not in tokens[2])
    (tokens, _), (ours, _) = on_and_off(model, lambda: generate(model, inputs, 40, eos_token_id=end, pad_token_id=presets.PAD))
    assert (tokens[1] == presets.PAD).sum() > 0 and (tokens[0] == presets.PAD).sum() == 0
    assert torch.equal(tokens, ours)


@pytest.mark.parametrize("name", EVERY)
def test_beam_search(name):
    """Beams are copied and dropped between steps: reorder_cache."""
    model, _ = built(name)
    inputs = inputs_of(name, presets.pieces(text[:120], 2))
    beams = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}

    def run():
        return model.generate(**inputs, do_sample=False, max_new_tokens=40, **beams)

    stock, ours = on_and_off(model, run)
    assert (stock.beam_indices[:, 1:30] != stock.beam_indices[:, :29]).any()  # beams did change places
    assert torch.equal(stock.sequences, ours.sequences)
    assert torch.allclose(stock.sequences_scores, ours.sequences_scores, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "kimi-linear", "glm5-next"])
def test_second_prompt_on_the_same_cache(name):
    """generate() again with what was said and a new prompt; the cache has all but the last token and the new prompt."""
    model, _ = built(name)
    first = inputs_of(name, [text[:80]])["input_ids"]
    more = inputs_of(name, [text[300:360]])["input_ids"]

    def run():
        cache = new_cache(model)
        said = model.generate(first, past_key_values=cache, do_sample=False, max_new_tokens=21)
        return model.generate(torch.cat([said, more], 1), past_key_values=cache, do_sample=False, max_new_tokens=40)

    tokens, ours = on_and_off(model, run)
    assert torch.equal(tokens, ours)


def test_sampling_takes_the_same_draws():
    model, _ = built("qwen3.5")
    inputs = inputs_of("qwen3.5", [text[:80]])

    def run():
        torch.manual_seed(5)
        return generate(model, inputs, 40, do_sample=True)

    (tokens, _), (ours, _) = on_and_off(model, run)
    assert torch.equal(tokens, ours)


def test_mixture_of_experts_variant():
    """Qwen3.5's MoE has a recurrent class of its own."""
    heads = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    config = hf.Qwen3_5MoeTextConfig(
        hidden_size=32, num_hidden_layers=4, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=99, **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen3_5MoeForCausalLM(config).eval()
    inputs = {"input_ids": torch.arange(20)[None] + 3}
    (_, logits), (_, our_logits) = on_and_off(model, lambda: generate(model, inputs, 20, eos_token_id=None), window=6)
    assert largest_difference(logits, our_logits) < 1e-5


@pytest.mark.parametrize("name", ["qwen3-next", "mamba2", "glm5-next"])
def test_triton_kernels(name):
    """Inputs as strided as transformers hands them over, through the kernels (on CPU: Triton's interpreter)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    model, _ = built(name, device)
    inputs = inputs_of(name, presets.pieces(text[:40], 2), device)
    run = functools.partial(generate, model, inputs, 6)
    (tokens, logits), (ours, our_logits) = on_and_off(model, run, window=2, backend="triton")
    assert torch.equal(tokens, ours)
    assert largest_difference(logits, our_logits) < LOGITS


# ---- caches --------------------------------------------------------------------------------------------------------

PARTS = [
    50,
    *[1] * 21,
    9,
    *[1] * 5,
    30,
    2,
    *[1] * 18,
]  # prompts between decode steps: rings hold 5, 9 and 5 records then


@pytest.mark.parametrize("name", EVERY)
def test_more_prompt_after_decoding(name):
    """The ring is folded before the model's own prefill goes on; logits and final states agree."""
    model, _ = built(name)
    tokens = rows_of_text(name, 3, sum(PARTS))
    caches = []

    def run():
        caches.append(new_cache(model))
        return forced(model, caches[-1], tokens, PARTS)

    logits, ours = on_and_off(model, run)
    assert largest_difference(logits, ours) < LOGITS
    state = state_of(caches[1])
    assert state.cursors.count.tolist() == [18 - 16] * 3
    assert relative(state.materialize(torch.arange(3)), recurrent_states(model, caches[0])) < 1e-5


@pytest.mark.parametrize("name", EVERY)
def test_reset_and_reuse(name):
    """As without ReplaySSM, whatever the version's attention caches keep over a reset."""
    model, _ = built(name)
    tokens = rows_of_text(name, 2, 60)

    def run():
        cache = new_cache(model)
        forced(model, cache, tokens + 1, [30, *[1] * 20])
        cache.reset()
        return forced(model, cache, tokens, [30, *[1] * 20])

    logits, ours = on_and_off(model, run)
    assert largest_difference(logits, ours) < LOGITS


def test_reset_zeroes_the_state():
    model, _ = built("mamba2")
    with enable(model):
        cache = new_cache(model)
        forced(model, cache, rows_of_text("mamba2", 2, 40), [30, *[1] * 10])
        cache.reset()
        assert not state_of(cache).materialize(torch.arange(2)).any()


@pytest.mark.parametrize("name", EVERY)
def test_copied_cache(name):
    """A deep copy taken in mid window is a cache of its own."""
    model, _ = built(name)
    tokens = rows_of_text(name, 2, 60)
    with enable(model, debug=True):
        cache = new_cache(model)
        forced(model, cache, tokens, [30, *[1] * 7])
        twin = copy.deepcopy(cache)
        forced(model, twin, tokens + 2, [1] * 12)
        assert torch.equal(forced(model, cache, tokens[:, 37:], [1] * 20), uninterrupted(model, tokens)[:, -20:])


def uninterrupted(model, tokens):
    return forced(model, new_cache(model), tokens, [30, *[1] * 27])


@pytest.mark.parametrize("name", EVERY)
def test_cache_filled_before(name):
    """enable() in the middle of a text: the states that the model has are taken over."""
    model, _ = built(name)
    tokens = rows_of_text(name, 2, 60)
    cache = new_cache(model)
    forced(model, cache, tokens, [30, *[1] * 7])
    with enable(model, debug=True):
        ours = forced(model, cache, tokens[:, 37:], [1] * 20)
    assert largest_difference(ours, uninterrupted(model, tokens)[:, -20:]) < LOGITS


def test_reorder_repeats_and_drops_rows():
    model, _ = built("kimi-linear")
    tokens = rows_of_text("kimi-linear", 4, 70)
    order = torch.tensor([2, 2, 0, 3])

    def run():
        cache = new_cache(model)
        forced(model, cache, tokens, [30, *[1] * 9])
        cache.reorder_cache(order)
        return forced(model, cache, tokens[order, 39:], [1] * 30)

    logits, ours = on_and_off(model, run)
    assert largest_difference(logits, ours) < LOGITS


# ---- formats -------------------------------------------------------------------------------------------------------


def decoded(model, tokens, steps=40, **options):
    """(logits, states after the last token, what was enabled) of 30 tokens of prompt and some that are decoded."""
    with enable(model, debug=True, **options) as enabled:
        cache = new_cache(model)
        logits = forced(model, cache, tokens, [30, *[1] * steps])
        return logits, state_of(cache).materialize(torch.arange(len(tokens))), enabled


def cast_error(name, states):
    """Relative error of storing these states once."""
    one = formats.named(name)
    draws = torch.rand(states.shape, generator=torch.Generator().manual_seed(1)) if one.stochastic else None
    return relative(one.decode(one.encode(states, draws)), states)


@pytest.mark.parametrize(
    ("name", "state", "read"),
    [
        ("qwen3.5", "fp32", "int8"), ("kimi-linear", "fp32", "nvfp4"), ("nemotron-h", "fp32", "e4m3"), ("mamba2", "bf16", None),
        ("nemotron-h", "fp16", None), ("qwen3.5", "fp16+sr", "int8"), ("glm5-next", "e4m3+sr", "nvfp4"),
    ],
)  # fmt: skip
def test_formats(name, state, read):
    """Errors are the casts': a read copy's stays in the step that reads it, a checkpoint's grows with the folds."""
    model, _ = built(name)
    tokens = rows_of_text(name, 2, 70)
    exact, states, full = decoded(model, tokens)
    ours, stored, enabled = decoded(model, tokens, state=state, read=read)
    assert f"state {state}, read {read or 'none'}, " in str(enabled)
    of, before = enabled.layout, full.layout
    held = of.H * (formats.named(state).bytes(of.V, of.K) + (formats.named(read, "read").bytes(of.V, of.K) if read else 0))
    assert enabled.bytes_per_request == full.bytes_per_request + enabled.layers * (held - before.state_bytes)
    kept = 1.5 * 3**0.5 * cast_error(state, states)  # the prompt's state, then two folds
    # The first layer reads what it reads without formats, the others read its errors.
    assert relative(stored[0], states[0]) <= kept
    assert torch.equal(stored[0], states[0]) == (state == "fp32")
    error = ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).median()  # experts may be others at some positions
    assert 0 < error < kept + 1.5 * cast_error(read or state, states)


def test_stochastic_rounding_is_each_rows_own():
    """Rows of one text round differently what the prompt left, and a second run the same."""
    model, _ = built("mamba2")
    tokens = rows_of_text("mamba2", 1, 31).expand(2, -1)
    (_, states, _), (_, again, _) = (decoded(model, tokens, 1, state="fp16+sr") for _ in range(2))
    assert torch.equal(states, again) and relative(states[:, 0], states[:, 1]) > 1e-4


@pytest.mark.parametrize("u", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear"])
def test_readout_helper_formats(name, u):
    model, _ = built(name)
    tokens = rows_of_text(name, 2, 100)
    exact = uninterrupted(model, tokens)
    with enable(model, u=u):
        ours = uninterrupted(model, tokens)
    least, most = (0, LOGITS) if u == torch.float32 else (LOGITS, 0.5)
    assert least < largest_difference(exact, ours) < most


@pytest.mark.parametrize("name", EVERY)
def test_bf16_model(name):
    """Activations in bf16: at the median position as near to the fp32 model as the stock bf16 model is, give or take half.

    The median, since a rounding may send a token to another expert, whose logits are then another model's.
    """
    model, _ = presets.build(name)
    tokens = rows_of_text(name, 2, 100)
    exact = uninterrupted(model, tokens)
    model = model.to(torch.bfloat16)
    stock = uninterrupted(model, tokens).float()
    with enable(model, debug=True) as enabled:
        ours = uninterrupted(model, tokens).float()
    assert enabled.layout.act == torch.bfloat16
    error, stock_error = ((x - exact).norm(dim=-1).median() for x in (ours, stock))
    assert error < 1.5 * stock_error


def test_metrics():
    """Two texts one after the other, counted by hand: 9 steps of 2 rows and 4 of 3, window 5; rows 1 and 2 have short ones."""
    model, _ = built("mamba2")
    with enable(model, window=5, metrics=True) as enabled:
        for rows, steps in ((2, 9), (3, 4)):
            forced(model, new_cache(model), rows_of_text("mamba2", rows, 40), [30, *[1] * steps])
    lines = enabled.metrics().splitlines()
    assert 'replayssm_tokens_total{state="Mamba2ForCausalLM"} 30' in lines
    assert 'replayssm_accepted_total{state="Mamba2ForCausalLM"} 30' in lines
    # Row 0 folds before its sixth token, row 1 (its first window is 3 shorter) before its third and eighth, and again row 1 of
    # the second text; its row 2 (1 shorter) does not come so far.
    assert 'replayssm_flushes_total{state="Mamba2ForCausalLM"} 4' in lines
    assert 'replayssm_forced_total{state="Mamba2ForCausalLM"} 0' in lines
    with enable(model) as enabled, pytest.raises(ValueError, match="metrics: expected a model enabled with metrics=True"):
        enabled.metrics()


# ---- on, off, and what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_disable_restores_the_model(name):
    model, _ = built(name)
    mixers = [module for module in model.modules() if type(module).__name__ in MIXERS]
    tokens = rows_of_text(name, 2, 60)
    functions = {id(type(m)): dict(type(m).forward.__wrapped__.__globals__) for m in mixers}
    before = uninterrupted(model, tokens)
    enabled = enable(model, window=8)
    assert (enabled.layers, enabled.layout.W) == (len(mixers), 8)
    assert enabled.bytes_per_request == enabled.layers * enabled.layout.slot_bytes
    assert enabled.family in str(enabled) and str(enabled.layers) in str(enabled)
    assert functions == {id(type(m)): dict(type(m).forward.__wrapped__.__globals__) for m in mixers}
    disable(model)
    assert not any("forward" in vars(module) for module in mixers)
    assert torch.equal(before, uninterrupted(model, tokens))


def test_a_second_model_of_the_class_is_not_changed():
    enabled, _ = presets.build("mamba2")
    other, _ = presets.build("mamba2")
    with enable(enabled):
        cache = new_cache(other)
        forced(other, cache, rows_of_text("mamba2", 1, 20), [10, *[1] * 10])
    assert all(isinstance(layer.recurrent_states[0], torch.Tensor) for layer in cache.layers)


@pytest.mark.parametrize("name", EVERY)
def test_a_disabled_model_refuses_our_cache(name):
    model, _ = built(name)
    tokens = rows_of_text(name, 1, 60)
    cache = new_cache(model)
    with enable(model):
        forced(model, cache, tokens, [30, *[1] * 7])
    with pytest.raises((NotImplementedError, AttributeError), match="ReplaySSM"):
        forced(model, cache, tokens[:, 37:], [1])


def test_hooks_of_the_convolution_still_run():
    """force_accelerate_hooks wraps the module's forward; our copy of the forward keeps it."""

    class Hook:
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Hook.calls += 1
            return args, kwargs

        def post_forward(self, module, output):
            return output

    model, _ = presets.build("qwen3.5")
    for module in model.modules():
        if type(module).__name__ in MIXERS:
            module.conv1d._hf_hook = Hook()
    with enable(model):
        forced(model, new_cache(model), rows_of_text("qwen3.5", 1, 20), [10, *[1] * 10])
    assert Hook.calls == 3 * 11


def refusals():
    llama = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    jamba = {
        **llama,
        "num_hidden_layers": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "num_experts": 2,
        "use_mamba_kernels": False,
    }
    yield (
        "no recurrent layer",
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama)),
        {},
        "LlamaForCausalLM has no recurrent layer",
    )
    yield "unknown class", lambda: hf.JambaForCausalLM(hf.JambaConfig(**jamba)), {}, "JambaForCausalLM .* supported are"
    yield "window 0", None, {"window": 0}, "window: expected an integer >= 1, got 0"
    yield "window text", None, {"window": "16"}, "window: expected an integer >= 1, got '16'"
    yield "state format", None, {"state": "fp7"}, "state format: expected one of .* got 'fp7'"
    yield "read format", None, {"read": "fp16"}, "read format: expected one of .* got 'fp16'"
    yield "u without delta rule", None, {"u": torch.float16}, "u: expected with the delta rule alone, got torch.float16"
    yield "backend", None, {"backend": "cuda"}, "backend: expected one of"
    yield "u", None, {"u": torch.float64}, "u: supported are"


@pytest.mark.parametrize(("make", "options", "message"), [r[1:] for r in refusals()], ids=[r[0] for r in refusals()])
def test_enable_refuses(make, options, message):
    model = make() if make else presets.build("mamba2")[0]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        enable(model, **options)
    assert not any("forward" in vars(module) for module in model.modules())


def test_enable_refuses_layers_that_others_changed():
    model, _ = presets.build("mamba2")
    with pytest.raises(ValueError, match="expected one that enable"):
        disable(model)
    enable(model)
    with pytest.raises(ValueError, match="enabled already"):
        enable(model)
    disable(model)
    mixer = model.backbone.layers[1].mixer
    mixer.forward = mixer.forward  # as accelerate's hooks and hub kernels do
    with pytest.raises(NotImplementedError, match="forwards of their own"):
        enable(model)
    del mixer.forward
    mixer.to("meta")
    with pytest.raises(NotImplementedError, match="on one device, got .* 'meta'"):
        enable(model)


@pytest.mark.parametrize(
    ("version", "supported"),
    [("5.16.9", False), ("5.17.0", True), ("5.19.0", True), ("5.20.0.dev0", False), ("4.57.1", False)],
)
def test_versions(version, supported):
    if supported:
        _check_version(version)
    else:
        with pytest.raises(NotImplementedError, match=f"transformers: supported are >= 5.17 and < 5.20, got {version}"):
            _check_version(version)


def test_caches_and_modes_that_are_refused(off):
    model, _ = built("qwen3.5")
    tokens = rows_of_text("qwen3.5", 1, 20)
    enable(model)
    offloading = new_cache(model)
    offloading.offloading = True  # its constructor needs an accelerator
    with pytest.raises(NotImplementedError, match="got an offloading DynamicCache"):
        forced(model, offloading, tokens, [20])
    static = hf.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(NotImplementedError, match="supported is DynamicCache without offloading, got StaticCache"):
        forced(model, static, tokens, [20])
    with pytest.raises(ValueError, match="expected DynamicCache.config=model.config."):
        forced(model, hf.DynamicCache(), tokens, [20])
    cache = new_cache(model)
    forced(model, cache, tokens, [10, *[1] * 10])
    cache.activate_past_recording()
    with pytest.raises(NotImplementedError, match="assisted decoding"):
        forced(model, cache, tokens, [1])
    with pytest.raises(NotImplementedError, match="without gradients"):
        model(tokens, past_key_values=new_cache(model))
    with pytest.raises(ValueError, match="expected one that a model filled while"):
        state_of(new_cache(model))
    with pytest.raises(NotImplementedError, match="not offloaded"):
        cache.layers[0].offload()


def test_a_model_in_training_mode_without_cache_is_left_alone(off):
    model, _ = built("kimi-linear")
    tokens = rows_of_text("kimi-linear", 1, 20)
    with enable(model):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    assert model.lm_head.weight.grad.any()
    model.zero_grad()
