"""One model in one mode, in processes of its own: `python -m replayssm.bench.sglang.job JOB`, which prints a line a result.

JOB is JSON: "do" is "speed" or "parity", "processes" how many GPUs share the model, or, with "apart", have a server each,
whose own options that lists; the rest is what the functions of that name take.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

MARK = "RESULT "


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """[count, length] tokens, no two requests alike."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]


def speed(
    folder: Path, options: list[str], batches: list[int], length: int, settle: int, steps: int, profiled: int, tokens: int,
    device: str = "cuda", turns: dict[str, Any] | None = None, rank: int = 0,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a batch: milliseconds per step, tokens per second, requests that fit.

    Args:
        length: tokens of a prompt.
        settle, steps, profiled: see Meter.
        tokens: most that a request generates in a step.
        turns: this process's Turns, where others share the GPU.
        rank: see Server; each rank measures itself.
    """
    from .meter import Meter
    from .requests import Request
    from .serving import Server
    from .turns import Turns

    server = Server(folder, options, rank)
    vocabulary = server.scheduler.model_config.vocab_size
    fit = min(server.scheduler.max_running_requests, server.pool.size)
    shared = None if turns is None else Turns(**turns)
    if shared is not None:  # what is compiled at first use is compiled now
        server.run([Request(prompt, 8, logits=False) for prompt in prompts(min(fit, max(batches)), length, vocabulary)])
        shared.wait()
    for batch in batches:
        if batch > fit:
            yield {"batch": batch, "max_requests": fit, "skipped": f"{fit} requests fit"}
            continue
        meter = Meter(batch, settle, steps, profiled, server.generated, device)
        enough = (meter.iterations + 8) * tokens
        requests = [
            Request(prompt, enough, logits=False, reserved=True) for prompt in prompts(batch, length, vocabulary, batch)
        ]
        with nullcontext() if shared is None else shared.alone():
            server.run(requests, meter)
        row = {
            "batch": batch, "ms_per_step": meter.busy_ms, "wall_ms_per_step": meter.wall_ms,
            "collectives_ms_per_step": meter.collectives_ms, "tokens_per_s": meter.tokens_per_s,
            "slot_bytes": server.slot_bytes,
        }  # fmt: skip
        yield row if shared else row | {"max_requests": fit}  # of a part of the memory it says nothing


def parity(
    folder: Path, options: list[str], batches: list[int], tokens: int, prefix: int, fp32: bool, logits: bool = True,
    rank: int = 0,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a batch: every request's tokens, how likely the two likeliest were, and what befell it.

    Half of the requests begin with the same ``prefix`` tokens, as those of the batches before did: the prefix cache finds them.

    Args:
        fp32, rank: see Server.
        logits: whether the answers tell how likely tokens were.
    """
    from .requests import Request
    from .serving import Server

    server = Server(folder, options, rank, fp32)
    vocabulary = server.scheduler.model_config.vocab_size
    shared = prompts(1, prefix, vocabulary)[0]
    for batch in batches:
        tails = prompts(batch, 24, vocabulary, batch)
        requests = [
            Request([*shared, *tail] if i % 2 == 0 else tail[: 8 + i % 16], tokens, at=i % 5, logits=logits)
            for i, tail in enumerate(tails)
        ]
        answers = server.run(requests)
        yield {"batch": batch, "answers": [asdict(one) for one in answers], "slot_bytes": server.slot_bytes}


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["processes"] == 1:
        run(0, job)
    else:
        torch.multiprocessing.spawn(_last, (job,), nprocs=job["processes"])


def run(rank: int, job: dict[str, Any]) -> None:
    """The job as one of its processes; the last one prints."""
    for row in rows(rank, job):
        if rank == job["processes"] - 1:
            print(MARK + json.dumps(row), flush=True)


def rows(rank: int, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the job yields in one of its processes."""
    given = {key: value for key, value in job.items() if key not in ("do", "folder", "processes", "apart")}
    if job.get("apart"):
        given["options"] = [*job["options"], *job["apart"][rank]]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"], rank = gpus[rank], 0
    yield from {"speed": speed, "parity": parity}[job["do"]](folder=Path(job["folder"]), rank=rank, **given)


def _last(rank: int, job: dict[str, Any]) -> None:
    """Once the GPU is idle the process ends at once: NCCL's own end would wait for the graphs that hold its operations."""
    run(rank, job)
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
