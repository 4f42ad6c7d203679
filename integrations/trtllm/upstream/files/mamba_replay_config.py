# SPDX-License-Identifier: Apache-2.0
"""The configuration `kv_cache_config.mamba_replay`."""

from typing import Literal, Optional

from pydantic import Field

from .utils import StrictBaseModel


class MambaReplayConfig(StrictBaseModel):
    """Recurrent layers (Mamba-2, Gated DeltaNet, KDA) decode from a state and a ring of inputs."""

    mode: Literal["require", "auto", "off"] = Field(
        default="require",
        description="require: fail at load where it cannot run. auto: fall back, and say why once "
        "per rank. off: not used.",
    )
    window: Optional[int] = Field(
        default=None,
        ge=1,
        le=1024,
        description="Most tokens between folds of a request's state, at least the tokens of a "
        "verify step. The default is 16.",
    )
    checkpoint: Literal["auto", "fp32", "bf16", "fp16", "fp16+sr"] = Field(
        default="auto",
        description="The format that the state pool must have; auto takes any.",
    )
    read: Optional[str] = Field(
        default=None,
        description="Format of a copy of the states that decoding reads: e4m3, int8 or nvfp4.",
    )
    stagger: bool = Field(
        default=True,
        description="Whether requests admitted together fold on different steps.",
    )
    backend: Optional[Literal["triton", "torch"]] = Field(
        default=None, description="The default is triton on CUDA."
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Of stochastic rounding.")
    debug: bool = Field(
        default=False,
        description="Check cursors at the price of device reads; not with CUDA graphs.",
    )
