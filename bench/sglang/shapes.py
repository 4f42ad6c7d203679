"""Served models' configurations, to be measured with dummy weights: sizes, layers and heads as released, nothing cut.

Qwen3.5-4B without its vision tower. Not read from released files, but assumed: Nemotron-3-Nano-4B's feed-forward width and
query heads; of its layers an attention layer comes first, where SGLang's Triton attention looks for sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FULL = (4, 8, 12, 16, 20, 24, 27)  # Kimi-Linear's attention layers, counted from 1

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-4B": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560,
        "intermediate_size": 9216, "num_hidden_layers": 32, "full_attention_interval": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": True,
    },
    "Nemotron-3-Nano-4B": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 3136,
        "intermediate_size": 12544, "hybrid_override_pattern": "*M-M-M-MM-M-M-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        "num_hidden_layers": 42, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "mamba_num_heads": 96, "mamba_head_dim": 80, "n_groups": 8, "mamba_n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "chunk_size": 256, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "Kimi-Linear-48B-A3B": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1,
        "use_grouped_topk": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "linear_attn_config": {
            "full_attn_layers": list(_FULL), "kda_layers": [i for i in range(1, 28) if i not in _FULL],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def write(name: str, folder: Path) -> Path:
    """Writes the configuration of one of MODELS, without weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name] | COMMON, indent=1))
    return folder
