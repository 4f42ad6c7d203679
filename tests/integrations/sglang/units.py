"""SGLang's own pool and attention backends around layers with random weights, without a model: what a model would call.

Imported in processes that ``alone`` makes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_context, publish
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor, nn

from replayssm.integrations.sglang import hooks

H, G, V, K, WIDTH, W = 4, 2, 16, 32, 4, 5
LAYERS = {0: 1, 2: 0}  # model layer -> seed; the pool numbers them 0, 1


def arguments(folder: Path, *options: str) -> Any:
    """Published server arguments of a model that is never made."""
    from tests.integrations.sglang.test_arguments import QWEN

    (folder / "config.json").write_text(json.dumps(QWEN))
    common = ["--model-path", str(folder), "--device", "cpu", "--skip-tokenizer-init", "--disable-radix-cache"]
    load_plugins()
    args = prepare_server_args([*common, "--max-running-requests", "4", *options])
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return args


def attention(layer: int, kda: bool, bound: float | None, generator: torch.Generator) -> RadixLinearAttention:
    """A GDN or KDA layer's weights as a model hands them over."""
    groups = H if kda else G
    heads = (H * K if kda else H,)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return RadixLinearAttention(
        layer_id=layer, num_q_heads=groups, num_k_heads=groups, num_v_heads=H, head_q_dim=K, head_k_dim=K, head_v_dim=V,
        conv_weights=rand(2 * groups * K + H * V, WIDTH), activation="silu",
        A_log=nn.Parameter(rand(1, 1, H, 1) if kda else rand(H)), dt_bias=nn.Parameter(rand(*heads)), lower_bound=bound,
    )  # fmt: skip


class Unit:
    """Pool and backend of one family; rows of a batch are requests 1, 2, ... with slots of their own.

    Attributes:
        layers: RadixLinearAttention in the pool's order.
        pool, backend, hybrid: SGLang's.
    """

    def __init__(self, family: str, drafts: int = 0, topk: int = 1, options: tuple[str, ...] = ()) -> None:
        kda, generator = family != "gdn", torch.Generator().manual_seed(7)
        settings = ("--linear-attn-decode-backend", "replayssm", "--replayssm-window", str(W))
        with tempfile.TemporaryDirectory() as folder:
            self.args = arguments(Path(folder), *settings, *options)
        if drafts:
            get_context().override(
                "test", speculative_num_draft_tokens=drafts, speculative_eagle_topk=topk, speculative_algorithm="NGRAM"
            )
        bound = -5.0 if family == "kda_safe" else None
        self.layers = [attention(layer, kda, bound, generator) for layer in LAYERS]
        model = nn.ModuleList(self.layers)
        shape: Any = (
            KimiLinearStateShape.create(tp_world_size=1, num_heads=H, head_dim=V, num_k_heads=H, head_k_dim=K)
            if kda
            else Mamba2StateShape.create(
                tp_world_size=1, intermediate_size=H * V, n_groups=G, num_heads=H, head_dim=V, state_size=K, conv_kernel=WIDTH
            )
        )
        if kda:  # SGLang's own are square
            object.__setattr__(shape, "temporal", (H, V, K))
        parameters = (KimiLinearCacheParams if kda else Mamba2CacheParams)(
            shape=shape, layers=list(LAYERS), dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        )
        self.configurator = KVCacheConfigurator.__new__(KVCacheConfigurator)
        self.parameters = parameters
        of = {
            "server_args": self.args, "is_draft_worker": False, "model": model, "model_dtype": torch.float32, "pp_size": 1,
            "mambaish_config": SimpleNamespace(mamba2_cache_params=parameters), "attn_dp_size": 1, "hybrid_gdn_config": None,
            "hybrid_kda_config": None, "extra_mamba_cache_bytes_per_req": 0, "is_hybrid_swa": False,
            "spec_algorithm": SpeculativeAlgorithm.NGRAM if drafts else SpeculativeAlgorithm.NONE,
        }  # fmt: skip
        for name, value in of.items():
            setattr(self.configurator, name, value)
        KVCacheConfigurator.fused_entry_bytes = lambda *_: None  # no draft model
        self.left = self.configurator._handle_max_mamba_cache(1.0)
        self.pool = HybridReqToTokenPool(
            size=4, mamba_size=8, mamba_spec_state_size=4, max_context_len=64, device="cpu", enable_memory_saver=False,
            cache_params=parameters, mamba_layer_ids=list(LAYERS), enable_mamba_extra_buffer=False,
            speculative_num_draft_tokens=drafts or None, speculative_eagle_topk=topk,
        )  # fmt: skip
        slots = self.pool.mamba_allocator.alloc(8)
        self.pool.req_index_to_mamba_index_mapping[1:5] = slots[torch.tensor([4, 1, 7, 0])]
        runner = SimpleNamespace(
            server_args=self.args, device="cpu", is_draft_worker=False, req_to_token_pool=self.pool, token_to_kv_pool=None,
            linear_attn_backends=resolve_linear_attn_backends(), model_config=None,
        )  # fmt: skip
        self.backend = kda_backend.KDAAttnBackend(runner) if kda else gdn_backend.GDNAttnBackend(runner)
        self.hybrid = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
        self.hybrid.linear_attn_backend = self.backend
        self.kda, self.channels, self.generator = kda, self.layers[0].conv_weights.shape[0], generator
        self.state, self.interval = self.pool.mamba_pool.replay.state, self.args.mamba_track_interval

    def slots(self, rows: list[int]) -> Tensor:
        """SGLang's slots of those requests."""
        return self.pool.req_index_to_mamba_index_mapping[torch.tensor(rows)]

    def reassign(self, old: int, new: int) -> Tensor:
        """A request ends, and SGLang gives its slot to another one; the slot."""
        slots = self.slots([old]).long()
        self.pool.mamba_allocator.free(slots)
        assigned = self.pool.mamba_allocator.alloc(1)
        assert assigned.tolist() == slots.tolist()
        self.pool.req_index_to_mamba_index_mapping[old] = 0
        self.pool.req_index_to_mamba_index_mapping[new] = slots[0]
        return slots

    def begin(self) -> None:
        """States and convolution windows as after some prefill."""
        cache = self.pool.mamba_pool.mamba_cache
        cache.temporal.copy_(torch.randn(cache.temporal.shape, generator=self.generator))
        cache.conv[0].copy_(torch.randn(cache.conv[0].shape, generator=self.generator))

    def tokens(self, N: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per layer mixed_qkv [N, C], a and b as its projections would give them."""

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self.generator)

        per_head = (H * K,) if self.kda else (H,)
        return [(rand(N, self.channels), rand(N, *per_head), rand(N, H)) for _ in self.layers]

    def batch(self, mode: ForwardMode, rows: list[int], tokens: int, **more: Any) -> ForwardBatch:
        """Those requests, 0 being padding."""
        B = len(rows)
        batch = ForwardBatch(
            forward_mode=mode, batch_size=B, input_ids=torch.zeros(tokens, dtype=torch.int64), seq_lens=torch.full((B,), 9),
            req_pool_indices=torch.tensor(rows), out_cache_loc=torch.zeros(tokens), seq_lens_sum=9 * B,
        )  # fmt: skip
        for name, value in more.items():
            setattr(batch, name, value)
        return batch

    def decode(
        self, rows: list[int], inputs: list[tuple[Tensor, Tensor, Tensor]], graph: bool = False, **more: Any
    ) -> list[Tensor]:
        """Per layer [B, H, V]; graph: with the metadata that a CUDA graph reads, its padding rows last."""
        batch = self.batch(ForwardMode.DECODE, rows, len(rows), **more)
        if graph:
            batch.num_padding = rows.count(0)
            batch.seq_lens_cpu = batch.seq_lens
            self.backend.init_forward_metadata_out_graph(batch, in_capture=not any(rows))
        else:
            self.backend.init_forward_metadata(batch)
        return [
            self.backend.forward_decode(layer, batch, *(x.clone() for x in one))[0]
            for layer, one in zip(self.layers, inputs, strict=True)
        ]

    def verify(
        self, rows: list[int], t: int, inputs: list[tuple[Tensor, Tensor, Tensor]], tree: tuple[Tensor, Tensor] | None = None
    ) -> list[Tensor]:
        """Per layer [B t, H, V]; tree: each draft's first child and next sibling [B, t], -1 for none."""
        spec = NgramVerifyInput(draft_token_num=t, custom_mask=torch.ones(1, dtype=torch.bool))
        if tree is not None:
            spec.retrieve_next_token, spec.retrieve_next_sibling = tree
        batch = self.batch(ForwardMode.TARGET_VERIFY, rows, len(rows) * t, spec_info=spec)
        self.backend.init_forward_metadata(batch)
        return [
            self.backend.forward_extend(layer, batch, *(x.clone() for x in one))[0]
            for layer, one in zip(self.layers, inputs, strict=True)
        ]

    def accept(self, rows: list[int], t: int, paths: list[list[int]], lengths: dict[int, int]) -> list[int]:
        """The requests keep those drafts; the slots that snapshots at multiples of the tracking interval go to."""
        B = len(rows)
        index = torch.full((B, t), -1)
        for n, path in enumerate(paths):
            index[n, : len(path)] = torch.tensor(path) + n * t
        track = [3, 4, 6][:B]
        before = torch.tensor([lengths[row] for row in rows])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, req_pool_indices=torch.tensor(rows), seq_lens=before,
            mamba_track_indices=torch.tensor(track), tree_cache=SimpleNamespace(page_size=1),
        )  # fmt: skip
        runner = SimpleNamespace(model_config=None, req_to_token_pool=self.pool, attn_backend=self.hybrid, model=None)
        # Its kernel is for GPUs alone; this is its torch code.
        hooks.fused_conv_window_scatter_with_mask = HybridLinearAttnBackend._scatter_speculative_state_with_mask
        spec_utils.mambaish_config = lambda config: config or self.parameters
        spec_utils.commit_mamba_states_after_verify(
            SimpleNamespace(model_runner=runner), batch, torch.tensor([len(path) for path in paths]), index, t
        )
        return track
