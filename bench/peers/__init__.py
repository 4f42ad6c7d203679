"""The peers' kernels on our inputs. ``replayssm bench stage`` fetches them; nothing of them is in this repository.

One module per project; each imports its project only when a contestant is made, so that what was not staged is absent with
its import error as the reason.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..contest import Contestant
from . import fla, flashinfer, sglang, vllm

DECODE: dict[str, tuple[type[Contestant], ...]] = {
    "gdn": (sglang.PackedDecode, sglang.Replay, fla.GDN),
    "kda": (sglang.PackedDecode, sglang.Replay, fla.KDA),
    "mamba2": (
        vllm.Update,
        vllm.SweptUpdate,
        vllm.Replay,
        flashinfer.Update,
        flashinfer.Checkpointing,
        flashinfer.TwoKernelCheckpointing,
    ),
}
VERIFY: dict[str, tuple[type[Contestant], ...]] = {
    "gdn": (sglang.Verify, sglang.GDNReplayVerify),
    "kda": (sglang.Verify, sglang.KDAReplayVerify),
    "mamba2": (vllm.Verify, flashinfer.Verify, flashinfer.Checkpointing, flashinfer.TwoKernelCheckpointing),
}


def replays(name: str) -> bool:
    """Whether results of this name are of a contestant that does not write the state every step."""
    return "replay" in name or "checkpointing" in name


def use(directory: Path) -> None:
    """Make what ``replayssm bench stage`` put there importable, ahead of installed packages of those names."""
    if not directory.is_dir():
        raise ValueError(f"peers: expected a folder that `replayssm bench stage` wrote, got {directory}")
    sys.path.insert(0, str(directory.resolve()))
    # A missing object is absent, not minutes of compilation inside a measurement.
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
