"""How device time is measured: CUDA graphs, medians of replays, the machine's own read ceiling."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(x, out, N, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(LOOPS):
        o = (tl.program_id(0) * LOOPS + i).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + o, mask=o < N, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def graph_us(work: Callable[[], None], replays: int = 20, warmup: int = 3) -> tuple[float, float]:
    """(median, spread) microseconds of one replay of a CUDA graph of `work`; spread is max - min over the replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for i in range(warmup + replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= warmup:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times), max(times) - min(times)


def read_ceiling(gigabytes: float = 4.0) -> float:
    """Bytes per second of a kernel that only reads."""
    x = torch.randn(int(gigabytes * 2**28), device="cuda")
    best = 0.0
    for block, loops in ((2048, 8), (4096, 8), (4096, 16)):
        programs = triton.cdiv(x.numel(), block * loops)
        out = torch.empty(programs, device="cuda")
        us, _ = graph_us(
            lambda b=block, n=loops, p=programs, o=out: _read_kernel[(p,)](x, o, x.numel(), BLOCK=b, LOOPS=n, num_warps=8)
        )
        best = max(best, x.numel() * 4 / us * 1e6)
    return best


def commit(given: str | None = None) -> str:
    """The commit measured: as given, from REPLAYSSM_COMMIT, or from git, where "+" marks changes since."""
    if known := given or os.environ.get("REPLAYSSM_COMMIT"):
        return known

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *args]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    head = git("rev-parse", "HEAD")
    return head + ("+" if git("status", "--porcelain") else "") if head else "unknown"


def machine(device: torch.device, given_commit: str | None = None) -> dict[str, str | float]:
    """Device, software and commit of this run."""
    of = {"device": "CPU, backend torch"}
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        of = {"device": torch.cuda.get_device_name(device), "driver": driver.splitlines()[0] if driver else "unknown"}
    software = {"torch": torch.__version__, "triton": triton.__version__, "commit": commit(given_commit)}
    return {**of, "date": date.today().isoformat(), **software}


def header(given_commit: str | None = None) -> dict[str, str | float]:
    """The machine, and its read ceiling."""
    return machine(torch.device("cuda"), given_commit) | {"read_ceiling": read_ceiling()}
