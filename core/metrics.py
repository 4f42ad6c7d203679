"""What states did, counted on the device and read on demand; as text in Prometheus' format.

Nothing here waits for the device but ``Meter.read``. What is counted follows from plan rows and cursors alone: three tiny
launches a step, whatever the layers, which go into a CUDA graph with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .checks import forms
from .cursor import PLAN, Plan, flush_rule, phase
from .layout import Layout, Traffic
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
        materialized_bytes: written there, in one layer.
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
    materialized_bytes: int


AT = {name: i for i, name in enumerate(Counts.__dataclass_fields__)}
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


class Sample(NamedTuple):
    """One total: ``replayssm_<name>_total`` with these labels."""

    name: str
    labels: dict[str, str]
    value: float


class Meter:
    """Totals of what states of one layout did: ``Counted`` states add to them.

    Args:
        layout, layers, device: of the states.

    Attributes:
        totals: [len(Counts)] int64.
    """

    def __init__(self, layout: Layout, layers: int, device: torch.device | str) -> None:
        self.layout, self.layers = layout, layers
        self.totals = torch.zeros(len(AT), dtype=torch.int64, device=device)
        self._ready: dict[object, kernels.prepared.Prepared] = {}

    def add(self, rows: Tensor, **columns: Tensor) -> None:
        """Add the columns [B], by their names in Counts, of those rows [B] bool that count."""
        none = torch.zeros_like(rows, dtype=torch.int64)
        every = torch.stack([columns.get(name, none).to(torch.int64) for name in AT])
        self.totals += torch.where(rows, every, 0).sum(1)

    def plan(self, plan: Plan, backend: str) -> None:
        """Count a plan: its steps, and the flushes that it made."""
        if backend == "triton":
            B = plan.rows.shape[0]
            self._kept(B, lambda: kernels.count.plan(B, self.totals, AT, self.layout))(plan.rows)
            return
        row = _columns(plan)
        count, t, flush = row["count"], row["t"], row["flush"]
        due = flush_rule(0, count, t, self.layout.W, phase(row["slot"], row["flushes"], self.layout.phases))
        found = {"live": (1 - flush) * count * (t > 0), "folded": flush * count}
        self.add(row["slot"] >= 0, steps=t > 0, tokens=t, flushes=flush, forced=flush * ~due, **found)

    def commit(self, plan: Plan, pending: Tensor, accepted: Tensor | None, backend: str) -> None:
        """Count what a commit kept, where the plan was ``pending`` [S] before it."""
        if backend == "triton":
            B = plan.rows.shape[0]
            key = B, forms(accepted)
            self._kept(key, lambda: kernels.count.commit(B, self.totals, AT))(plan.rows, pending, accepted)
            return
        row = _columns(plan)
        live = (row["slot"] >= 0) & (pending[row["slot"].long().clamp(min=0)] == row["ticket"])
        self.add(live, accepted=row["t"] if accepted is None else accepted)

    def _kept(self, key: object, make: Callable[[], kernels.prepared.Prepared]) -> kernels.prepared.Prepared:
        if key not in self._ready:
            self._ready[key] = make()
        return self._ready[key]

    def read(self) -> Counts:
        """The totals so far; waits for the device."""
        return Counts(*self.totals.tolist())

    def bytes(self, counts: Counts) -> Traffic:
        """Bytes of all layers that these counts moved, by the byte model, without activations."""
        layout, one = self.layout, counts
        stepped = layout.replay_bytes(one.steps, one.tokens, one.live, one.folded, one.flushes)
        elsewhere = layout.state_bytes * one.materializations + layout.fold_bytes * one.materialized
        return Traffic(stepped.read + elsewhere, stepped.written + one.materialized_bytes) * self.layers

    def samples(self) -> list[Sample]:
        """The totals so far, as Prometheus is told of them; waits for the device."""
        counts = self.read()
        moved, found = self.bytes(counts), asdict(counts)
        ways = (("read", moved.read), ("written", moved.written))
        return [
            *(Sample(name, {}, found[name]) for name in HELP if name in found),
            *(Sample("bytes", {"direction": way}, value) for way, value in ways),
        ]


class Counted(ReplayState):
    """A ReplayState that counts what it does. Forced flushes are those that were not due, ``fold`` among them.

    Args:
        meter: what it adds to; states of one layout may share one. None makes one.
        args, kwargs: as ReplayState takes them.
    """

    def __init__(self, *args: Any, meter: Meter | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = Meter(self.layout, self.layers, self.device) if meter is None else meter

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """As of ReplayState: flushes happen here."""
        plan = super().plan(*args, **kwargs)
        self.meter.plan(plan, self.backend)
        return plan

    def commit(self, plan: Plan, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        """As of ReplayState: again counts nothing."""
        pending = self.cursors.pending.clone()
        super().commit(plan, accepted, path)
        self.meter.commit(plan, pending, accepted, self.backend)

    def fold(self, slots: Tensor) -> None:
        """As of ReplayState."""
        records, one = self._records(slots), torch.ones_like(slots)
        super().fold(slots)
        self.meter.add(slots >= 0, flushes=one, forced=one, folded=records)

    def materialize(self, slots: Tensor, n: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """As of ReplayState."""
        states = super().materialize(slots, n, *args, **kwargs)
        one = torch.ones_like(slots)
        size = states[0, 0].numel() * states.element_size()
        records = self._records(slots) if n is None else n
        self.meter.add(slots >= 0, materializations=one, materialized=records, materialized_bytes=one * size)
        return states

    def _records(self, slots: Tensor) -> Tensor:
        return self.cursors.count[slots.long().clamp(min=0)]


def _columns(plan: Plan) -> dict[str, Tensor]:
    return dict(zip(PLAN, plan.rows.unbind(1), strict=True))


def prometheus(meters: Mapping[str, Meter]) -> str:
    """The meters' totals as text in Prometheus' format, one series a meter; waits for the device.

    Args:
        meters: by the value of the label ``state``.
    """
    read = {name: meter.samples() for name, meter in meters.items()}
    lines = []
    for metric, about in HELP.items():
        lines += [f"# HELP replayssm_{metric}_total {about}", f"# TYPE replayssm_{metric}_total counter"]
        for state, samples in read.items():
            label = state.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            for name, labels, value in samples:
                if name == metric:
                    more = "".join(f',{key}="{one}"' for key, one in labels.items())
                    lines.append(f'replayssm_{metric}_total{{state="{label}"{more}}} {value:.0f}')
    return "\n".join(lines) + "\n"
