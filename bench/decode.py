"""Times decode steps on a GPU: whole flush cycles, rows staggered, plan and commit charged, one CUDA graph.

usage: python -m bench.decode [--layer NAME ...] [--batch B ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json

import torch

from bench.timing import graph_us, header
from replayssm import GDN, KDA, MAMBA2, Layout, ReplayState, launch

LAYERS = {
    "Qwen3.5-4B": dict(recurrence=GDN, H=32, G=16, V=128, K=128),
    "Kimi-Linear-48B-A3B": dict(recurrence=KDA, H=32, G=32, V=128, K=128),
    "Nemotron-3-Super-120B-A12B": dict(recurrence=MAMBA2, H=128, G=8, V=64, K=128),
    "Nemotron-3-Nano-4B": dict(recurrence=MAMBA2, H=96, G=8, V=80, K=128),
}
MODEL_LAYERS = 8  # layers that share one plan and commit here; the models have 20 to 69


def prepare(layout: Layout, B: int, layers: int = MODEL_LAYERS):
    """A state of B staggered rows with finite random contents, and one step's inputs per layer."""
    row = layout.recurrence
    A = -torch.rand(layers, layout.H, device="cuda") - 0.1
    state = ReplayState(layout, layers, B, "cuda", A=A if row.decay == "derived" else None)
    for name, x in state.buffers._asdict().items():
        if x is not None:
            x.normal_()
            if name in ("g", "gsum"):
                x.abs_().neg_()
    state.cursors.count.copy_(torch.arange(B, device="cuda") % layout.W + 1)
    gate = (B, layout.H, layout.K) if row.per_channel else (B, layout.H)
    shapes = {"q": (B, layout.G, layout.K), "k": (B, layout.G, layout.K), "v": (B, layout.H, layout.V), "b": (B, layout.H)}
    if row.stores_g:
        shapes["a"] = gate
    x = {name: torch.randn(layers, *shape, device="cuda", dtype=layout.act) for name, shape in shapes.items()}
    w = {"dt_bias": torch.randn(gate[1:], device="cuda"), "D": torch.randn(layout.H, device="cuda") if not row.delta else None}
    if row.stores_g:
        w["A"] = A[0].contiguous()
    return state, x, w


def cycle(state: ReplayState, x, w):
    """The work of one flush cycle: W steps of plan, every layer, commit."""
    B = x["q"].shape[1]
    slots = torch.arange(B, device="cuda", dtype=torch.int32)
    out = torch.empty(B, state.layout.H, state.layout.V, device="cuda", dtype=state.layout.act)

    def work() -> None:
        for _ in range(state.layout.W):
            plan = state.plan(slots)
            for layer in range(state.layers):
                state.step(layer, plan, **{name: t[layer] for name, t in x.items()}, **w, out=out)
            state.commit(plan)

    return work


def measure(
    name: str, B: int, ceiling: float, record: launch.Launch | None = None, layers: int = MODEL_LAYERS, **options
) -> dict:
    """One row: microseconds per layer and step, its byte floor and the share reached."""
    layout = Layout(**LAYERS[name], **options)
    chosen = launch.decode
    if record is not None:
        launch.decode = lambda layout, B: record
    try:
        state, x, w = prepare(layout, B, layers)
        us, spread = graph_us(cycle(state, x, w), replays=10)
    finally:
        launch.decode = chosen
    steps = layout.W * state.layers
    model = layout.step_bytes()
    bytes_ = B * (model.replay.total + model.io.total)
    floor = bytes_ / ceiling * 1e6
    return {
        "family": layout.recurrence.name,
        "layer": name,
        "batch": B,
        "T": 1,
        "W": layout.W,
        "state": layout.state,
        "read": None,
        "u": str(layout.u).removeprefix("torch."),
        "us": us / steps,
        "spread_us": spread / steps,
        "floor_us": floor,
        "bytes": bytes_,
        "share": floor / (us / steps),
        "launch": str(record or launch.decode(layout, B)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", nargs="*", default=list(LAYERS))
    parser.add_argument("--batch", nargs="*", type=int, default=[256])
    parser.add_argument("--sweep", action="store_true", help="a dozen launches per layer")
    parser.add_argument("--u", nargs="*", default=["float16"], help="dtypes of the readout helper")
    parser.add_argument("--out")
    args = parser.parse_args()
    head, rows = header(), []
    print(f"{head['device']}, read ceiling {head['read_ceiling'] / 1e12:.2f} TB/s", flush=True)
    for name, B, u in itertools.product(args.layer, args.batch, args.u):
        sweep = [launch.Launch(*record) for record in SWEEP] if args.sweep else [None]
        for record in sweep:
            try:
                row = measure(name, B, head["read_ceiling"], record, u=getattr(torch, u), layers=MODEL_LAYERS if B >= 64 else 2)
            except Exception as error:  # a candidate that does not compile is not a result
                print(f"{name} {B} {record}: {type(error).__name__}: {error}", flush=True)
                continue
            rows.append(row)
            figures = f"{row['us']:8.1f} us  floor {row['floor_us']:7.1f}  share {row['share']:.2f}"
            print(f"{name:28s} B {B:4d} u {u:9s} {figures}  {row['launch']}", flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"header": head, "rows": rows}, file, indent=1)


SWEEP = [(16, 64, 1, 3), (8, 64, 1, 3), (8, 128, 1, 3), (16, 32, 1, 3), (16, 64, 1, 4), (32, 64, 2, 3)]

if __name__ == "__main__":
    main()
