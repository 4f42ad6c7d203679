"""What a run of SGLang takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens to generate, greedily.

    Attributes:
        at: the scheduler's iteration that finds it in the queue.
        logits: whether the answer tells how likely tokens were.
        reserved: whether memory for all tokens is kept for it from the start; else requests may be retracted.
    """

    prompt: Sequence[int]
    tokens: int
    at: int = 0
    logits: bool = True
    reserved: bool = False


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        tokens: as generated.
        likeliest: per token the two largest log-probabilities, in descending order.
        cached: tokens of the prompt that the prefix cache had.
        retracted: how often it was put back into the queue.
    """

    tokens: list[int] = field(default_factory=list)
    likeliest: list[list[float]] = field(default_factory=list)
    cached: int = 0
    retracted: int = 0
