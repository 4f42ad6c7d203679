"""Endless streams of the training text with facts and questions woven in, as batches of token windows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from replayssm.integrations.transformers.presets import tokenizer
from replayssm.integrations.transformers.recall import Woven, weave

SHARES = {"austen": 0.4, "shakespeare": 0.1, "bible": 0.15, "psalms": 0.2, "henry": 0.1, "devil": 0.05}  # of the excerpts
EXCERPT = (16_384, 131_072)  # characters, log-uniform
EVERY = (40, 400)  # characters between facts, log-uniform over excerpts
DRILL = 0.5  # share of excerpts that are facts and questions alone, close to each other: what teaches to recall
LOSS_WEIGHTS = (1.0, 0.2, 4.0)  # of text, facts and questions, answers: names and letters of facts cannot be predicted


class Streams(IterableDataset):
    """Batches (tokens [B, T + 1] int64, weights [B, T] fp32); row b of a batch goes on where row b of the last one ended."""

    def __init__(self, folder: Path, rows: int, length: int, seed: int) -> None:
        self.folder, self.rows, self.length, self.seed = folder, rows, length, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        texts = {name: (self.folder / f"{name}.txt").read_text() for name in SHARES}
        weights = torch.tensor(LOSS_WEIGHTS)
        rows = [_windows(texts, random.Random(f"{self.seed} {row}"), self.length) for row in range(self.rows)]
        while True:
            tokens, kinds = zip(*(next(row) for row in rows), strict=True)
            yield torch.stack(tokens), weights[torch.stack(kinds)[:, 1:]]


def encode(woven: Woven) -> tuple[Tensor, Tensor]:
    """(tokens, kinds), int64 each: one token per ASCII character."""
    text = torch.frombuffer(bytearray(woven.text.encode("ascii")), dtype=torch.uint8)
    return _TOKENS[text.long()], torch.frombuffer(bytearray(woven.kinds), dtype=torch.uint8).long()


def _windows(texts: dict[str, str], chance: random.Random, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One row: windows of length + 1 tokens and their kinds, each beginning with the last one's last token."""
    tokens, kinds = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    while True:
        while len(tokens) <= length:
            more = encode(_excerpt(texts, chance))
            tokens, kinds = torch.cat([tokens, more[0]]), torch.cat([kinds, more[1]])
        yield tokens[: length + 1], kinds[: length + 1]
        tokens, kinds = tokens[length:], kinds[length:]


def _excerpt(texts: dict[str, str], chance: random.Random) -> Woven:
    if chance.random() < DRILL:
        return weave(["\n"] * chance.randrange(256, 2048), chance, every=1, longest=chance.choice((128, 512, 2048)))
    text = texts[chance.choices(list(SHARES), list(SHARES.values()))[0]]
    size = int(math.exp(chance.uniform(*map(math.log, EXCERPT))))
    start = text.find("\n", chance.randrange(max(1, len(text) - size))) + 1
    every = int(math.exp(chance.uniform(*map(math.log, EVERY))))
    return weave(text[start : start + size].splitlines(keepends=True), chance, every)


_TOKENS = torch.tensor([tokenizer().encode(chr(code))[0] for code in range(128)])
