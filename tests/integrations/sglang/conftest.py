"""Tiny models of every family as folders that SGLang loads."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("sglang") is None:
        reason = "needs SGLang"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        reason = "runs SGLang's kernels in Triton's interpreter: TRITON_INTERPRET=1"
    else:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Per preset its folder."""
    from replayssm.bench.sglang import folders

    return {name: folders.write(name, tmp_path_factory.mktemp(name), **sizes) for name, sizes in SIZES.items()}
