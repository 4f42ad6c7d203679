"""What a user wants of an engine, and what the engine is to be told: each integration's ``configuration`` translates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .layout import Layout
from .models import Model
from .schedule import best_window

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DRAFTS = ("mtp", "ngram")


@dataclass(frozen=True)
class Choice:
    """How a model's recurrent layers shall decode.

    Attributes:
        model: the whole one, before tensor parallelism.
        tokens, acceptance: of a request and step, and the probability that one after the first stays.
        drafts: where tokens after the first come from: the model's own heads ("mtp") or the text so far ("ngram").
        window: records that a ring holds; None: the window of least bytes.
        checkpoint, read: formats of the state and of the copy that readouts use, as Layout takes them.
        u: dtype of the delta rule's readout helper; None: as Layout decides.
    """

    model: Model
    tokens: int = 1
    acceptance: float = 0.75
    drafts: str = "mtp"
    window: int | None = None
    checkpoint: str = "fp32"
    read: str | None = None
    u: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("drafts", DRAFTS), ("u", (None, *DTYPES))):
            if getattr(self, name) not in known:
                names = ", ".join(one for one in known if one)
                raise ValueError(f"{name}: expected one of {names}, got {getattr(self, name)!r}")
        if self.u is not None and not self.model.recurrence.delta:
            raise ValueError(f"u: expected with the delta rule alone, got {self.u!r} for {self.model.recurrence.name}")
        if self.tokens < 1:
            raise ValueError(f"tokens: expected >= 1, got {self.tokens}")
        if self.window is not None and self.window < self.tokens:
            raise ValueError(f"window: expected at least the {self.tokens} tokens of a step, got {self.window}")
        if not 0 < self.acceptance <= 1:
            raise ValueError(f"acceptance: expected above 0, at most 1, got {self.acceptance}")

    def layout(self, most: int = 64) -> Layout:
        """One layer's layout; where no window was asked for, with that of least bytes up to ``most``.

        Raises:
            ValueError, NotImplementedError: what the core does not take, by name.
        """
        T, u = self.tokens, None if self.u is None else DTYPES[self.u]
        least = self.model.layout(W=T, T_max=T, conv=self.model.conv, state=self.checkpoint, read=self.read, u=u)
        best = best_window(least, range(1, most + 1), T, self.acceptance) if self.window is None else self.window
        return least.with_window(best)


@dataclass(frozen=True)
class Configuration:
    """What an engine is told.

    Attributes:
        form: how: command-line flags, a YAML file, or environment variables.
        settings: by flag, by key of the YAML, or by variable.
        notes: what else its user must know or do.
    """

    form: Literal["flags", "yaml", "environment"]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The settings as the engine takes them."""
        if self.form == "flags":
            return " ".join(self.flags)
        if self.form == "environment":
            return "\n".join(f"{name}={value}" for name, value in self.settings.items())
        import yaml

        return yaml.safe_dump(self.settings, sort_keys=False, default_flow_style=False).rstrip()

    @property
    def flags(self) -> list[str]:
        """The settings as arguments of a command."""
        return [word for name, value in self.settings.items() for word in (name, str(value))]
