"""The user's settings: which of SGLang's arguments hold them, and what is refused at start-up."""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ... import Layout, Recurrence
from ...configuration import DTYPES

NAME = "replayssm"  # of the backend, of the plugin and of the key in --json-model-override-args
# The attention kernels of SGLang that prefill read and write the pool's states as they are.
POOL_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp16+sr": "float16"}


class Settings(BaseModel):
    """What ``--replayssm-*`` or ``--json-model-override-args '{"replayssm": {...}}'`` say; absent: the defaults.

    Attributes:
        window: most records between folds.
        checkpoint: format of the states; None: what SGLang's pool has (--mamba-ssm-dtype, the model, fp32).
        read: format of a copy that readouts use, or None.
        u: dtype of the delta rule's readout helper; None: as Layout decides.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(default=16, ge=1, strict=True)
    checkpoint: Literal["fp32", "bf16", "fp16", "fp16+sr"] | None = None
    read: Literal["e4m3", "int8", "nvfp4"] | None = None
    u: Literal["fp32", "bf16", "fp16"] | None = None

    def layout(
        self, recurrence: Recurrence, H: int, G: int, V: int, K: int, T_max: int, act: torch.dtype, state: torch.dtype
    ) -> Layout:
        """One layer's layout in a pool whose states have dtype ``state``; ValueError where the settings say another."""
        pool = str(state).removeprefix("torch.")
        checkpoint = self.checkpoint or next(name for name, dtype in POOL_DTYPES.items() if dtype == pool)
        if POOL_DTYPES[checkpoint] != pool:
            raise ValueError(f"checkpoint: expected a format of the pool's {pool}, got {checkpoint!r}")
        if T_max > self.window:
            raise ValueError(f"window: expected at least the {T_max} draft tokens of a step, got {self.window}")
        return Layout(
            recurrence, H, G, V, K, W=self.window, T_max=T_max, state=checkpoint, read=self.read, act=act,
            u=DTYPES[self.u] if self.u else None,
        )  # fmt: skip


# Server arguments that cannot go with ours -> why. Each is off or None by default.
REFUSED = {
    "enable_linear_replayssm": "it is SGLang's own ring",
    "enable_linear_replayssm_spec": "it is SGLang's own ring",
    "linear_attn_verify_backend": "drafts are verified by the decode backend",
    "enable_unified_memory": "its pool moves states",
    "enable_page_major_kv_layout": "SGLang allows its own kernels alone there",
    "enable_two_batch_overlap": "two batches would share one plan",
    "enable_torch_compile": "compiled steps would hold one step's plan",
    "enable_pdmux": "two batches would share one plan",
    "enable_mamba_cache_stochastic_rounding": "use --replayssm-checkpoint fp16+sr",
    "enable_multi_layer_eagle": "its drafts keep recurrent states of their own",
    "speculative_adaptive": "a step's drafts are as many as --speculative-num-draft-tokens",
}
DEVICES = (None, "cuda", "cpu")


def chosen(server_args: Any) -> tuple[bool, bool]:
    """Whether we decode GDN and KDA layers, and whether Mamba-2 layers."""
    return server_args.linear_attn_decode_backend == NAME, server_args.mamba_backend == NAME


def overrides_of(server_args: Any) -> dict[str, Any]:
    """The JSON object of --json-model-override-args."""
    return json.loads(server_args.json_model_override_args or "{}")


def given_of(server_args: Any) -> dict[str, Any] | None:
    """What the user set, in the overrides or in fields of a SGLang that has ReplaySSM built in; None: nothing."""
    values = {name: getattr(server_args, f"{NAME}_{name}", None) for name in Settings.model_fields}
    fields = {name: value for name, value in values.items() if value is not None}
    overrides = overrides_of(server_args)
    return overrides.get(NAME, {}) | fields if fields or NAME in overrides else None


def settings_of(server_args: Any) -> Settings:
    """The settings; ValueError names the option at fault."""
    given = given_of(server_args) or {}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc'])) or NAME}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{NAME} settings: {faults}, got {given}") from None


def check_place(server_args: Any) -> None:
    """The choice, and settings, stand where they have a meaning; ValueError names those that do not."""
    for name in ("linear_attn_backend", "linear_attn_prefill_backend"):
        if getattr(server_args, name) == NAME:
            raise ValueError(f"--{name.replace('_', '-')} {NAME}: prefill is SGLang's own; use --linear-attn-decode-backend")
    if given_of(server_args) is not None and not any(chosen(server_args)):
        raise ValueError(f"{NAME} settings: expected --linear-attn-decode-backend {NAME} or --mamba-backend {NAME} with them")


def check(server_args: Any) -> Settings:
    """The settings of a server that we decode for, whose other arguments go with them.

    Raises:
        ValueError, NotImplementedError: what does not, by name.
    """
    settings = settings_of(server_args)
    for name in ("linear_attn_backend", "linear_attn_prefill_backend"):
        if getattr(server_args, name) == NAME:
            raise NotImplementedError(
                f"--{name.replace('_', '-')} {NAME}: prefill is SGLang's; use --linear-attn-decode-backend"
            )
    for name, why in REFUSED.items():
        value = getattr(server_args, name, None)
        if value not in (None, False):
            raise NotImplementedError(f"--{name.replace('_', '-')} {value}: not supported with {NAME}, {why}")
    device = getattr(server_args, "device", None)
    if device not in DEVICES or torch.version.hip:
        raise NotImplementedError(f"--device: {NAME} supports CUDA GPUs, got {'hip' if torch.version.hip else device}")
    from sglang.srt.environ import envs

    for name, harmless in (("SGLANG_ENABLE_PP_SPEC", (None, False)), ("SGLANG_RAGGED_VERIFY_MODE", (None, "static"))):
        variable = getattr(envs, name, None)
        if variable is not None and variable.get() not in harmless:
            raise NotImplementedError(f"{name}={variable.get()}: not supported with {NAME}")
    return settings
