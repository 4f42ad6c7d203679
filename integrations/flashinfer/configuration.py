"""Which of FlashInfer's calls become ours for a model, and what its caller allocates for them."""

from __future__ import annotations

from ...configuration import Choice, Configuration
from ...layout import Layout
from .patch import VARIABLE, check_version, install
from .translate import FORMATS, SCALED, STOCHASTIC

# Per family its ops, the first of which keeps the ring.
OPS = {
    "mamba2": ("checkpointing_ssu", "replayssm_materialize", "selective_state_update"),
    "gdn": ("gated_delta_rule_mtp_ucache_flush", "gated_delta_rule_decode_pretranspose"),
}
CHECKPOINTS = {
    name + rounding + (":row" if dtype in SCALED else "")
    for dtype, name in FORMATS.items()
    for rounding in ("", *(("+sr",) if dtype in STOCHASTIC else ()))
}


def configure(choice: Choice) -> Configuration:
    """The environment that makes FlashInfer's names ours, with the sizes of the caller's tensors as notes.

    Raises:
        ValueError, NotImplementedError: what these calls do not offer, by name.
    """
    family = choice.model.recurrence.name
    if family not in OPS:
        raise NotImplementedError(
            f"model: supported are {', '.join(OPS)}, got {family}: FlashInfer's calls keep no ring of several steps for it"
        )
    layout = choice.layout()
    if choice.read is not None:
        raise NotImplementedError(f"read: FlashInfer's calls have no copy to read, got {choice.read!r}")
    known = CHECKPOINTS if family == "mamba2" else {name for name in CHECKPOINTS if ":" not in name}
    if choice.checkpoint not in known:
        raise NotImplementedError(
            f"checkpoint: supported for {family} are {', '.join(sorted(known))}, got {choice.checkpoint!r}"
        )
    notes = ["tensors of S slots, one layer, before tensor parallelism:", *_tensors(layout, choice.checkpoint)]
    if "+sr" in choice.checkpoint:
        notes.append("stochastic rounding: pass rand_seed with every call")
    return Configuration("environment", {VARIABLE: ",".join(OPS[family])}, tuple(notes))


def _tensors(layout: Layout, checkpoint: str) -> list[str]:
    """Shapes and dtypes by FlashInfer's names."""
    H, G, V, K, act = layout.H, layout.G, layout.V, layout.K, str(layout.act).removeprefix("torch.")
    dtype = str(next(one for one, name in FORMATS.items() if name == layout.format.name.partition("+")[0].partition(":")[0]))
    state = f"[S, {H}, {V}, {K}] {dtype.removeprefix('torch.')}"
    if layout.recurrence.delta:
        R, u = 2 * layout.W, str(layout.u).removeprefix("torch.")
        return [
            f"initial_state_source {state}",
            f"k_cache [S, {G}, {R}, {K}] {act}; u_cache [S, {H}, {R}, {V}] {u}; g_cache [S, {H}, {R}] float32",
        ]
    L = layout.W + layout.T_max
    scale = [f"state_scale [S, {H}, {V}] float32"] if ":row" in checkpoint else []
    rings = f"x_cache [S, {H}, {L}, {V}] {act}; B_cache [S, {G}, {L}, {K}] {act}; dt_cache [S, {H}, {L}] float32"
    return [f"state {state}", *scale, rings]


def check(found: Configuration) -> None:
    """The installed FlashInfer has every name that would be bound; they are given back at once."""
    import flashinfer

    check_version(flashinfer.__version__)
    with install(found.settings[VARIABLE].split(",")):
        pass
