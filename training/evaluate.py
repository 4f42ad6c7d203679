"""Loss and recall of a model over long held-out streams, by position and by distance."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.integrations.transformers.recall import TEXT, weave

from .carry import carried
from .streams import encode

ROWS, CHUNK = 4, 2048


@torch.no_grad()
def evaluate(model: nn.Module, book: Path, device: str, length: int, rows: int = ROWS) -> dict:
    """Teacher-forced over `rows` parts of a book, woven with facts; state goes on from the first token to the last.

    Returns:
        "loss": nats per byte of text, by position; "recall": answers that come first, by position and by
        distance; keys are upper ends.
    """
    lines = book.read_text().splitlines(keepends=True)
    share = len(lines) // rows
    parts = [weave(lines[i * share : (i + 1) * share], random.Random(i)) for i in range(rows)]
    length = min(length, *(len(part.text) - 1 for part in parts))
    both = [encode(part) for part in parts]
    tokens = torch.stack([one[: length + 1] for one, _ in both]).to(device)
    kinds = torch.stack([kind[1 : length + 1] for _, kind in both])
    loss, hit = (x.cpu() for x in _forced(model, tokens))
    positions = torch.arange(length).expand(rows, -1)
    text = kinds == TEXT
    answers = [(row, at - 1, distance) for row, part in enumerate(parts) for at, distance in part.questions if at < length]
    if not answers:
        raise ValueError(f"length: expected enough tokens for a question, got {length}")
    row, at, distance = (torch.tensor(x) for x in zip(*answers, strict=True))
    right = hit[row, at].float()
    return {
        "tokens": rows * length,
        "loss": _by(positions[text], loss[text], length),
        "recall": {"position": _by(at, right, length), "distance": _by(distance, right, int(distance.max()) + 1)},
    }


def _forced(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy, whether the token was the likeliest), [B, T] each, of all tokens but the first."""
    cache, losses, hits = carried(model.config), [], []
    for at in range(0, tokens.shape[1] - 1, CHUNK):
        chunk = tokens[:, at : at + CHUNK + 1]
        logits = model(chunk[:, :-1], past_key_values=cache, use_cache=True).logits.float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), chunk[:, 1:], reduction="none"))
        hits.append(logits.argmax(-1) == chunk[:, 1:])
    return torch.cat(losses, 1), torch.cat(hits, 1)


def _by(where: Tensor, values: Tensor, end: int) -> dict[str, float]:
    """Means of values by `where`, in ranges that double from 64 on."""
    means, low, high = {}, 0, 64
    while low < end:
        inside = (where >= low) & (where < high)
        if bool(inside.any()):
            means[str(min(high, end))] = round(float(values[inside].mean()), 4)
        low, high = high, 2 * high
    return means
