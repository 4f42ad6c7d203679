"""Runs one model twice, with its own decoding and with ReplaySSM, and measures both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor

from ..integrations.transformers import enable, state_of
from ..integrations.transformers.presets import PRESETS, book, build, pieces
from ..layout import Traffic

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cost:
    """What one way of decoding costs.

    Attributes:
        read, written: state bytes per token of one request, all recurrent layers, averaged over whole windows.
        memory: state bytes that one request holds.
        milliseconds: wall time per decode step of the whole batch, the prompt apart.
    """

    read: float
    written: float
    memory: int
    milliseconds: float


@dataclass(frozen=True)
class Result:
    """One model's comparison; positions count generated tokens from 0."""

    model: str
    family: str
    layers: int
    window: int
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


@dataclass(frozen=True)
class Job:
    """A model that can run, with its inputs."""

    name: str
    model: hf.PreTrainedModel
    tokenizer: hf.PreTrainedTokenizerBase
    inputs: dict[str, Tensor]
    window: int
    max_new_tokens: int
    dtype: str


def prepare(name: str, prompt: str | None, window: int, max_new_tokens: int, batch: int, device: str, dtype: str) -> Job:
    """Load a model and check everything a run needs.

    Raises:
        ValueError, NotImplementedError, OSError: what cannot run, by name of the option.
    """
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    for option, value in (("max-new-tokens", max_new_tokens), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{option}: expected >= 1, got {value}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if prompt == "":
        raise ValueError("prompt: expected text, got ''")
    where = _device(device)
    if name in PRESETS:
        torch.set_num_threads(1)  # their tensors are too small to share: on a busy machine two threads are many times slower
        model, tokenizer = build(name)
        model = model.to(DTYPES[dtype])
    else:
        model, tokenizer = _checkpoint(name, DTYPES[dtype])
    model = model.to(where).eval()
    with enable(model, window=window):
        pass  # what cannot be enabled is refused before anything runs
    batch_inputs = tokenizer(pieces(book() if prompt is None else prompt, batch), return_tensors="pt", padding=batch > 1)
    inputs = {key: batch_inputs[key].to(where) for key in ("input_ids", "attention_mask")}
    return Job(name, model, tokenizer, inputs, window, max_new_tokens, dtype)


def compare(job: Job, advance: Callable[[], None]) -> Result:
    """Generate twice; ``advance`` is called once per step of both."""
    with enable(job.model, window=job.window) as enabled:
        replay, cache = _generate(job, advance)
        flushes = state_of(cache).cursors.flushes.tolist()
    stock, _ = _generate(job, advance)
    first, worst, worst_at, margin = _differences(stock, replay)
    layout, layers = enabled.layout, enabled.layers
    model = layout.step_bytes()
    return Result(
        model=job.name,
        family=enabled.family,
        layers=layers,
        window=job.window,
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
        stock=_cost(model.conventional, layers, layout.state_bytes * layers, stock.milliseconds),
        replay=_cost(model.replay, layers, enabled.bytes_per_request, replay.milliseconds),
    )


def _cost(traffic: Traffic, layers: int, memory: int, milliseconds: float) -> Cost:
    return Cost(traffic.read * layers, traffic.written * layers, memory, milliseconds)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: expected a device of this machine, which has {torch.cuda.device_count()} CUDA GPUs, got {name!r}"
        )
    return device


def _checkpoint(name: str, dtype: torch.dtype) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase]:
    """The model and tokenizer of a local folder."""
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"model: expected a preset ({', '.join(PRESETS)}) or a folder with a config.json, got {name!r}")
    config = hf.AutoConfig.from_pretrained(name, local_files_only=True)
    architecture = getattr(hf, (config.architectures or ["none"])[0], None)
    if architecture is None:
        raise NotImplementedError(f"model: transformers has no class {config.architectures} as {name!r} asks for")
    model = architecture.from_pretrained(name, dtype=dtype, local_files_only=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(name, local_files_only=True, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


class _Recorder(hf.LogitsProcessor):
    """Keeps every step's logits on the host and the time they came."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance = advance
        self.logits: list[Tensor] = []
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.float().cpu())
        self.times.append(time.perf_counter())
        self.advance()
        return scores


@dataclass(frozen=True)
class _Run:
    tokens: Tensor  # [B, N]
    logits: list[Tensor]  # N times [B, vocabulary]
    milliseconds: float


def _generate(job: Job, advance: Callable[[], None]) -> tuple[_Run, hf.Cache]:
    greedy = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": True, **job.inputs}
    job.model.generate(**greedy, max_new_tokens=2)  # first calls pay for lazy initialisation and compilation
    recorder = _Recorder(advance)
    processors = hf.LogitsProcessorList([recorder])
    output = job.model.generate(**greedy, max_new_tokens=job.max_new_tokens, logits_processor=processors)
    seconds = (recorder.times[-1] - recorder.times[0]) / max(len(recorder.times) - 1, 1)
    tokens = output.sequences[:, job.inputs["input_ids"].shape[1] :].cpu()
    return _Run(tokens, recorder.logits, seconds * 1e3), output.past_key_values


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
