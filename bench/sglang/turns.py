"""Processes that share a GPU: all get ready at the same time, then one after another measures while the others wait."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Turns:
    """One process's place among them.

    Attributes:
        folder: where they meet; empty at first, the same for all.
        number: this process's.
        of: how many they are.
    """

    folder: str
    number: int
    of: int

    def ready(self) -> None:
        """This one is ready, or has failed and never will be."""
        (Path(self.folder) / f"ready-{self.number}").touch()

    def wait(self, poll_s: float = 0.1) -> None:
        """Until all are ready."""
        self.ready()
        while len(list(Path(self.folder).glob("ready-*"))) < self.of:
            time.sleep(poll_s)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other one is."""
        with (Path(self.folder) / "turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
