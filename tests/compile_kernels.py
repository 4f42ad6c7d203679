"""Compiles every kernel variant that the launchers would start, for an architecture, without a GPU.

usage: python tests/compile_kernels.py [--quick] TARGET [CASE ...]

TARGET: sm_80 ... sm_120, gfx942; CASE: names of tests/cases.py, default all; --quick: one variant of each case.

Run without TRITON_INTERPRET. Launches are recorded, not made: each kernel's arguments are specialised as the real launcher
would, then compiled. Prints a row per variant: kernel, case, registers' spill and binary size where the compiler says.
"""

from __future__ import annotations

import sys

import torch
from triton.backends.compiler import GPUTarget

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from replayssm import Buffers, Conv, ahead, conventional, cursor, kernels, metrics, ops
from replayssm.layout import Inputs, Weights
from tests import cases


def target_of(name: str) -> GPUTarget:
    """The compiler's target for sm_XX or gfxXXX."""
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def launches(case: cases.Case, **kwargs) -> list[ahead.Launch]:
    """Every launch of a decode, a verify and a conventional step, a commit, flush, materialize, load, convolution and counts of
    this case."""
    layout = case.layout(conv=Conv(64), **kwargs)
    generator = torch.Generator().manual_seed(0)
    w = Weights(**cases.weights(layout, generator))
    given = cases.inputs(layout, 2, generator, z=not layout.recurrence.delta)
    x = Inputs(*(given.get(name) for name in Inputs._fields))
    buffers, cursors = layout.allocate(2, 3, "cpu"), cursor.allocate(3, "cpu")
    slots = torch.tensor([0, 1], dtype=torch.int32)
    rows = torch.zeros(2, cursor.PLAN_WIDTH, dtype=torch.int32)
    A = torch.zeros(2, layout.H) if layout.recurrence.decay == "derived" else None
    out = torch.empty(2, layout.H, layout.V, dtype=layout.act)
    states = torch.zeros(2, 2, layout.H, layout.V, layout.K)
    totals = torch.zeros(len(metrics.AT), dtype=torch.int64)
    lines, taps = torch.zeros(2, 64, dtype=layout.act), torch.zeros(64, 4)
    parents, tree = torch.zeros(2, layout.T_max, dtype=torch.int32), torch.zeros(2, 2, layout.T_max, dtype=torch.int32)

    def every():
        end = layout, "triton"
        for after, to in ((None, None), (parents, tree)):
            ops.plan(2, 1, to is not None, cursors, *end)(slots, None, None, None, after, rows, to)
        for T, of in ((1, None), (layout.T_max, None), (layout.T_max, tree)):
            ops.step(2, T, x, out, buffers, *end)(rows, of, 1, x, w, out)
        for of in (None, tree):
            ready = ops.conv(2, of is not None, lines, taps, lines, buffers.conv, 1, True, *end)
            ready(rows, of, 1, lines, taps, None, lines)
        ops.compact(2, buffers, cursors.pending, *end)(rows, parents, slots)
        for accepted in (None, slots):
            ops.commit(2, cursors, "triton")(rows, accepted)
            kernels.count.commit(2, totals, metrics.AT)(rows, cursors.pending, accepted)
        kernels.count.plan(2, totals, metrics.AT, layout)(rows)
        ops.flush(2, buffers, A, *end)(rows)
        ops.materialize(slots, slots, buffers, cursors, A, states, slots, *end)
        ops.load(states, buffers, cursors.key, slots, 0, *end)
        one = Buffers(*(None if b is None else b[:1] for b in buffers))
        u, seed = torch.zeros(3, layout.H, 1, layout.V), torch.zeros(1, dtype=torch.int64)
        for T, more in ((1, (u, None, slots, slots, seed)), (3, ())):
            conventional.step(slots, T, x._asdict(), w._asdict(), one, layout, "triton", out, slots, one, slots[:, None], *more)

    return ahead.launches(every)


def low_precision(case: cases.Case, target_name: str) -> dict:
    """A split of rounded formats that the target converts and rows of K can be stored in."""
    if target_name == "sm_80":
        return {"act": torch.bfloat16, "state": "fp16+sr", "read": "int8", "T_max": 4}
    return {"act": torch.bfloat16, "state": "e4m3+sr", "read": "int8:row" if case.K % 32 else "nvfp4", "T_max": 4}


def main(target_name: str, names: list[str], quick: bool) -> None:
    """Compile all variants of the named cases (default: all) for the target."""
    if not target_name.startswith("sm_"):
        kernels.verify.dot_precision = kernels.materialize.dot_precision = lambda: "ieee"
    every = [*cases.FAMILY.values(), *cases.READY.values(), *cases.MODELS, *cases.AWKWARD]
    variants = [{"act": torch.bfloat16, "W": 6, "T_max": 4}, {"act": torch.float16, "state": "fp16", "W": 32, "T_max": 16}]
    for case in [c for c in every if not names or c.name in names]:
        split = [] if case in cases.READY.values() else [low_precision(case, target_name)]  # ready gates differ in gates alone
        for variant in variants[:1] if quick else variants + split:
            for launch in launches(case, **variant):
                compiled = ahead.compiled(launch, target_of(target_name))
                binary = compiled.asm.get("cubin", compiled.asm.get("hsaco"))
                print(f"{launch.kernel.__name__:24s} {case.name:22s} {variant['act']!s:16s} {len(binary):8d} bytes", flush=True)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--quick"]
    main(arguments[0], arguments[1:], quick="--quick" in sys.argv)
