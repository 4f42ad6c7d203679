"""Launch records: how a kernel is launched, and the user's own file of what `replayssm tune` measured on their GPU.

Only launches that read out are recorded, of decode and verify: the bits of a state do not depend on this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from .layout import Layout

VARIABLE = "REPLAYSSM_LAUNCHES"


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched.

    Attributes:
        BLOCK_V, BLOCK_K: the state tile a program holds at once; BLOCK_K is the chunk of K.
        warps, stages: Triton's num_warps and software pipeline depth.
        SPLIT: programs that share one head's V.
    """

    BLOCK_V: int
    BLOCK_K: int
    warps: int = 1
    stages: int = 3
    SPLIT: int = 1

    def check(self, layout: Layout) -> None:
        """Raise ValueError unless the layout's heads divide into such tiles."""
        for name, size in asdict(self).items():
            if size < 1 or (size & (size - 1) and name != "stages"):
                raise ValueError(f"{name}: expected a power of two, got {size}")
        if layout.V % (self.BLOCK_V * self.SPLIT):
            raise ValueError(
                f"BLOCK_V, SPLIT: expected a product that divides V = {layout.V}, got {self.BLOCK_V}, {self.SPLIT}"
            )
        if layout.K // layout.packed % self.BLOCK_K:
            raise ValueError(f"BLOCK_K: expected a divisor of {layout.K // layout.packed}, got {self.BLOCK_K}")


@dataclass(frozen=True)
class Record:
    """A measured launch.

    Attributes:
        device: name of the GPU.
        op: "decode" or "verify".
        sizes: of the layer, as ``sizes`` makes them.
        batch: requests of the step; it counts from there to the next record's.
        us, rule_us: microseconds of a layer's step so, and as the rule would have it.
        about: date, software, tokens and window of the measurement.
    """

    device: str
    op: str
    sizes: str
    batch: int
    launch: Launch
    us: float
    rule_us: float
    about: str

    @property
    def measured(self) -> tuple[str, str, str, int]:
        """What a newer record replaces."""
        return self.device, self.op, self.sizes, self.batch


def sizes(layout: Layout) -> str:
    """What of a layout a launch is measured for: all but window and ring."""
    dims = " ".join(f"{name}{getattr(layout, name)}" for name in "HGVK")
    dtypes = f"act {layout.act} u {layout.u if layout.recurrence.delta else 'none'}".replace("torch.", "")
    return f"{layout.recurrence.name} {dims} state {layout.state} read {layout.read or 'none'} {dtypes}"


def path() -> Path:
    """The user's file: REPLAYSSM_LAUNCHES, or launches.json in the folder replayssm of their configuration."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "replayssm/launches.json"


def read(file: Path) -> list[Record]:
    """The records of a file; none where there is no file.

    Raises:
        ValueError: a file that is something else.
    """
    if not file.is_file():
        return []
    try:
        rows = json.loads(file.read_text())["records"]
        return [Record(**row | {"launch": Launch(**row["launch"])}) for row in rows]
    except (ValueError, KeyError, TypeError) as failed:
        raise ValueError(f"{VARIABLE}: expected records of `replayssm tune` in {file}: {failed!r}") from None


def add(file: Path, records: Sequence[Record]) -> None:
    """Write the records to the file, in place of those of the same device, layer and batch."""
    newer = {record.measured for record in records}
    every = [record for record in read(file) if record.measured not in newer] + list(records)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({"records": [asdict(record) for record in every]}, indent=1) + "\n")
    beside.replace(file)  # another process may be reading


def find(op: str, layout: Layout, B: int) -> Launch | None:
    """The launch recorded for this GPU, layer and the nearest batch not above B, else the smallest batch; None: none."""
    table = _table()
    if not table or not torch.cuda.is_available():
        return None
    by_batch = table.get((torch.cuda.get_device_name(), op, sizes(layout)))
    if not by_batch:
        return None
    found = by_batch[max((batch for batch in by_batch if batch <= B), default=min(by_batch))]
    try:
        found.check(layout)
    except ValueError as wrong:
        raise ValueError(f"{VARIABLE}: {op} of {sizes(layout)} in {path()}: {wrong}") from None
    return found


def forget() -> None:
    """The file is read again when a launch is next asked for."""
    _table.cache_clear()


@lru_cache(maxsize=1)
def _table() -> dict[tuple[str, str, str], dict[int, Launch]]:
    table: dict[tuple[str, str, str], dict[int, Launch]] = {}
    for record in read(path()):
        table.setdefault((record.device, record.op, record.sizes), {})[record.batch] = record.launch
    return table
