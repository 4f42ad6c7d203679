"""What a user writes under ``model_kwargs: {replayssm: ...}`` in TensorRT-LLM's YAML."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

KEY = "replayssm"


class Settings(BaseModel):
    """Strict: an unknown or mistyped field is an error.

    Attributes:
        mode: "require" fails at load with the reason; "auto" falls back to TensorRT-LLM's own decoding and says why once per
            rank; "off" changes nothing.
        window: most records between folds; None takes 16.
        checkpoint: the format that the state pool must have, or "auto" for whatever ``kv_cache_config.mamba_ssm_cache_dtype``
            gave it. "fp16+sr" is that pool's dtype rounded stochastically.
        read: format of a copy that readouts use, None for the checkpoint itself.
        stagger: whether requests admitted together fold on different steps.
        backend: "triton" or "torch"; None takes triton on CUDA.
        seed: of stochastic rounding.
        debug: check cursors and the order of calls at the price of device reads; cannot be captured in a CUDA graph.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Literal["require", "auto", "off"] = "require"
    window: int | None = Field(None, ge=1, le=1024)
    checkpoint: Literal["auto", "fp32", "bf16", "fp16", "fp16+sr"] = "auto"
    read: str | None = None
    stagger: bool = True
    backend: Literal["triton", "torch"] | None = None
    seed: int = Field(0, ge=0, lt=2**32)
    debug: bool = False


def settings_of(config: Any) -> Settings:
    """The settings on a pretrained config, or on its text_config; mode "off" where there are none.

    Raises: ValueError: one line for each field that is wrong.
    """
    found = [
        (path, value)
        for path, holder in (("", config), ("text_config.", _member(config, "text_config")))
        if (value := _member(holder, KEY)) is not None
    ]
    if not found:
        return Settings(mode="off")
    if len(found) > 1 and found[0][1] != found[1][1]:
        raise ValueError(f"model_kwargs: expected {KEY} once, got it on the model and on its text_config with other values")
    path, value = found[0]
    if not isinstance(value, dict):
        raise ValueError(f"model_kwargs.{path}{KEY}: expected a mapping such as {{mode: require}}, got {value!r}")
    try:
        return Settings.model_validate(value)
    except ValidationError as error:
        lines = [f"model_kwargs.{path}{KEY}.{_where(one)}: {one['msg']}, got {one['input']!r}" for one in error.errors()]
        raise ValueError("\n".join(lines)) from None


def _member(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def _where(error: Any) -> str:
    return ".".join(map(str, error["loc"]))
