"""Compiles the kernels that the calls launch, for an architecture, without a GPU.

usage: python tests/integrations/flashinfer/compile_kernels.py [--own] TARGET

--own: those of the integration alone, not the core's. Run without TRITON_INTERPRET. Prints a row per launch: kernel, call,
binary size.
"""

from __future__ import annotations

import sys

import torch

sys.path.insert(0, __file__.rsplit("/", 4)[0])

from replayssm import ahead
from replayssm.integrations import flashinfer as fi
from replayssm.integrations.flashinfer import translate
from tests.compile_kernels import target_of
from tests.integrations.flashinfer import test_gdn, test_kda, test_materialize
from tests.integrations.flashinfer.harness import Mamba


def mamba(state: torch.dtype) -> None:
    """checkpointing_ssu of one token and several, its conventional step, and its states at a prefix."""
    scaled, stochastic = state in translate.SCALED, state in translate.STOCHASTIC
    seed = torch.tensor([1]) if stochastic else None
    for T in (1, 4):
        run = Mamba(T, 16, [0, 1], dtype=torch.bfloat16, H=8, G=1, V=64, K=128)
        run.pool["state"] = torch.zeros(run.pool["state"].shape, dtype=state)
        scale = torch.ones(run.pool["state"].shape[:3]) if scaled else None
        x = run.as_given(run.inputs(2, T))
        options = {"dt_softplus": True, "state_scale": scale, "rand_seed": seed, "out": torch.empty_like(x["x"])}
        fi.checkpointing_ssu(
            **run.pool, **x, **options, ring_start=run.start, prev_num_accepted_tokens=run.prev,
        )  # fmt: skip
        fi.selective_state_update(run.pool["state"], **x, **options, cache_steps=T)
    fi.replayssm_materialize(
        **test_materialize.tables([run], None if scale is None else [scale]),
        **{name: torch.zeros(1, 2, dtype=torch.int32) for name in ("src_slots", "dst_slots")},
        **{name: torch.zeros(2, dtype=torch.int32) for name in ("ring_start", "replay_prefix_len", "active_request_indices")},
        **test_materialize.sizes(run),
        rand_seed=seed,
        philox_rounds=10 if stochastic else 0,
    )


def gdn(state: torch.dtype) -> None:
    """The ring of corrections, of one token and several, and the conventional step."""
    for T in (1, 4):
        run = test_gdn.Ring(T, [0, 1], V=128, K=128, act=torch.bfloat16, state=state)
        x = test_gdn.tokens(run.g, 2, T, V=128, K=128, dtype=torch.bfloat16)
        cursors = {name: torch.zeros(2, dtype=torch.int32) for name in ("hist_len", "cache_base")}
        rings = {"k_cache": run.k, "u_cache": run.u, "g_cache": run.gsum}
        fi.gated_delta_rule_mtp_ucache_flush(
            A_log=run.A_log, dt_bias=run.dt_bias, **x, **cursors, **rings, initial_state_source=run.pool
        )
        weights = run.A_log, x["a"], run.dt_bias, x["b"]
        fi.gated_delta_rule_decode_pretranspose(x["q"], x["k"], x["v"], run.pool[:2], *weights)


def kda(state: torch.dtype) -> None:
    """Decode, frozen verification and its commit, by each way to give gates."""
    for gates in test_kda.GATES:
        layer, S = test_kda.Layer(gates), test_kda.S
        x = {name: one.bfloat16() for name, one in layer.tokens(2, 3).items()}
        pool, (H, V, K) = layer.pool.to(state), layer.pool.shape[1:]
        layer.run({name: one[:, :1] for name, one in x.items()}, initial_state=pool)
        caches = torch.zeros(S, H, 3, V), torch.zeros(S, H, 3, 2 * K, dtype=torch.bfloat16)
        frozen = {"disable_state_update": True, "correction_cache": caches[0], "kg_cache": caches[1]}
        layer.run(x, initial_state_source=pool, initial_state_indices=torch.tensor([0, 1]), **frozen)
        commit = {name: one for name, one in layer.options.items() if name != "beta_is_logit"}
        one = torch.tensor([0, 1])
        fi.recurrent_kda_commit(pool, *caches, one, one, **layer.weights, **commit)


def main(target_name: str, own: bool) -> None:
    """Compile every kernel that the calls launch, or the integration's own."""
    translate.backend_of = lambda x: "triton"
    formats = (torch.float32, torch.float16) if target_name == "sm_80" else (torch.float32, torch.float16, torch.float8_e4m3fn)
    for state in formats:
        for call in (mamba, gdn, kda) if state not in translate.SCALED else (mamba,):
            for launch in ahead.launches(lambda call=call, state=state: call(state)):
                name = launch.kernel.__name__
                if not own or "integrations" in launch.kernel.fn.__module__:
                    compiled = ahead.compiled(launch, target_of(target_name))
                    print(f"{name:22s} {call.__name__:6s} {state!s:22s} {len(compiled.asm['cubin'])} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[-1], own="--own" in sys.argv)
