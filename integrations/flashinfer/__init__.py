"""FlashInfer's calls, with its names, arguments and tensor layouts, on ReplaySSM's kernels."""

from .gdn import gated_delta_rule_decode_pretranspose
from .kda import recurrent_kda, recurrent_kda_commit
from .mamba import allocate_checkpointing_ssu_scratch, checkpointing_ssu
from .materialize import replayssm_materialize
from .patch import OPS, Installed, install, install_from_environment, uninstall
from .ucache import gated_delta_rule_mtp_ucache_flush
from .update import selective_state_update

__all__ = [
    "OPS",
    "Installed",
    "allocate_checkpointing_ssu_scratch",
    "checkpointing_ssu",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp_ucache_flush",
    "install",
    "install_from_environment",
    "recurrent_kda",
    "recurrent_kda_commit",
    "replayssm_materialize",
    "selective_state_update",
    "uninstall",
]
