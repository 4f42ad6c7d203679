"""What the supported versions of SGLang call the things that the shim hooks: found by what is there, not by version number."""

from __future__ import annotations

import pkgutil
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED = SpecifierSet(">=0.5.17,<=0.5.23")

BUILT_IN = "sglang.srt.layers.attention.linear.replayssm"  # a SGLang that was patched calls us itself
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
# The step of start-up that decides the recurrent layers' backends; takes the server arguments.
RESOLUTION = (
    "sglang.srt.arg_groups.mamba_hook.handle_mamba_backend",  # from 0.5.19
    f"{SERVER_ARGS}._handle_mamba_backend",
)
# Where a prefix cache takes a request's own slot; takes (cache, req, ...).
DONATIONS = (
    "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.prepare_for_caching_req",  # from 0.5.20
    "sglang.srt.mem_cache.unified_cache.components.mamba_component.MambaComponent.prepare_for_caching_req",
    "sglang.srt.mem_cache.mamba_radix_cache.MambaRadixCache.cache_finished_req",  # to 0.5.20
)
# Where a decode server takes over a request whose state has come from a prefill server; takes (queue, request).
ARRIVAL = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
STATE_PARAMETERS = "sglang.srt.configs.mamba_utils.BaseLinearStateParams"
REQUEST_POOL = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"
HYBRID_BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
MAMBA2_BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend"
GDN = "sglang.srt.layers.attention.linear.gdn_backend"
KDA = "sglang.srt.layers.attention.linear.kda_backend"
METRICS = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"
COMMIT = "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify"


def check_version() -> str:
    """The installed version; NotImplementedError for one that is not supported."""
    found = metadata.version("sglang")
    if not SUPPORTED.contains(found, prereleases=True):
        raise NotImplementedError(f"sglang: supported are {SUPPORTED}, got {found}")
    return found


def present(*paths: str) -> list[str]:
    """Those of the dotted paths that this version has."""
    return [path for path in paths if _resolves(path)]


def _resolves(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def slot_of(req: Any) -> Any:
    """The request's slot of the recurrent pool, a tensor without dimensions, or None; from 0.5.19 in ``req.kv``."""
    return (req if hasattr(req, "mamba_pool_idx") else req.kv).mamba_pool_idx


def decide(server_args: Any, **fields: Any) -> None:
    """Set server arguments during their resolution; from 0.5.19 they are sealed then, and decisions are declared."""
    from sglang.srt.arg_groups import overrides

    if hasattr(overrides, "declare_resolution"):
        overrides.declare_resolution(server_args, "replayssm", **fields)
    else:
        for name, value in fields.items():
            setattr(server_args, name, value)
