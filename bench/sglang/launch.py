"""Jobs in processes of their own, and what their results say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .job import MARK
from .modes import DRAFT_TOKENS, OURS, options
from .turns import Turns

# The same for all modes. Of the attention and sampling kernels those that come without compiled packages; sampling is
# greedy, and no answer is streamed while requests are decoded.
GPU = (
    "--attention-backend=triton", "--sampling-backend=pytorch", "--disable-custom-all-reduce", "--disable-prefill-cuda-graph",
    "--chunked-prefill-size=8192", "--mamba-ssm-dtype=float32", "--random-seed=0", "--log-level=info",
)  # fmt: skip

PROMPT = 64  # tokens
APART = {"prefill": 16, "decode": 11}  # windows of servers that share a request
PREFIX = 320  # tokens; SGLang keeps states every 256
# What SGLang's own launcher sets, unless it is set already.
NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}

# What rounding makes of log-probabilities: other activations of the last bit make others of it, layer by layer.
TIES = {"float32": 2e-3, "bfloat16": 0.25}


def parallel(tp: int) -> list[str]:
    """SGLang's options for so many GPUs that share each layer."""
    if tp == 1:
        return []
    return [f"--tp-size={tp}", f"--nccl-port={_port()}", "--enforce-disable-flashinfer-allreduce-fusion"]


def apart() -> list[str]:
    """SGLang's options for a server that prefills and one that decodes, beside --disaggregation-mode; see transfer."""
    return [
        f"--disaggregation-bootstrap-port={_port()}",
        "--disaggregation-transfer-backend=nixl",
        "--num-reserved-decode-tokens=16",
    ]


def _port() -> int:
    """A free one of this machine, where processes meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def speed(
    folder: Path, mode: str, batches: list[int], speculative: bool, settle: int, steps: int, profiled: int, memory: float,
    turns: Turns | None = None, tp: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The job that measures decode steps of a model whose weights do not matter; see job.speed.

    Args:
        turns: where others share the GPU; memory is then that of the largest batch and no more.
    """
    tokens = DRAFT_TOKENS if speculative else 1
    if turns is not None:
        most = max(batches)
        room = most * (PROMPT + tokens * (settle + steps + profiled + 16))
        shared = [f"--max-running-requests={most}", f"--max-total-tokens={room}"]
    chosen = [
        *GPU, "--load-format=dummy", "--dtype=bfloat16", "--disable-radix-cache", f"--mem-fraction-static={memory}",
        "--cuda-graph-bs-decode", *map(str, batches), *options(mode, folder, speculative), *parallel(tp),
        *(() if turns is None else shared),
    ]  # fmt: skip
    return {
        "do": "speed", "processes": tp, "folder": str(folder), "options": chosen, "batches": batches, "length": PROMPT,
        "settle": settle, "steps": steps, "profiled": profiled, "tokens": tokens,
        "turns": None if turns is None else asdict(turns),
    }  # fmt: skip


def parity(
    folder: Path, mode: str, batches: list[int], tokens: int, pool: int, dtype: str, speculative: bool = False, tp: int = 1,
    separate: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The job that answers requests in a pool of so many tokens; see job.parity.

    Args:
        separate: one server prefills and another decodes, on a GPU each, and their windows differ.
    """
    chosen = [
        *GPU, f"--dtype={dtype}", f"--max-total-tokens={pool}", "--schedule-conservativeness=0.3", "--mem-fraction-static=0.9",
        f"--max-running-requests={max(batches)}", f"--max-mamba-cache-size={8 * max(batches)}",
        "--cuda-graph-bs-decode", *map(str, batches), *options(mode, folder, speculative), *parallel(tp),
        *(apart() if separate else ()),
    ]  # fmt: skip
    each = [
        [f"--disaggregation-mode={part}", *[f"--replayssm-window={window}"] * (mode == OURS)] for part, window in APART.items()
    ]
    return {
        "do": "parity", "processes": len(each) if separate else tp, "apart": each if separate else None,
        "folder": str(folder), "options": chosen, "batches": batches, "tokens": tokens,
        "prefix": min(PREFIX, pool // 4), "fp32": dtype == "float32", "logits": not speculative,
    }  # fmt: skip


def unpack(archive: Path) -> Path:
    """The folder beside the archive that `replayssm bench sglang stage` wrote; unpacked unless it is there."""
    site = archive.with_name("site")
    if not site.is_dir():
        partial = archive.with_name("site.partial")
        with tarfile.open(archive) as packed:
            packed.extractall(partial, filter="data")
        partial.rename(site)
    return site


def run(job: dict[str, Any], mode: str, site: Path | None, log: Path) -> Iterator[dict[str, Any]]:
    """The job's results, one by one as they come; its log goes to the file.

    Args:
        site: folder with SGLang; None: it is installed.

    Raises: RuntimeError: the process failed; the log's end says why.
    """
    environment = NCCL | os.environ | {"SGLANG_PLUGINS": "replayssm" if mode == OURS else "none", "HF_HUB_OFFLINE": "1"}
    if site is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "replayssm.bench.sglang.job", json.dumps(job)]
    if job.get("fp32"):
        # SGLang's GDN prefill asserts that it is not given fp32, which its kernels take; torch.compile needs assertions.
        command.insert(1, "-O")
        environment |= {"SGLANG_MAMBA_CONV_DTYPE": "float32", "TORCHDYNAMO_DISABLE": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                file.write(line)
    if job.get("turns"):
        Turns(**job["turns"]).ready()  # the others shall not wait for it
    if child.returncode:
        raise RuntimeError(f"exit code {child.returncode}, {log} ends with: {' | '.join(log.read_text().splitlines()[-4:])}")


def compared(stock: list[dict[str, Any]], ours: list[dict[str, Any]], tie: float) -> dict[str, Any]:
    """What two runs of the same requests have in common.

    Greedy decoding takes either of two tokens that are equally likely, and goes on from it: where two answers part, the
    two likeliest tokens of the stock run must have been closer than ``tie``.

    Returns: requests, equal (of them, to the last token), parted (in ties), wrong (not in ties), tokens compared up to there,
        cached and retracted of either run.
    """
    found = {"requests": len(stock), "equal": 0, "parted": 0, "wrong": 0, "tokens": 0}
    for a, b in zip(stock, ours, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)) if x != y), None)
        if at is None and len(a["tokens"]) == len(b["tokens"]):
            found["equal"] += 1
            found["tokens"] += len(a["tokens"])
            continue
        at = min(len(a["tokens"]), len(b["tokens"])) if at is None else at
        first, second = a["likeliest"][at] if at < len(a["likeliest"]) else (1e9, 0.0)
        found["parted" if first - second < tie else "wrong"] += 1
        found["tokens"] += at
    for key in ("cached", "retracted"):
        found[key] = [sum(one[key] for one in run) for run in (stock, ours)]
    return found
