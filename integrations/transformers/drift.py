"""How far decoding with a stored state's number format drifts from a conventional fp32 state, over long texts.

One model reads the same texts once per format, side by side in a batch: its dense layers, attention and convolutions see every
row; each format's rows hold their recurrent states in a ReplayState of their own (``lanes.py``). The text is given, never
generated, so that what differs at a position is the state alone.
"""

from __future__ import annotations

import inspect
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticSlidingWindowLayer

from ... import Layout
from . import window as sliding
from .enable import enable
from .lanes import Lanes
from .recall import weave

FORMATS = (
    "fp32", "bf16", "fp16", "fp16+sr", "int8", "e4m3", "e4m3+sr", "nvfp4",
    "fp32/int8", "fp32/e4m3", "fp32/nvfp4", "fp16+sr/e4m3", "fp16+sr/nvfp4", "e4m3+sr/nvfp4",
)  # fmt: skip
WARM_UP = 3  # steps before the graph is captured: kernels compile and libraries make their workspaces
UNFIT = 1.1  # a conventional loss this many times the first bucket's: the model itself does not bear the length


class Texts(NamedTuple):
    """Texts side by side, with facts to recall.

    Attributes:
        tokens: [B, N + 1] int64; the last ones are predicted only.
        answers: (row, first, last) of each answer's tokens.
    """

    tokens: Tensor
    answers: list[tuple[int, int, int]]


def texts(text: str, tokenizer: Any, rows: int, length: int) -> Texts:
    """`rows` equal parts of a text, woven with facts and questions (``recall.weave``), as `length` + 1 tokens each.

    Raises:
        ValueError: too short a text; NotImplementedError: a tokenizer that cannot say which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise NotImplementedError(f"model: supported are fast tokenizers, which know offsets, got {type(tokenizer).__name__}")
    lines = text.translate(str.maketrans("[]", "()")).splitlines(keepends=True)
    share, tokens, answers = len(lines) // rows, [], []
    for row in range(rows):
        part = weave(lines[row * share : (row + 1) * share], random.Random(row))
        coded = tokenizer(part.text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        starts, ends = zip(*coded["offset_mapping"], strict=True) if coded["offset_mapping"] else ((), ())
        tokens.append(coded["input_ids"][: length + 1])
        spans = ((bisect_right(ends, at), bisect_left(starts, at + 1) - 1) for at, _ in part.questions)
        answers += [(row, first, last) for first, last in spans if last <= length]
    shortest = min(map(len, tokens)) - 1
    if shortest < length:
        raise ValueError(
            f"length: expected at most {max(shortest, 0)}, as many tokens as the text has in {rows} equal parts, got {length}; "
            "give a longer text or fewer texts"
        )
    return Texts(torch.tensor(tokens), answers)


def layouts(formats: Sequence[str], of: Layout) -> list[Layout]:
    """The layouts of formats ``state`` or ``state/read``.

    Raises:
        ValueError, NotImplementedError: no format, one twice, or one that this layer cannot be stored in.
    """
    if not formats or len(set(formats)) < len(formats):
        raise ValueError(f"formats: expected at least one, each once, got {list(formats)}")
    parts = (name.partition("/") for name in formats)
    # Not staggered: rows of equal texts fold on equal steps.
    return [replace(of, state=state, read=read if slash else None, stagger=False) for state, slash, read in parts]


def buckets(begin: int, length: int) -> list[tuple[int, int]]:
    """Ranges of positions from `begin` to `length` whose ends double, at most eight: the last ends at `length`."""
    end = 64
    while 128 * end < length:
        end *= 2
    found = []
    while begin < length:
        if end > begin:
            found.append((begin, min(end, length)))
            begin = found[-1][1]
        end *= 2
    return found


@dataclass(frozen=True)
class Drift:
    """One model's drift.

    Attributes:
        rows: per format and bucket of positions [low, high): divergence of the next token's distribution from the
            conventional run's in nats (`kl_mean`, `kl_p99`), how often both find the same token likeliest (`top1`), the
            format's own `loss` in nats per token, the share of answers whose tokens all were likeliest (`recall`; None
            without one), and after the bucket the relative error of each layer's state against fp64 (`state_error`).
        conventional: the same of the conventional fp32 run, as far as it applies, and the number of `answers`.
        prompt: tokens of each text that were read in one forward, before the first position.
        graph: whether a CUDA graph was replayed.
    """

    rows: list[dict[str, Any]]
    conventional: list[dict[str, Any]]
    prompt: int
    graph: bool


def fit(conventional: Sequence[dict[str, Any]]) -> bool:
    """Whether one model's conventional run stays sound: no bucket's loss is 10 % above the first's."""
    losses = [row["loss"] for row in conventional]
    return all(loss is not None and loss <= UNFIT * losses[0] for loss in losses)


def check(model: nn.Module, of: Texts, formats: Sequence[str], window: int) -> None:
    """Raise ValueError or NotImplementedError, by name, for what ``measure`` could not read."""
    with enable(model, window=window) as enabled:
        layouts(formats, enabled.layout)
    prompt, length = prompt_tokens(model, window), of.tokens.shape[1] - 1
    if prompt >= length:
        raise ValueError(f"length: expected more than the {prompt} tokens of the prompt, got {length}")


def prompt_tokens(model: nn.Module, window: int) -> int:
    """How many tokens the first forward reads: as many as attention sees where it has a window, and at least `window`."""
    return max(window, model.config.sliding_window) if model.config._attn_implementation == sliding.NAME else window


@torch.no_grad()
def measure(
    name: str,
    model: nn.Module,
    of: Texts,
    formats: Sequence[str],
    window: int = 16,
    backend: str | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Drift:
    """Read the texts with every format.

    Args:
        name: of the model, for the rows.
        model: a transformers model that ``enable`` takes; it is enabled for the while.
        of: the texts, which begin with the prompt.
        formats: ``state`` or ``state/read``, as ``Layout`` names them.
        window: records a ring holds.
        backend: as ReplayState takes it.
        advance: called with the number of positions done since.

    Raises:
        ValueError, NotImplementedError: as of ``check``, or formats that the device's kernels do not know.
    """
    check(model, of, formats, window)
    with enable(model, window=window, backend=backend) as enabled:
        lanes = Lanes(model, layouts(formats, enabled.layout), len(of.tokens), backend)
        reader = Reader(model, lanes, of.tokens)
        reader.read_prompt(prompt_tokens(model, window))
        step, left, errors = reader.step, WARM_UP, []
        every = buckets(reader.prompt, reader.length)
        for low, high in every:
            for _ in range(low, high):
                if left == 0 and reader.steady:
                    step = captured(step, reader.at.device)
                left -= 1
                step()
                advance(1)
            errors.append(lanes.errors().cpu())
    return Drift(*_summaries(name, formats, reader.kept, of, every, errors), reader.prompt, step != reader.step)


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays one step's kernels as a CUDA graph; the step itself does not run here."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        step()
    return graph.replay


class Kept(NamedTuple):
    """Statistics [lanes, B, N] of every position: divergence, whether the likeliest tokens agree, loss, right."""

    kl: Tensor
    same: Tensor
    loss: Tensor
    right: Tensor


class Reader:
    """Reads given texts token by token, every lane the same, and keeps statistics on the device: no step waits for it.

    Attributes:
        prompt: tokens that the first forward reads.
        steady: whether all steps after the prompt are the same work, at the same addresses, for a CUDA graph.
        kept: the statistics; zero at positions not read yet.
    """

    def __init__(self, model: nn.Module, lanes: Lanes, tokens: Tensor) -> None:
        self.model, self.lanes, self.prompt = model, lanes, 0
        parameter = next(model.parameters())
        self.tokens, self.length = tokens.to(parameter.device), tokens.shape[1] - 1
        self.at = torch.zeros(1, dtype=torch.long, device=parameter.device)
        shape = (len(lanes.lanes), len(tokens), self.length)
        kinds = (torch.float64, torch.bool, torch.float64, torch.bool)
        self.kept = Kept(*(torch.zeros(shape, dtype=kind, device=parameter.device) for kind in kinds))
        self.cache, self.windowed = _cache(model)
        names = inspect.signature(type(model).forward).parameters
        self.cache_name = "past_key_values" if "past_key_values" in names else "cache_params"
        lanes.attach(self.cache)
        self.steady = self.windowed and parameter.is_cuda

    def read_prompt(self, tokens: int) -> None:
        """The first forward, of that many tokens of every row."""
        self._forward(self.tokens[:, :tokens])
        self.prompt = tokens
        self.at.fill_(tokens)

    def step(self) -> None:
        """One token of every row, the next one's statistics, and the position moved on."""
        logits = self._forward(self.tokens.index_select(1, self.at), **self._steady_arguments())
        log_p = logits[:, -1].double().log_softmax(-1).unflatten(0, self.kept.kl.shape[:2])  # [lanes, B, vocabulary]
        best, target = log_p.argmax(-1), self.tokens.index_select(1, self.at + 1)
        now = Kept(
            kl=(log_p[0].exp() * (log_p[0] - log_p)).sum(-1),
            same=best == best[0],
            loss=-log_p.gather(-1, target.expand(len(log_p), -1, -1))[..., 0],
            right=best == target[:, 0],
        )
        for kept, value in zip(self.kept, now, strict=True):
            kept.index_copy_(2, self.at, value[..., None])
        self.at += 1

    def _forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        cache = {self.cache_name: self.cache}
        return self.model(tokens.repeat(len(self.lanes.lanes), 1), use_cache=True, **cache, **kwargs).logits

    def _steady_arguments(self) -> dict[str, Any]:
        """Positions on the device, and no masks where attention sees exactly what its cache holds."""
        if not self.windowed:
            return {}
        rows = self.kept.kl.shape[0] * self.kept.kl.shape[1]
        masks = {"full_attention": None, "linear_attention": None}
        return {"position_ids": self.at.expand(rows, 1), "attention_mask": masks}


class _Window(StaticSlidingWindowLayer):
    """transformers' own, once full without the tensor made on the host that no CUDA graph can capture."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One token's keys and values in the oldest ones' place, at the end; as in transformers until then."""
        if key_states.shape[-2] > 1 or self.cumulative_length_int < self.max_cache_len:
            return super().update(key_states, value_states, *args, **kwargs)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.copy_(torch.cat([held[:, :, 1:], new], 2))
        self.cumulative_length_int += 1
        return self.keys, self.values


def _cache(model: nn.Module) -> tuple[DynamicCache, bool]:
    """An empty cache, and whether its attention layers all hold a window of the last tokens."""
    cache = DynamicCache(config=model.config)
    if model.config._attn_implementation != sliding.NAME:
        return cache, False
    size = model.config.sliding_window
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _Window(size, size)
    return cache, any(isinstance(layer, _Window) for layer in cache.layers)


def _summaries(
    name: str, formats: Sequence[str], kept: Kept, of: Texts, every: list[tuple[int, int]], errors: list[Tensor]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, conventional) of a Drift."""
    kept = Kept(*(x.cpu() for x in kept))
    rows, conventional = [], []
    for (low, high), error in zip(every, errors, strict=True):
        inside = [(row, first - 1, last) for row, first, last in of.answers if low <= first - 1 < high]
        for lane, format in enumerate(["", *formats]):
            kl, same, loss, right = (x[lane, :, low:high] for x in kept)
            hits = [bool(kept.right[lane, row, first:last].all()) for row, first, last in inside]
            common = {
                "position": [low, high],
                "loss": _number(loss.mean()),
                "recall": sum(hits) / len(hits) if hits else None,
                "state_error": [_number(x) for x in error[lane]],
            }
            if lane == 0:
                conventional.append({"model": name, **common, "answers": len(hits)})
                continue
            state, _, read = format.partition("/")
            rows.append({
                "model": name, "format": format, "state": state, "read": read or None, **common,
                "kl_mean": _number(kl.mean()), "kl_p99": _number(torch.quantile(kl.flatten(), 0.99)),
                "top1": _number(same.double().mean()),
            })  # fmt: skip
    return rows, conventional


def _number(x: Tensor) -> float | None:
    """As JSON knows numbers: None where it is not finite."""
    return float(x) if math.isfinite(float(x)) else None
