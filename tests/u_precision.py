"""How rough may the delta rule's readout helper u be? Errors against fp64 after 4,000 decode steps.

usage: python -m tests.u_precision [--steps N] [--device DEVICE] [--out FILE]

Inputs have bf16 values in fp32 tensors, so that no output rounding hides the helper's. The conventional recurrence is the
same tokens through the in-place fp32 recurrence of the engines.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json

import torch

from replayssm import ReplayState, reference
from tests.cases import FAMILY, inputs, relative, weights

STEPS = 4000
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def drift(
    case, u: torch.dtype, strong: bool, steps: int = STEPS, seed: int = 0, device: str = "cpu", backend: str | None = None
) -> dict[str, float]:
    """Errors against fp64 after `steps` tokens: of the checkpointed state, of outputs, and of the conventional recurrence.

    `strong`: 6 % of tokens have g = -20 and 1 % g = -inf (through ready gates), else ordinary gates.
    """
    layout = case.layout(W=16, u=u, act=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    w = weights(layout, generator)
    x = {name: one.bfloat16().float() for name, one in inputs(layout, steps, generator).items()}
    if strong:
        chance = torch.rand(steps, generator=generator)
        x["a"][chance < 0.06] = -20.0
        x["a"][chance < 0.01] = float("-inf")
    initial = torch.randn(1, layout.H, layout.V, layout.K, generator=generator) * layout.K**-0.5
    derived = layout.recurrence.decay == "derived"
    state = ReplayState(layout, 1, 1, device, backend, A=w["A"][None].to(device) if derived else None)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    state.load(slots, initial[None].to(device))
    moved = {n: t.to(device) for n, t in x.items()}
    step_weights = {n: t if t is None or (derived and n == "A") else t.to(device) for n, t in w.items()}
    step_weights["A"] = None if derived else step_weights["A"]
    outputs = []
    for i in range(steps):
        plan = state.plan(slots)
        outputs.append(state.step(0, plan, **{n: t[i : i + 1] for n, t in moved.items()}, **step_weights))
        state.commit(plan)
    o, s = reference.decode(layout.recurrence, initial[0], **x, **w)
    o_32, s_32 = reference.decode(layout.recurrence, initial[0], **x, **w, dtype=torch.float32)
    return {
        "state": relative(state.materialize(slots)[0, 0], s),
        "state_conventional": relative(s_32, s),
        "output": relative(torch.cat(outputs), o),
        "output_conventional": relative(o_32, o),
    }


def ready(case):
    """The case with gates computed by the caller, so that a test may choose them."""
    row = case.recurrence
    return dataclasses.replace(
        case, recurrence=dataclasses.replace(row, beta="ready" if row.beta != "one" else "one", decay="ready")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    for name, u, strong in itertools.product(("gdn", "kda"), PRECISIONS, (False, True)):
        case = ready(FAMILY[name]) if strong else FAMILY[name]
        errors = drift(case, PRECISIONS[u], strong, args.steps, device=args.device)
        rows.append({"family": name, "u": u, "gates": "strong" if strong else "ordinary", "steps": args.steps, **errors})
        print(rows[-1], flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, backend torch"
        with open(args.out, "w") as file:
            json.dump({"header": {"device": device, "torch": torch.__version__, "seed": 0}, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
