"""What the fake mixers of TensorRT-LLM do where the shim leaves the work to the engine: prefill, convolution, and the calls.

Names that start with ``fake_`` are the tests' own; the rest carries the contract's names and parameters.
"""

# ruff: noqa: F821  # functions of the fake modules, which the shim finds by name

from __future__ import annotations

import torch
from torch import Tensor, nn

from replayssm import reference
from replayssm.recurrence import Recurrence


class Mixer:
    """One recurrent module without projections: ``hidden`` holds what a token's projections would be.

    Convolution and prefill are the oracle's, in fp64; the pool holds what they leave.
    """

    bases = (nn.Module,)

    def fake_init(self, layer_idx: int, row: Recurrence, sizes: tuple[int, int, int, int], w: dict, conv: Tensor):
        nn.Module.__init__(self)
        self.layer_idx, self.fake_row, self.fake_sizes, self.fake_w, self.fake_conv = layer_idx, row, sizes, w, conv
        self.fake_done = []

    def fake_windows(self, x, pool, slots, scratch, T):
        """The convolution of T tokens of each row, x [N, C]; windows after each go to the scratch, or the last to the pool."""
        out = torch.empty_like(x)
        back = pool.shape[2]
        for i, slot in enumerate(slots.tolist()):
            at = slice(i * T, (i + 1) * T)
            history = pool[slot].T.nan_to_num() if slot < 0 else pool[slot].T
            out[at] = reference.causal_conv(x[at], self.fake_conv, None, history).to(x.dtype)
            full = torch.cat([history, x[at]])
            for t in range(T) if scratch is not None else ():
                scratch[i, t] = full[t + 1 : t + 1 + back].T
            if scratch is None:
                pool[slot] = full[-back:].T
        return out

    def fake_prefill(self, hidden, lengths, slots, begun, conv_pool, ssm_pool):
        """Prompts of these lengths; a slot not begun starts from zeros."""
        outputs, first = [], 0
        for slot, length, goes_on in zip(slots.tolist(), lengths, begun, strict=True):
            x = hidden[first : first + length]
            first += length
            if not goes_on:
                conv_pool[slot], ssm_pool[slot] = 0, 0
            convolved = self.fake_windows(self.fake_split(x)[0], conv_pool, torch.tensor([slot]), None, length)
            o, state = reference.decode(self.fake_row, ssm_pool[slot], **self.fake_inputs(convolved, x), **self.fake_w)
            ssm_pool[slot] = state.to(ssm_pool.dtype)
            outputs.append(o)
        return outputs


class Mamba2Mixer(Mixer):
    """hidden: [N, C + H]: x, B, C, dt."""

    _use_mtp_custom_op = True
    _stochastic_rounding_for_flashinfer = _stochastic_rounding_for_replay = True
    delta_softplus = True

    def __init__(self, *args):
        self.fake_init(*args)
        self.A, self.D, self.dt_bias = (self.fake_w[name] for name in ("A", "D", "dt_bias"))
        from tensorrt_llm._torch.modules.mamba.selective_state_update import selective_state_update

        self.selective_state_update_func = selective_state_update

    def fake_split(self, hidden):
        H, G, V, K = self.fake_sizes
        return hidden[:, : H * V + 2 * G * K], hidden[:, H * V + 2 * G * K :]

    def fake_inputs(self, convolved, hidden):
        H, G, V, K = self.fake_sizes
        x, B, C = convolved.split([H * V, G * K, G * K], 1)
        return {"q": C.unflatten(1, (G, K)), "k": B.unflatten(1, (G, K)), "v": x.unflatten(1, (H, V)),
                "b": self.fake_split(hidden)[1]}  # fmt: skip

    def forward(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, lora_params=None, **kwargs):
        manager, of = attn_metadata.kv_cache_manager, attn_metadata
        cache = manager.mamba_layer_cache(self.layer_idx)
        slots = mamba_metadata.state_indices[: of.num_seqs]
        p, n = of.num_ctx_tokens, of.num_seqs - of.num_contexts
        outputs = self.fake_prefill(hidden_states[:p], of.fake_lengths, slots[: of.num_contexts], of.fake_begun,
                                    cache.conv, cache.temporal)  # fmt: skip
        if n:
            verify = manager.is_speculative() and spec_metadata is not None
            T = spec_metadata.runtime_draft_len + 1 if verify else 1
            xBC, dt = self.fake_split(hidden_states[p:])
            scratch = cache.intermediate_conv_window if verify else None
            x = self.fake_inputs(self.fake_windows(xBC, cache.conv, slots[of.num_contexts :], scratch, T), hidden_states[p:])
            H, _, V, K = self.fake_sizes
            out = torch.full((n * T, H, V), float("nan"), dtype=xBC.dtype, device=xBC.device)
            given = {"D": self.D[:, None].expand(H, V), "dt_bias": self.dt_bias[:, None].expand(H, V), "dt_softplus": True,
                     "state_batch_indices": slots[of.num_contexts :]}  # fmt: skip
            A = self.A[:, None, None].expand(H, V, K)
            shape = (n, T) if verify else (n,)
            v, k, q = (x[name].unflatten(0, shape) for name in ("v", "k", "q"))
            dt = dt.float()[:, :, None].expand(-1, -1, V).unflatten(0, shape)
            if verify and manager.use_replay_state_update:
                assert T == manager.get_replay_state_update_metadata().replay_step_width
                old = (cache.old_x, cache.old_B, cache.old_dt, cache.old_dA_cumsum, cache.cache_buf_idx)
                replay_selective_state_update(cache.temporal, *old, cache.prev_num_accepted_tokens, v, dt, A, k, q,
                                              out=out.view(v.shape), n_writes=None, **given)  # fmt: skip
            else:
                D = given.pop("D")
                self.selective_state_update_func(cache.temporal, v, dt, A, k, q, D, z=None, out=out.view(v.shape), **given)
            outputs.append(out)
        self.fake_done.append(torch.cat([o.double() for o in outputs]))
        return self.fake_done[-1]


class Qwen3NextGatedDeltaNet(Mixer):
    """hidden: [N, C + 2 H]: q, k, v, a, b."""

    def __init__(self, *args):
        self.fake_init(*args)
        self.A_log, self.dt_bias = torch.log(-self.fake_w["A"]), self.fake_w["dt_bias"]

    def fake_split(self, hidden):
        H, G, V, K = self.fake_sizes
        C = H * V + 2 * G * K
        return hidden[:, :C], hidden[:, C : C + H], hidden[:, C + H :]

    def fake_inputs(self, convolved, hidden):
        H, G, V, K = self.fake_sizes
        q, k, v = convolved.split([G * K, G * K, H * V], 1)
        _, a, b = self.fake_split(hidden)
        return {"q": q.unflatten(1, (G, K)), "k": k.unflatten(1, (G, K)), "v": v.unflatten(1, (H, V)), "a": a, "b": b}

    def fake_forward(self, hidden, attn_metadata, spec_metadata):
        a = self.fake_split(hidden)
        self.fake_hidden = hidden
        self.fake_done.append(self.forward_core(*a, attn_metadata, attn_metadata.mamba_metadata, spec_metadata).double())

    def forward_core(self, mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata=None, output=None):
        manager, of = attn_metadata.kv_cache_manager, attn_metadata
        cache, hidden = manager.mamba_layer_cache(self.layer_idx), self.fake_hidden
        slots, c, p = mamba_metadata.state_indices[: of.num_seqs], of.num_contexts, of.num_ctx_tokens
        n = of.num_seqs - c
        verify = n > 0 and spec_metadata is not None and manager.is_speculative()
        if c and not verify:  # all rows through the chunked prefill
            lengths, begun = of.fake_lengths + [1] * n, of.fake_begun + [True] * n
            return torch.cat(self.fake_prefill(hidden, lengths, slots, begun, cache.conv, cache.temporal))
        done = self.fake_prefill(hidden[:p], of.fake_lengths, slots[:c], of.fake_begun, cache.conv, cache.temporal)
        if verify:
            T = spec_metadata.runtime_draft_len + 1
            x = self.fake_inputs(self.fake_windows(mixed_qkv[p:], cache.conv, slots[c:], cache.intermediate_conv_window, T),
                                 hidden[p:])  # fmt: skip
            q, k, v, a, b = (x[name].unflatten(0, (n, T)) for name in "qkvab")
            done.append(self._replay_verify_recurrent(q, k, v, a, b, cache.temporal, slots[c:], n, T, None, cache, None,
                                                      None).flatten(0, 1))  # fmt: skip
        elif n:
            done.append(self.forward_decode(cache.conv, cache.temporal, None, mixed_qkv=mixed_qkv, a=a, b=b,
                                            cache_indices=slots)[0])  # fmt: skip
        return torch.cat([o.double() for o in done])

    def forward_decode(
        self, conv_states, ssm_states, query_start_loc_long, spec_metadata=None, intermediate_conv_states=None,
        intermediate_ssm_states=None, is_target_verify=None, output=None, **kwargs,
    ):  # fmt: skip
        x = self.fake_windows(kwargs["mixed_qkv"], conv_states, kwargs["cache_indices"], None, 1)
        x = self.fake_inputs(x, self.fake_hidden)
        return fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log, dt_bias=self.dt_bias, q=x["q"][None], k=x["k"][None], v=x["v"][None], a=x["a"], b=x["b"],
            initial_state_source=ssm_states, initial_state_indices=kwargs["cache_indices"], cu_seqlens=query_start_loc_long,
            use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, output=output,
        )  # fmt: skip


class KimiKDALinearAttention(Mixer):
    """hidden: [N, 3 H D + H D + H]: q, k, v, forget gate, beta. Output gate and norm are the identity."""

    def __init__(self, *args):
        self.fake_init(*args)
        self.num_heads, _, self.head_dim, _ = self.fake_sizes
        self.A_log, self.dt_bias = torch.log(-self.fake_w["A"]), self.fake_w["dt_bias"].flatten()
        self.gate_lower_bound, self._packed_conv_weight = self.fake_row.lower_bound or None, self.fake_conv

    def fake_split(self, hidden):
        return hidden.split([3 * self.num_heads * self.head_dim, self.num_heads * self.head_dim, self.num_heads], -1)

    def fake_inputs(self, convolved, hidden):
        q, k, v = convolved.unflatten(1, (3, self.num_heads, self.head_dim)).unbind(1)
        _, a, b = self.fake_split(hidden)
        return {"q": q, "k": k, "v": v, "a": a.unflatten(1, (self.num_heads, self.head_dim)), "b": b}

    def fake_forward(self, hidden, attn_metadata, spec_metadata):
        self.fake_done.append(self._forward_impl(hidden, attn_metadata).double())

    def _forward_impl(self, hidden_states, attn_metadata, output=None):
        of, manager = attn_metadata, attn_metadata.kv_cache_manager
        cache = manager.mamba_layer_cache(self.layer_idx)
        assert not cache.has_kda_replay_caches
        slots, c, p = of.mamba_metadata.state_indices[: of.num_seqs], of.num_contexts, of.num_ctx_tokens
        done = self.fake_prefill(hidden_states[:p], of.fake_lengths, slots[:c], of.fake_begun, cache.conv, cache.temporal)
        n, x = of.num_seqs - c, hidden_states[p:]
        if n and len(x) == n:
            done.append(self.forward_decode(x, cache.conv, cache.temporal, slots[c:], of.mamba_metadata, cache))
        elif n:
            done.append(self.forward_verify(x, len(x) // n, cache, cache.conv, cache.temporal, slots[c:]))
        return torch.cat([o.double() for o in done])

    def _project_verify_inputs(self, x, num_rows):
        qkv, g, beta = self.fake_split(x)
        return (*qkv.chunk(3, -1), g, beta, None)

    def _output_gate(self, x, o, onorm_g=None):
        return o.reshape(-1, self.head_dim)

    def _store_core(self, core, output):
        return core.reshape(-1, self.num_heads, self.head_dim)
