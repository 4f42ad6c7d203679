"""Number formats to be measured: of the checkpoint, of the read copy and of the readout helper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayssm import Layout
from replayssm.formats import named
from replayssm.models import Model

U = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Formats of one layer, as Layout takes them; u None: the layout's own choice."""

    state: str = "fp32"
    read: str | None = None
    u: str | None = None

    @staticmethod
    def parse(formats: Sequence[str], u: Sequence[str] = ()) -> list[Precision]:
        """Every "STATE" or "STATE/READ" of ``formats`` with every helper of ``u``.

        Raises:
            ValueError, NotImplementedError: a format that there is not, by name.
        """
        for helper in u:
            if helper not in U:
                raise ValueError(f"u: expected one of {', '.join(U)}, got {helper!r}")
        found = []
        for text in formats:
            state, _, read = text.partition("/")
            named(state)
            if read:
                named(read, "read")
            found += [Precision(state, read or None, helper) for helper in u or (None,)]
        return found

    def layout(self, model: Model, W: int, T_max: int = 1) -> Layout:
        """One of the model's layers in these formats; only the delta rule has a helper."""
        helper = U[self.u] if self.u and model.recurrence.delta else None
        return model.layout(W=W, T_max=T_max, state=self.state, read=self.read, u=helper)
