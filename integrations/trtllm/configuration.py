"""TensorRT-LLM's YAML from a user's choice, and TensorRT-LLM's own reading of it."""

from __future__ import annotations

from typing import Any

from replayssm.configuration import Choice, Configuration
from replayssm.layout import Layout

from . import engine
from .contract import Family, load
from .layouts import WINDOW
from .settings import KEY, settings_of

POOLS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp16+sr": "float16"}
COMPOSITE = "ForConditionalGeneration"  # of architectures whose config.json holds the language model's as text_config


def configure(choice: Choice) -> Configuration:
    """The YAML that TensorRT-LLM takes as ``--config``.

    Raises:
        ValueError, NotImplementedError: what the shim does not offer, by name.
    """
    known, architecture = load().models, choice.model.architecture
    if architecture not in known:
        raise NotImplementedError(f"model: supported are the architectures {', '.join(known)}, got {architecture!r}")
    layout = _layout(choice, known[architecture].family)
    about = {"mode": "require", "window": layout.W, "checkpoint": choice.checkpoint}
    ours: dict[str, Any] = {KEY: about | ({"read": choice.read} if choice.read else {})}
    settings_of(ours)
    settings = {
        "model_kwargs": {"text_config": ours} if architecture.endswith(COMPOSITE) else ours,
        "kv_cache_config": {"mamba_ssm_cache_dtype": POOLS[choice.checkpoint]},
    }
    notes = ["start with --custom_module_dirs, as docs/trtllm.md says; nothing of this has run inside TensorRT-LLM yet"]
    if choice.tokens > 1:
        settings["speculative_config"] = {"decoding_type": "MTP", "max_draft_len": choice.tokens - 1}
        notes.append("the checkpoint must hold the heads that draft (MTP)")
    return Configuration("yaml", settings, tuple(notes))


def _layout(choice: Choice, family: Family) -> Layout:
    """The layout that the shim will make; the ring of models other than Kimi's lives in the engine's history of drafts."""
    if choice.u is not None:
        raise NotImplementedError(f"u: not offered with TensorRT-LLM, got {choice.u!r}")
    if choice.tokens > 1 and choice.drafts != "mtp":
        raise NotImplementedError(f"drafts: supported with TensorRT-LLM is mtp, got {choice.drafts!r}")
    if family == "kda" and choice.checkpoint.startswith("fp16"):
        raise NotImplementedError(f"checkpoint: TensorRT-LLM keeps Kimi's states in fp32 or bf16, got {choice.checkpoint!r}")
    rows = 2 * max(WINDOW, choice.tokens)
    most = rows - choice.tokens if choice.tokens > 1 and family != "kda" else 64
    layout = choice.layout(most)
    if choice.tokens > 1 and family != "kda" and layout.W > most:
        raise ValueError(
            f"window: expected at most {most}, the engine's {rows} rows less {choice.tokens} tokens, got {layout.W}"
        )
    return layout


def check(found: Configuration) -> None:
    """TensorRT-LLM's own reading of the YAML; raises what it raises."""
    engine.check_version()
    engine.require("TorchLlmArgs")(model="model", **found.settings)
