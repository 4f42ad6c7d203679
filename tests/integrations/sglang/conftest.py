"""Tiny models of every family as folders that SGLang loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")
if torch.cuda.is_available():
    pytest.skip("SGLang's CPU runs need a machine without a CUDA device", allow_module_level=True)

from replayssm.bench.sglang import folders

SIZES = {
    "qwen3-next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "nemotron-h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 2, "n_groups": 1, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 16,
    },
    "kimi-linear": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3, "linear_num_heads": 2, "linear_head_dim": 16,
        "routed_scaling_factor": 1.0,  # SGLang leaves it out on a CPU
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Per preset its folder."""
    return {name: folders.write(name, tmp_path_factory.mktemp(name), **sizes) for name, sizes in SIZES.items()}
