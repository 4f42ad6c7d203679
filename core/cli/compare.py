"""Runs one model twice, with its own decoding and with ReplaySSM, speculating or not, and measures both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.generation import BaseStreamer

from ..integrations.transformers import Speculation, enable, speculation_of, state_of
from ..integrations.transformers.presets import book, pieces
from ..layout import Traffic
from .loading import load, named_device, named_dtype


@dataclass(frozen=True)
class Cost:
    """What one way of decoding costs.

    Attributes:
        read, written: state bytes per token of one request, all recurrent layers. transformers reads and writes the states of
            its cache; ReplaySSM's are means over whole windows, or with speculation those of the run.
        memory: state bytes that one request holds.
        milliseconds: wall time per token of each row, all rows at once, the prompt apart; None where nothing ran.
    """

    read: float
    written: float
    memory: int
    milliseconds: float | None


@dataclass(frozen=True)
class Drafted:
    """What speculation did in one run, and what it would have cost with a state snapshot per draft.

    Attributes:
        draft_tokens: most drafts of a step.
        steps, tokens, kept: forwards that took drafts, the tokens they read, and those that stayed.
        acceptance: tokens kept per step.
        snapshots_avoided: states, over all layers, that snapshots would have written.
        snapshots: the cost with them.
    """

    draft_tokens: int
    steps: int
    tokens: int
    kept: int
    acceptance: float
    snapshots_avoided: int
    snapshots: Cost


@dataclass(frozen=True)
class Result:
    """One model's comparison; positions count generated tokens from 0."""

    model: str
    family: str
    layers: int
    window: int
    state: str
    read: str | None
    u: str | None  # None without the delta rule
    device: str
    dtype: str
    prompt_tokens: list[int]
    new_tokens: int
    text: list[str]
    identical: bool
    first_difference: tuple[int, int] | None  # row, position
    logit_difference: float
    logit_difference_at: tuple[int, int]  # row, position; rows count up to their first different token
    smallest_margin: float  # top-1 logit over top-2, model's own decoding
    flushes: list[int]  # each request's, in every layer
    stock: Cost
    replay: Cost
    speculation: Drafted | None


@dataclass(frozen=True)
class Options:
    """Of ``replayssm run``, whose help says what each means."""

    prompt: str | None
    window: int
    state: str
    read: str | None
    u: str | None
    max_new_tokens: int
    batch: int
    device: str
    dtype: str
    speculate: str | None
    draft_tokens: int | None


@dataclass(frozen=True)
class Job:
    """A model that can run, with its inputs."""

    name: str
    model: hf.PreTrainedModel
    tokenizer: hf.PreTrainedTokenizerBase
    inputs: dict[str, Tensor]
    max_new_tokens: int
    dtype: str
    draft_tokens: int  # 0: no speculation
    replay: dict[str, Any]  # what ``enable`` takes


def prepare(name: str, options: Options) -> Job:
    """Load a model and check everything a run needs.

    Raises:
        ValueError, NotImplementedError, OSError: what cannot run, by name of the option.
    """
    of, text = options, book() if options.prompt is None else options.prompt
    for option, value in (("max-new-tokens", of.max_new_tokens), ("batch", of.batch)):
        if value < 1:
            raise ValueError(f"{option}: expected >= 1, got {value}")
    if not text:
        raise ValueError("prompt: expected text, got ''")
    drafts, number = _drafts(of), named_dtype(of.dtype)
    u = None if of.u is None else named_dtype(of.u, "u")
    replay = {"window": of.window, "state": of.state, "read": of.read, "u": u, "draft_tokens": drafts}
    model, tokenizer = load(name, number, named_device(of.device))
    with enable(model, **replay):  # what cannot be enabled is refused before anything runs
        if drafts and model._is_stateful:
            raise NotImplementedError(f"speculate: transformers has no assisted generation for {type(model).__name__}")
    batch_inputs = tokenizer(pieces(text, of.batch), return_tensors="pt", padding=of.batch > 1)
    inputs = {key: batch_inputs[key].to(model.device) for key in ("input_ids", "attention_mask")}
    return Job(name, model, tokenizer, inputs, of.max_new_tokens, of.dtype, drafts, replay)


def _drafts(of: Options) -> int:
    """Most drafts of a step; 0 without speculation."""
    if of.speculate is None:
        if of.draft_tokens is not None:
            raise ValueError("draft-tokens: expected with speculate, got it alone")
        return 0
    if of.speculate != "prompt-lookup":
        raise ValueError(f"speculate: expected prompt-lookup, got {of.speculate!r}")
    if of.batch > 1:
        raise ValueError(f"batch: expected 1 with speculate, as transformers' assisted generation takes it, got {of.batch}")
    if of.max_new_tokens < 2:
        raise ValueError(
            f"max-new-tokens: expected >= 2 with speculate, as the first follows the prompt, got {of.max_new_tokens}"
        )
    drafts = 4 if of.draft_tokens is None else of.draft_tokens
    if drafts < 1:
        raise ValueError(f"draft-tokens: expected >= 1, got {drafts}")
    return drafts


def compare(job: Job, advance: Callable[[int], None]) -> Result:
    """Generate twice, without drafts by the model's own decoding; ``advance`` takes the number of tokens that each made."""
    with enable(job.model, **job.replay) as enabled:
        replay, cache = _generate(job, advance, job.draft_tokens)
        flushes, speculation = state_of(cache).cursors.flushes.tolist(), speculation_of(cache)
    stock, stock_cache = _generate(job, advance)
    first, worst, worst_at, margin = _differences(stock, replay)
    layout, layers = enabled.layout, enabled.layers
    ours = speculation.replay_bytes if job.draft_tokens else layout.step_bytes().replay * layers
    held = _states(stock_cache)
    return Result(
        model=job.name,
        family=enabled.family,
        layers=layers,
        window=layout.W,
        state=layout.state,
        read=layout.read,
        u=str(layout.u).removeprefix("torch.") if layout.recurrence.delta else None,
        device=str(job.model.device),
        dtype=job.dtype,
        prompt_tokens=job.inputs["attention_mask"].sum(1).tolist(),
        new_tokens=stock.tokens.shape[1],
        text=job.tokenizer.batch_decode(replay.tokens, skip_special_tokens=True),
        identical=torch.equal(stock.tokens, replay.tokens),
        first_difference=first,
        logit_difference=worst,
        logit_difference_at=worst_at,
        smallest_margin=margin,
        flushes=flushes,
        stock=_cost(Traffic(held, held), held, stock.milliseconds),
        replay=_cost(ours, enabled.bytes_per_request, replay.milliseconds),
        speculation=_drafted(speculation, job.draft_tokens) if job.draft_tokens else None,
    )


def _drafted(of: Speculation, draft_tokens: int) -> Drafted:
    snapshots = _cost(of.snapshot_bytes, of.snapshot_memory, None)
    return Drafted(draft_tokens, of.steps, of.tokens, of.kept, of.acceptance, of.snapshots_avoided, snapshots)


def _cost(traffic: Traffic, memory: int, milliseconds: float | None) -> Cost:
    return Cost(traffic.read, traffic.written, memory, milliseconds)


def _states(cache: hf.Cache) -> int:
    """Bytes of one row's recurrent states in a cache of transformers' own."""
    states = (state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values())
    return sum(state[0].nbytes for state in states if state is not None)


class _Clock(BaseStreamer):
    """Notes when tokens came, and how many of each row: the prompt first."""

    def __init__(self, batch: int, advance: Callable[[int], None]) -> None:
        self.batch, self.advance = batch, advance
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        """Tokens [B] or [B, n]."""
        self.times.append(time.perf_counter())
        self.tokens.append(value.numel() // self.batch)
        if len(self.times) > 1:
            self.advance(self.tokens[-1])

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def milliseconds(self) -> float:
        """Per token of each row, after the first forward's, which hold the prompt's time."""
        tokens = sum(self.tokens[2:])
        return (self.times[-1] - self.times[1]) / max(tokens, 1) * 1e3


@dataclass(frozen=True)
class _Run:
    tokens: Tensor  # [B, N]
    logits: list[Tensor]  # N times [B, vocabulary]
    milliseconds: float


def _generate(job: Job, advance: Callable[[int], None], draft_tokens: int = 0) -> tuple[_Run, hf.Cache]:
    # Scores come from generate itself: prompt lookup also calls logits processors with made-up ones.
    options = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": True, "output_scores": True, **job.inputs}
    if draft_tokens:
        options["prompt_lookup_num_tokens"] = draft_tokens
    job.model.generate(**options, max_new_tokens=2)  # first calls pay for lazy initialisation and compilation
    batch, prompt = job.inputs["input_ids"].shape
    clock = _Clock(batch, advance)
    output = job.model.generate(**options, max_new_tokens=job.max_new_tokens, streamer=clock)
    logits = [scores.float().cpu() for scores in output.scores]
    return _Run(output.sequences[:, prompt:].cpu(), logits, clock.milliseconds), output.past_key_values


def _differences(stock: _Run, replay: _Run) -> tuple[tuple[int, int] | None, float, tuple[int, int], float]:
    """(first different token, largest logit difference, where, smallest top-1 margin); (row, position) each.

    A row's logits are compared up to its first different token: after it the two runs read different texts.
    """
    same = torch.ones(stock.tokens.shape[0], dtype=torch.bool)
    first, worst, worst_at, margin = None, 0.0, (0, 0), float("inf")
    for position, (ours, theirs) in enumerate(zip(replay.logits, stock.logits, strict=False)):
        gap = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).amax(1).where(same, 0.0)
        if float(gap.max()) > worst:
            worst, worst_at = float(gap.max()), (int(gap.argmax()), position)
        top = theirs.topk(2, dim=1).values
        margin = min(margin, float((top[:, 0] - top[:, 1]).min()))
        different = same & (stock.tokens[:, position] != replay.tokens[:, position])
        if first is None and bool(different.any()):
            first = (int(different.int().argmax()), position)
        same &= ~different
    return first, worst, worst_at, margin
