"""Facts stated in a text and asked for later: a task whose answers can be checked at any position of an endless stream."""

from __future__ import annotations

import heapq
import math
import random
import string
from collections.abc import Iterable
from typing import NamedTuple

TEXT, TASK, ANSWER = range(3)  # what a character is: of the text, of a fact or question, of the answer to one


class Question(NamedTuple):
    """One question: where its answer, a letter, stands, and how many characters before it the fact's stood."""

    answer: int
    distance: int


class Woven(NamedTuple):
    """A text with facts and questions between its lines."""

    text: str
    kinds: bytes  # per character: TEXT, TASK or ANSWER
    questions: list[Question]


def weave(lines: Iterable[str], chance: random.Random, every: int = 200, longest: int = 4096) -> Woven:
    """State a fact, ``[ko:q]``, about every ``every`` characters, and ask for each once, ``[ko?q]``.

    Args:
        lines: of a text without square brackets, line ends included.
        longest: of the distances, which are log-uniform from 32 on and end at the next line.
    """
    pieces: list[str] = []
    kinds: list[bytes] = []
    questions: list[Question] = []
    due: list[tuple[float, str, str, int]] = []
    at = 0

    def add(text: str, kind: int) -> None:
        nonlocal at
        pieces.append(text)
        kinds.append(bytes([kind]) * len(text))
        at += len(text)

    for line in lines:
        add(line, TEXT)
        while due and due[0][0] <= at:
            _, name, letter, stated = heapq.heappop(due)
            add(f"[{name}?", TASK)
            questions.append(Question(at, at - stated))
            add(letter, ANSWER)
            add("]\n", TASK)
        if chance.random() * every < len(line):
            name, letter = "".join(chance.choices(string.ascii_lowercase, k=2)), chance.choice(string.ascii_lowercase)
            if any(name == other for _, other, _, _ in due):
                continue
            add(f"[{name}:", TASK)
            heapq.heappush(due, (at + math.exp(chance.uniform(math.log(32), math.log(longest))), name, letter, at))
            add(f"{letter}]\n", TASK)
    return Woven("".join(pieces), b"".join(kinds), questions)
