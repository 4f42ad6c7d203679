"""Small walks of the miniature engine that launch every kernel of every family, for compute-sanitizer: see ci/sanitize.

usage: python tests/sanitize.py [DEVICE [STEPS]]   exit code 1: something is beyond its bound, or a kernel was never launched
"""

from __future__ import annotations

import sys

import torch

from replayssm import Layout, kernels
from replayssm.metrics import Counted
from replayssm.soak import Engine, Setup, walk

SPLIT = {"gdn": {"state": "fp16+sr", "read": "int8"}, "mamba2": {"act": torch.bfloat16}}
KERNELS = ("plan", "commit", "compact", "decode", "verify", "materialize", "conv", "count_plan", "count_commit")


def main(device: str = "cuda", steps: str = "60") -> int:
    """Walk, family by family."""
    wrong, launched = 0, set()
    prepared = kernels.prepared.Prepared.__call__

    def noted(self, *args):
        launched.add(self.kernel.__name__)
        prepared(self, *args)

    kernels.prepared.Prepared.__call__ = noted
    for family in ("mamba2", "gdn", "kda", "kda_safe", "gla"):
        layout = Layout(
            family, 2, 2 if family.startswith("kda") else 1, 16, 32, 6, 3, **{"act": torch.float32} | SPLIT.get(family, {})
        )
        setup = Setup(layout, 2, 4, 12, tokens=12, backend="triton", device=device, debug=False)
        wrong += walk(Engine(setup, seed=1), int(steps)).mismatches
    counted = Counted(layout, 1, 4, device, "triton")
    counted.commit(counted.plan(torch.tensor([2, -1, 0, 3], device=device)))
    absent = [name for name in KERNELS if f"_{name}_kernel" not in launched]
    print(f"{wrong} mismatches; kernels: {', '.join(sorted(launched))}; never launched: {', '.join(absent) or 'none'}")
    return 1 if wrong or absent else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
