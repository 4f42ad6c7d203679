"""Compiles FlashInfer's Mamba-2 kernels of one shape through its own generator; prints a path or a reason per object.

usage: python flashinfer_objects.py '{"V": 64, "K": 128, "heads_per_group": 16, "groups": 8, "T": 1}'
``stage.py`` runs it where FlashInfer and its build requirements are importable; no GPU is needed.
"""

from __future__ import annotations

import json
import sys

import torch
from flashinfer.compilation_context import CompilationContext
from flashinfer.jit.mamba import (
    gen_selective_state_update_module,
    gen_selective_state_update_sm90_module,
    gen_selective_state_update_sm100_module,
)
from flashinfer.jit.mamba.checkpointing_ssu import gen_checkpointing_ssu_module

WINDOW = 16
fp32, bf16, int32 = torch.float32, torch.bfloat16, torch.int32


def main() -> None:
    V, K, heads_per_group, groups, T = (json.loads(sys.argv[1])[n] for n in ("V", "K", "heads_per_group", "groups", "T"))
    major = max(major for major, _ in CompilationContext().TARGET_CUDA_ARCHS)
    update = (
        gen_selective_state_update_sm100_module
        if major >= 10
        else gen_selective_state_update_sm90_module
        if major == 9
        else gen_selective_state_update_module
    )
    generators = (
        lambda: update(fp32, bf16, bf16, fp32, int32, None, V, K, T, int32, int32),
        lambda: gen_checkpointing_ssu_module(
            fp32, bf16, bf16, bf16, fp32, int32, None, V, K, T, WINDOW, heads_per_group, groups
        ),
    )
    for generate in generators:
        try:
            spec = generate()
            if not spec.jit_library_path.exists():
                spec.build()
            print(spec.jit_library_path, flush=True)
        except Exception as error:  # a shape that FlashInfer has no kernel for
            reason = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines() or [repr(error)]
            print(f"{spec.name}: {reason[0]}", flush=True)


if __name__ == "__main__":
    main()
