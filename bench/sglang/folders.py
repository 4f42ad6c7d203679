"""Small models with random weights as folders that SGLang loads: configurations and names as in published checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from replayssm.integrations.transformers import presets

Config = dict[str, Any]
# transformers' names of layer kinds -> the letters of Nemotron-H's published pattern.
_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
# With heads as wide as served models have them; of Nemotron-H an attention layer comes first (see shapes).
SIZES: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "nemotron-h": {
        "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "linear_attention"] * 2,
        "mamba_num_heads": 8, "n_groups": 2, "mamba_head_dim": 80, "ssm_state_size": 128, "chunk_size": 128,
    },
    "kimi-linear": {
        "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "linear_num_heads": 4, "linear_head_dim": 128,
    },
}  # fmt: skip


def write(preset: str, folder: Path, dtype: str = "float32", **sizes: Any) -> Path:
    """Writes a preset's model, fp32, with ``sizes`` in place of those entries of its configuration; returns the folder.

    ``dtype`` is what activations will be: Kimi-Linear's class asks the configuration.

    No token ends a text: a request has as many as it asks for, and SGLang, which cannot know, admits more than fit.

    Raises: ValueError for a preset that is of none of SGLang's architectures.
    """
    model, tokenizer = presets.build(preset, **sizes)
    published = _PUBLISHED.get(model.config.model_type)
    if published is None:
        raise ValueError(f"preset: expected a model of {', '.join(_PUBLISHED)}, got {preset!r} of {model.config.model_type}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    more = {"eos_token_id": None, "torch_dtype": dtype, "dtype": dtype}
    config.write_text(json.dumps(published(json.loads(config.read_text())) | more, indent=1))
    (folder / "generation_config.json").unlink(missing_ok=True)  # SGLang would take its end token
    weights = folder / "model.safetensors"
    save_file({_dense(name): tensor for name, tensor in load_file(weights).items()}, weights)
    return folder


def _dense(name: str) -> str:
    """Kimi-Linear's checkpoints have experts under ``block_sparse_moe``, dense layers under ``mlp``; transformers saves one."""
    before, found, after = name.partition("block_sparse_moe.")
    return f"{before}mlp.{after}" if found and after.startswith(("down_proj.", "gate_proj.", "up_proj.")) else name


def _qwen3_next(config: Config) -> Config:
    return config | {"full_attention_interval": config["layer_types"].index("full_attention") + 1}


def _nemotron_h(config: Config) -> Config:
    pattern = "".join(_LETTERS[kind] for kind in config.pop("layers_block_type"))
    del config["mtp_layers_block_type"]
    limit = [0.0, 1e9]  # JSON has no infinity
    return config | {"hybrid_override_pattern": pattern, "mamba_n_groups": config["n_groups"], "time_step_limit": limit}


def _kimi_linear(config: Config) -> Config:
    kinds, experts = config.pop("layer_types"), config.pop("mlp_layer_types")
    places = {kind: [i + 1 for i, each in enumerate(kinds) if each == kind] for kind in set(kinds)}
    return config | {
        "linear_attn_config": {
            "kda_layers": places["linear_attention"],
            "full_attn_layers": places["full_attention"],
            "num_heads": config["linear_num_heads"],
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        },
        "first_k_dense_replace": experts.index("sparse") if "sparse" in experts else len(experts),
        "mla_use_nope": True,
        "max_position_embeddings": 4096,
    }


_PUBLISHED: dict[str, Callable[[Config], Config]] = {
    "qwen3_5_text": _qwen3_next,
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "kimi_linear": _kimi_linear,
}
