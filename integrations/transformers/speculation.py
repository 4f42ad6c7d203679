"""What assisted generation did with a cache, in tokens, states and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import Layout
from ...layout import Traffic


@dataclass(frozen=True)
class Speculation:
    """The steps of one cache whose tokens could be taken back. Figures are those of the first row, over all recurrent layers.

    The snapshots meant here are how rollback is done otherwise: every token of a step writes a state of its own.

    Attributes:
        layout, layers: of the model.
        steps: how many; with drafts from the first forward on, its drafts are a step too, without the prompt before them.
        tokens: that these steps read: known tokens and drafts.
        kept: of these tokens, what the text goes on from.
        live, folded, flushes: records that readouts found in the ring, those that flushes folded instead, and flushes.
    """

    layout: Layout
    layers: int
    steps: int = 0
    tokens: int = 0
    kept: int = 0
    live: int = 0
    folded: int = 0
    flushes: int = 0

    def and_a_step(self, tokens: int, kept: int, count: int, flush: int) -> Speculation:
        """These steps and one more, which found `count` records in the ring and folded them if flush is 1."""
        return replace(
            self,
            steps=self.steps + 1,
            tokens=self.tokens + tokens,
            kept=self.kept + kept,
            live=self.live + count * (1 - flush),
            folded=self.folded + count * flush,
            flushes=self.flushes + flush,
        )

    @property
    def acceptance(self) -> float:
        """Acceptance length: tokens kept per step; NaN before the first step."""
        return self.kept / self.steps if self.steps else float("nan")

    @property
    def snapshots_avoided(self) -> int:
        """States that snapshots would have written; ReplaySSM writes one per layer and flush."""
        return self.tokens * self.layers

    @property
    def replay_bytes(self) -> Traffic:
        """State bytes read and written per token kept; NaN before the first."""
        return self._per_token(self.layout.replay_bytes(self.steps, self.tokens, self.live, self.folded, self.flushes))

    @property
    def snapshot_bytes(self) -> Traffic:
        """The same with snapshots: a step reads a state and writes one per token."""
        S = self.layout.state_bytes
        return self._per_token(Traffic(S * self.steps, S * self.tokens))

    def _per_token(self, traffic: Traffic) -> Traffic:
        return traffic * (self.layers / self.kept if self.kept else float("nan"))

    @property
    def replay_memory(self) -> int:
        """State bytes held: checkpoint and ring."""
        return self.layout.slot_bytes * self.layers

    @property
    def snapshot_memory(self) -> int:
        """The same with snapshots: 1 + T states for the T tokens of the longest step."""
        return self.layout.snapshot_bytes() * self.layers
