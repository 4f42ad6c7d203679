"""Differences of native kernels from the recurrence, each with its smallest input: docs/parity.md lists them.

A test that fails says that a project has changed: then its line in docs/parity.md goes.
"""

import inspect
import os

import pytest
import torch

from replayssm import reference
from replayssm.cli.bench import PEERS
from replayssm.recurrence import GDN, MAMBA2
from tests.harness import DEVICE, GPU

K = 32
E0 = torch.eye(1, K)  # one key, already of unit length


def of_exact(state: torch.Tensor, b: torch.Tensor) -> float:
    """What a state after one token from zero has of ``sigmoid(b) v k^T`` beyond it, relative."""
    exact = torch.sigmoid(b.double()).item() / (1 + 1e-6) ** 0.5  # the norm's epsilon
    return abs(float(state.double().flatten()[0]) / exact - 1)


def test_transformers_beta():
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    assert "beta = b.sigmoid()" in inspect.getsource(qwen.Qwen3NextGatedDeltaNet.forward)
    assert "beta = torch.sigmoid(self.b_proj(hidden_states))" in inspect.getsource(kimi.KimiLinearDeltaAttention.forward)
    b = torch.tensor([[0.3]]).bfloat16()
    k = E0[None, None].bfloat16()  # [1, 1, 1, K]
    run = inspect.unwrap(qwen.torch_recurrent_gated_delta_rule)
    _, state = run(k, k, torch.ones(1, 1, 1, K).bfloat16(), torch.zeros(1, 1, 1), b.sigmoid()[None],
                   torch.zeros(1, 1, K, K), True, use_qk_l2norm_in_kernel=True)  # fmt: skip
    assert 5e-4 < of_exact(state, b) < 4e-3
    exact = {"q": k[0], "k": k[0], "v": torch.ones(1, 1, K), "b": b, "a": torch.zeros(1, 1), "A": torch.zeros(1)}
    assert of_exact(reference.decode(GDN, torch.zeros(1, K, K), **exact)[1], b) < 1e-12


def test_transformers_mamba2_dt():
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    one = torch.ones(1, 1, 1).bfloat16()
    dt, bias, state = torch.tensor([[[0.3]]]).bfloat16(), torch.tensor([[-2.5]]).bfloat16(), torch.zeros(1, 1, 1, 1)
    inspect.unwrap(mamba2.mamba2_selective_state_update)(
        state, one, dt, torch.tensor([[[-1.0]]]), one, one, torch.zeros(1, 1), bias, dt_softplus=True
    )
    exact = {"q": one, "k": one, "v": one, "b": dt[0], "A": torch.tensor([-1.0]), "dt_bias": bias[0]}
    _, expected = reference.decode(MAMBA2, torch.zeros(1, 1, 1), **exact)
    assert 1e-3 < abs(float(state) / float(expected) - 1) < 1e-2


@pytest.mark.skipif(not PEERS.is_dir(), reason="needs the peers that `replayssm bench stage` fetches")
@pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need a GPU or TRITON_INTERPRET=1")
def test_sglang_packed_decode_beta():
    """Its decode rounds beta, its verification does not."""
    from replayssm.bench import natives, peers

    peers.use(PEERS)
    if not GPU:
        natives._interpret(peers.sglang.PackedDecode, torch.bfloat16)
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode as decode
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update as verify,
    )

    def tensor(*shape, dtype=torch.bfloat16, fill=0.0):
        return torch.full(shape, fill, dtype=dtype, device=DEVICE)

    k, v, b = E0.bfloat16().to(DEVICE), tensor(1, K, fill=1.0), tensor(1, 1, fill=0.3)
    slot, decoded, verified = tensor(1, dtype=torch.int32), *(tensor(1, 1, K, K, dtype=torch.float32) for _ in range(2))
    gates = {"A_log": tensor(1, dtype=torch.float32, fill=-50.0), "dt_bias": tensor(1, dtype=torch.float32)}
    options = gates | {"a": tensor(1, 1), "b": b, "scale": 1.0, "use_qk_l2norm_in_kernel": True}
    decode(torch.cat([k, k, v], 1), initial_state=decoded, out=tensor(1, 1, 1, K), ssm_state_indices=slot, **options)
    verify(q=k[None, None], k=k[None, None], v=v[None, None], initial_state_source=verified, initial_state_indices=slot,
           cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), softplus_beta=1.0, softplus_threshold=20.0,
           is_kda=False, **options)  # fmt: skip
    assert of_exact(verified, b) < 1e-6
    assert 5e-4 < of_exact(decoded, b) < 4e-3
