"""Runs a function in processes of its own, forked from one that has imported SGLang: what a run changes there ends with it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]


def alone(function: Callable[..., Any], *args: Any, plugins: str = "none") -> Any:
    """What function(*args) returns there, or raises; ``plugins``: those that SGLang's loader may load."""
    with _fork_server() as context, ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_run, plugins, function, *args).result()


def together(ranks: int, function: Callable[..., Any], *args: Any, plugins: str = "none") -> list[Any]:
    """What function(*args, rank) returns in each of so many processes; when one fails, the others are ended."""
    with _fork_server(), tempfile.TemporaryDirectory() as found:
        torch.multiprocessing.start_processes(_rank, (Path(found), ranks, plugins, function, *args), ranks, start_method=METHOD)
        return [pickle.loads((Path(found) / str(rank)).read_bytes()) for rank in range(ranks)]


METHOD = "forkserver"


@contextmanager
def _fork_server() -> Iterator[Any]:
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["tests.integrations.sglang.cpu"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # a fork server has no other search path of ours
        yield context


def _rank(rank: int, found: Path, ranks: int, plugins: str, function: Callable[..., Any], *args: Any) -> None:
    cores = itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), ranks)
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    (found / str(rank)).write_bytes(pickle.dumps(_run(plugins, function, *args, rank)))


def _run(plugins: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ |= {"SGLANG_PLUGINS": plugins, "REPLAYSSM_DEBUG": "1"}
    return function(*args)
