"""How SGLang decodes recurrent layers in each of the ways that are compared."""

from __future__ import annotations

import json
from pathlib import Path

STOCK, NATIVE, OURS = "stock", "native_replay", "ours"
MODES = (STOCK, NATIVE, OURS)
# A chain of so many tokens a step, guessed from the text so far: no draft model takes part.
DRAFT_TOKENS = 4


def exists(mode: str, folder: Path) -> bool:
    """Whether SGLang has the mode for the model in the folder: no replay of its own for Mamba-2."""
    return mode != NATIVE or json.loads((folder / "config.json").read_text())["model_type"] != "nemotron_h"


def options(mode: str, folder: Path, speculative: bool) -> list[str]:
    """SGLang's command-line options for the mode and the model in the folder.

    Raises: ValueError: SGLang has no replay of its own for the model.
    """
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    chosen = []
    if speculative:  # without a number of its own SGLang runs 48 requests at most
        chosen += ["--speculative-algorithm=NGRAM", f"--speculative-num-draft-tokens={DRAFT_TOKENS}",
                   "--speculative-ngram-max-bfs-breadth=1", "--max-running-requests=2048"]  # fmt: skip
        if kind == "kimi_linear" and mode != OURS:  # its default's kernels are for other GPUs
            chosen += ["--linear-attn-verify-backend=triton"]
    if mode == OURS:
        chosen += ["--mamba-backend=replayssm"] if kind == "nemotron_h" else ["--linear-attn-decode-backend=replayssm"]
    if mode == NATIVE:
        if not exists(mode, folder):
            raise ValueError(f"mode: SGLang has no {NATIVE} for Mamba-2, expected {STOCK} or {OURS}")
        chosen += ["--enable-linear-replayssm-spec" if speculative else "--enable-linear-replayssm"]
    return chosen
