"""The served models' table, and the same facts from config.json files as transformers and the models' owners write them."""

from __future__ import annotations

import json

import pytest

from replayssm import GDN, KDA, KDA_SAFE, MAMBA2, models
from replayssm.models import Attention, find, from_config


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [("Nemotron-3-Nano-4B", 3.75), ("Nemotron-3-Super-120B-A12B", 4), ("Nemotron-3-Ultra-550B-A55B", 8), ("Qwen3.5-4B", 2),
     ("Qwen3.5-27B", 3), ("Qwen3.5-397B-A17B", 4), ("Kimi-Linear-48B-A3B", 2), ("Kimi-K3", 6), ("GLM-5.3-Flash", 4)],
)  # fmt: skip
def test_state_of_one_layer(name, mebibytes):
    assert find(name.upper()).layout().state_bytes == mebibytes * 2**20


def test_nano_holds_16_kib_a_token():
    assert find("Nemotron-3-Nano-4B").attention.cached(1) * 2 == 16 * 1024


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_can_be_sharded(name):
    model = find(name)
    for ranks in (2, 4, 8, 16):
        part = model.shard(ranks)
        assert part.layout().state_bytes * ranks == model.layout().state_bytes
        assert part.layers == model.layers and part.attention.heads >= 1
    assert model.shard(1) == model
    with pytest.raises(ValueError, match=f"tensor-parallel: expected a divisor of the {model.H} value heads"):
        model.shard(5)


def test_presets_of_transformers():
    """Every family that transformers has, against the modules that it builds from the same config."""
    presets = pytest.importorskip("replayssm.integrations.transformers.presets")
    from replayssm.integrations.transformers.families import MIXERS

    for name in presets.PRESETS:
        module, _ = presets.build(name)
        model = from_config(json.loads(module.config.to_json_string()))
        mixers = [one for one in module.modules() if type(one).__name__ in MIXERS]
        sizes = MIXERS[type(mixers[0]).__name__].sizes
        assert (model.H, model.G, model.V, model.K) == tuple(getattr(mixers[0], size) for size in sizes), name
        assert model.layers == len(mixers), name
        row = MIXERS[type(mixers[0]).__name__].recurrence.name
        assert model.recurrence.name.removesuffix("_safe") == row, name
        conv = getattr(mixers[0], "conv1d", None)
        if conv is not None:
            assert model.conv.channels == conv.weight.shape[0] and model.conv.width == conv.weight.shape[-1], name


def test_defaults_are_those_of_the_classes():
    """A config that says nothing means what its class in transformers means by it."""
    hf = pytest.importorskip("transformers")
    for kind, config in (
        ("qwen3_5_text", hf.Qwen3_5TextConfig()),
        ("qwen3_5_moe_text", hf.Qwen3_5MoeTextConfig()),
        ("qwen3_next", hf.Qwen3NextConfig()),
        ("mamba2", hf.Mamba2Config()),
        ("glm5_next", hf.Glm5NextConfig().text_config),
        ("nemotron_h", hf.NemotronHConfig()),
        ("kimi_linear", hf.KimiLinearConfig()),
    ):
        bare = {"model_type": kind}
        if kind in ("nemotron_h", "kimi_linear"):  # their layers have no rule that models follow
            bare["layer_types"] = config.layer_types
        assert from_config(bare) == from_config(json.loads(config.to_json_string(use_diff=False))), kind
    assert from_config({"model_type": "glm5_next"}) == find("GLM-5.3-Flash").__class__(
        KDA_SAFE, 64, 64, 128, 128, 34, find("GLM-5.3-Flash").attention
    )


def test_configs_of_the_models_owners():
    """Fields of published files, under their own names."""
    kimi = {
        "model_type": "kimi_linear", "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "kda_layers": [i for i in range(1, 27) if i % 4],
        },
    }  # fmt: skip
    model = from_config(kimi)
    known = find("Kimi-Linear-48B-A3B")
    assert (model.recurrence, model.H, model.V, model.layers, model.attention) == (KDA, 32, 128, 20, known.attention)
    kimi["linear_attn_config"]["gate_lower_bound"] = -5.0
    assert from_config({"model_type": "kimi_k3", "text_config": kimi}).recurrence == KDA_SAFE
    pattern = "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
    nemotron = {"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_key_value_heads": 2, "head_dim": 128,
                "mamba_num_heads": 128, "n_groups": 8, "mamba_head_dim": 64, "ssm_state_size": 128}  # fmt: skip
    model, known = from_config(nemotron), find("Nemotron-3-Super-120B-A12B")
    assert (model.recurrence, model.layers, model.attention) == (MAMBA2, 40, known.attention)
    qwen = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 64,
            "linear_num_value_heads": 48, "full_attention_interval": 4, "num_key_value_heads": 4, "head_dim": 256}}  # fmt: skip
    model, known = from_config(qwen), find("Qwen3.5-27B")
    assert (model.recurrence, model.H, model.layers, model.attention) == (GDN, 48, 48, known.attention)


def test_a_folder_and_its_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "num_hidden_layers": 3}')
    assert find(str(tmp_path)) == find(str(tmp_path / "config.json"))
    assert find(str(tmp_path)).layers == 3 and find(str(tmp_path)).weights is None
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 123}, "weight_map": {}}')
    assert find(str(tmp_path)).weights == 123


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model: expected JSON in"),
        ('{"model_type": "llama"}', "model_type: expected one of qwen3_5, .*, got 'llama'"),
        ('{"model_type": "kimi_k3"}', "config.json of kimi_k3: expected 'linear_num_heads', found none"),
        ('{"model_type": "nemotron_h"}', "config.json of nemotron_h: expected 'num_hidden_layers', found none"),
    ],
    ids=["json", "type", "size", "layers"],
)
def test_configs_that_say_too_little(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find(str(tmp_path))


def test_no_such_model():
    with pytest.raises(ValueError, match="model: expected one of Qwen3.5-4B, .*got 'gpt-2'"):
        find("gpt-2")


@pytest.mark.parametrize("attention", [Attention(7, 2, 64), Attention(11, 1, 512, most=2048, index=8)], ids=["all", "sparse"])
def test_context_is_the_inverse_of_read(attention):
    for context in (1, 100, 2048, 5000, 100_000):
        assert attention.context(attention.read(context)) == pytest.approx(context)
    assert attention.cached(10) == 10 * attention.read(1)


def test_no_context_is_long_enough():
    assert Attention().context(1.0) is None
    assert Attention(2, 1, 10, most=100).context(2001) is None
