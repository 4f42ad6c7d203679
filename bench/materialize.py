"""The exact states of some requests, all layers: into a buffer, as a prefix cache wants them, and in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from replayssm import Layout, launch

from .contest import Ours, drive, oracle
from .decode import layers
from .timing import graph_us
from .work import MODELS, Work, cold_groups

BATCHES = (256, 64, 16, 1)
COUNTS = (0, 4, 8, 16)
# Of states after a fold in that format.
ERROR_BOUND = {
    "fp32": 1e-5,
    "fp16": 2e-3,
    "fp16+sr": 2e-3,
    "bf16": 2e-2,
    "int8": 3e-2,
    "e4m3": 0.1,
    "e4m3+sr": 0.1,
    "nvfp4": 0.3,
}
OPERATIONS = ("materialize", "fold")


def error(layout: Layout, B: int = 3, device: str = "cuda") -> dict[str, float]:
    """Relative errors against the fp64 oracle of states materialized, and folded, with a window half full."""
    work = Work(layout, 1, B, steps=layout.W // 2, entries=layout.W // 2, staggered=False, device=device)
    ours = Ours(work)
    for _ in drive(ours, lambda i, layer: i, settle=False):
        pass
    _, truth = oracle(work)
    found = {"materialize": ours.state.materialize(work.slots[0])[0]}
    ours.state.fold(work.slots[0])
    found["fold"] = ours.state.materialize(work.slots[0])[0]
    return {name: float((states.double() - truth).norm() / truth.norm()) for name, states in found.items()}


def runs(ours: Ours, count: int) -> dict[str, Callable[[], None]]:
    """Per operation what one graph holds: every group of requests once. Cursors are set in it, as a fold moves them."""
    work, state = ours.work, ours.state
    layout = work.layout
    states = torch.empty(work.layers, work.slots.numel(), layout.H, layout.V, layout.K, device=work.device)
    counts = torch.full_like(state.cursors.count, count)

    def materialize() -> None:
        for slots in work.slots:
            state.materialize(slots, target=states, to_slots=slots)

    def fold() -> None:
        state.cursors.count.copy_(counts)
        for slots in work.slots:
            state.fold(slots)

    state.cursors.count.copy_(counts)
    return {"materialize": materialize, "fold": fold}


def measure(name: str, B: int, state: str, W: int, counts: Sequence[int], ceiling: float, replays: int) -> Iterator[dict]:
    """Rows of one layer and batch: both operations at every count."""
    model = MODELS[name]
    layout = model.layout(W=W, state=state)
    materialized = layout.fold_traffic(0, "fp32").written
    n = layers(model, layout, B, 1 + -(-materialized // layout.state_bytes))
    ours = Ours(Work(layout, n, B, groups=cold_groups(layout, n, B), steps=1))
    for count in counts:
        for operation, run in runs(ours, count).items():
            us, spread = (time / ours.work.groups for time in graph_us(run, replays))
            total = B * n * layout.fold_traffic(count, "fp32" if operation == "materialize" else None).total
            floor = total / ceiling * 1e6
            yield {
                "family": layout.recurrence.name,
                "layer": name,
                "op": operation,
                "batch": B,
                "count": count,
                "W": W,
                "state": state,
                "read": None,
                "us": us,
                "spread_us": spread,
                "floor_us": floor,
                "bytes": total,
                "share": floor / us,
                "layers": n,
                "launch": str(launch.materialize(layout)),
            }


def rows(
    names: Sequence[str],
    batches: Sequence[int],
    states: Sequence[str],
    W: int,
    counts: Sequence[int],
    ceiling: float,
    replays: int,
    checks: dict[str, dict[str, float]],
) -> Iterator[dict]:
    """Rows of every layer, state format, batch and count; ``checks`` gathers the errors.

    Raises:
        RuntimeError: our own states are wrong.
    """
    for name in names:
        for state in states:
            layout = MODELS[name].layout(W=W, state=state)
            found = checks[f"{name}, {state}"] = error(layout)
            if not max(found.values()) < ERROR_BOUND[state]:
                raise RuntimeError(f"{name}, state {state}: our own states are off by {found}")
            for B in batches:
                yield from measure(name, B, state, W, counts, ceiling, replays)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
