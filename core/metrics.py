"""What a state did, counted on the device and read on demand; as text in Prometheus' format.

Nothing here waits for the device but ``Meter.read``. What is counted follows from a plan's rows alone: a few small launches a
step, whatever the layers, which go into a CUDA graph with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .cursor import PLAN, Plan, flush_rule, phase
from .layout import Traffic
from .state import ReplayState


@dataclass(frozen=True)
class Counts:
    """Totals since the meter was made; of requests' rows, padding apart.

    Attributes:
        steps: rows that were stepped.
        tokens, accepted: they brought, and kept.
        flushes, forced: folds of a ring, and those of them that were forced rather than due.
        live: records that their readouts found.
        folded: records that folds took in, those of materializations apart.
        materializations, materialized: states written elsewhere, and the records folded for them.
    """

    steps: int
    tokens: int
    accepted: int
    flushes: int
    forced: int
    live: int
    folded: int
    materializations: int
    materialized: int


HELP = {
    "steps": "Rows stepped, padding apart.",
    "tokens": "Tokens of stepped rows.",
    "accepted": "Tokens kept.",
    "flushes": "Rings folded into their checkpoints.",
    "forced": "Flushes that were forced, not due.",
    "live": "Records found by readouts.",
    "folded": "Records folded by flushes.",
    "materializations": "States written elsewhere.",
    "materialized": "Records folded for states written elsewhere.",
    "bytes": "Bytes moved by steps, flushes and materializations of all layers, by the byte model, activations apart.",
}


class Meter:
    """Counts what a state does. The engine calls ``step`` once after each plan and ``materialize`` before each such call.

    Attributes:
        totals: [len(Counts)] int64 on the state's device.
    """

    def __init__(self, state: ReplayState) -> None:
        self.state = state
        self.totals = torch.zeros(len(Counts.__dataclass_fields__), dtype=torch.int64, device=state.device)

    def step(self, plan: Plan, accepted: Tensor | None = None) -> None:
        """Count a planned step.

        Args:
            accepted: [B] int, as ``ReplayState.commit`` takes it.
        """
        row = dict(zip(PLAN, plan.rows.long().unbind(1), strict=True))
        layout, live = self.state.layout, row["slot"] >= 0
        due = flush_rule(0, row["count"], row["t"], layout.W, phase(row["slot"], row["flushes"], layout.phases))
        flush, found = row["flush"], row["count"] * (row["t"] > 0)
        kept = row["t"] if accepted is None else accepted
        none = torch.zeros_like(flush)
        columns = (
            row["t"] > 0, row["t"], kept, flush, flush * ~due, (1 - flush) * found, flush * row["count"], none, none,
        )  # fmt: skip
        self.totals += torch.where(live, torch.stack([one.long() for one in columns]), 0).sum(1)

    def materialize(self, slots: Tensor, n: Tensor | None = None) -> None:
        """Count states that are about to be materialized.

        Args:
            slots, n: [B], as ``ReplayState.materialize`` takes them.
        """
        live = slots >= 0
        records = self.state.cursors.count[slots.long().clamp(min=0)] if n is None else n
        self.totals[-2:] += torch.where(live, torch.stack([torch.ones_like(slots).long(), records.long()]), 0).sum(1)

    def read(self) -> Counts:
        """The totals so far; waits for the device."""
        return Counts(*self.totals.tolist())

    def bytes(self, counts: Counts) -> Traffic:
        """Bytes of all layers that these counts moved, by the byte model, without activations."""
        layout, one = self.state.layout, counts
        stepped = layout.replay_bytes(one.steps, one.tokens, one.live, one.folded, one.flushes)
        mean = one.materialized / max(one.materializations, 1)
        elsewhere = layout.fold_traffic(mean, "fp32") * one.materializations
        total = Traffic(stepped.read + elsewhere.read, stepped.written + elsewhere.written)
        return total * self.state.layers


def prometheus(meters: Mapping[str, Meter]) -> str:
    """The meters' totals as text in Prometheus' format, one series a meter; waits for the device.

    Args:
        meters: by the value of the label ``state``.
    """
    read = {name: (meter, meter.read()) for name, meter in meters.items()}
    lines = []
    for field, about in HELP.items():
        metric = f"replayssm_{field}_total"
        lines += [f"# HELP {metric} {about}", f"# TYPE {metric} counter"]
        for name, (meter, counts) in read.items():
            label = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            if field == "bytes":
                moved = meter.bytes(counts)
                for way, value in (("read", moved.read), ("written", moved.written)):
                    lines.append(f'{metric}{{state="{label}",direction="{way}"}} {value:.0f}')
            else:
                lines.append(f'{metric}{{state="{label}"}} {asdict(counts)[field]}')
    return "\n".join(lines) + "\n"
