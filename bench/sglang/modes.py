"""How SGLang decodes recurrent layers in each of the ways that are compared."""

from __future__ import annotations

import json
from pathlib import Path

STOCK, NATIVE, OURS = "stock", "native_replay", "ours"
MODES = (STOCK, NATIVE, OURS)
# A chain of so many tokens a step, guessed from the text so far: no draft model takes part.
DRAFT_TOKENS = 4


def options(mode: str, folder: Path, speculative: bool) -> list[str]:
    """SGLang's command-line options for the mode and the model in the folder.

    Raises: ValueError: SGLang has no replay of its own for the model.
    """
    mamba2 = json.loads((folder / "config.json").read_text())["model_type"] == "nemotron_h"
    chosen = []
    if speculative:
        chosen += ["--speculative-algorithm=NGRAM", f"--speculative-num-draft-tokens={DRAFT_TOKENS}",
                   "--speculative-ngram-max-bfs-breadth=1"]  # fmt: skip
    if mode == OURS:
        chosen += ["--mamba-backend=replayssm"] if mamba2 else ["--linear-attn-decode-backend=replayssm"]
    if mode == NATIVE:
        if mamba2:
            raise ValueError(f"mode: SGLang has no {NATIVE} for Mamba-2, expected {STOCK} or {OURS}")
        chosen += ["--enable-linear-replayssm-spec" if speculative else "--enable-linear-replayssm"]
    return chosen
