"""Runs a function in a process of its own, forked from one that has imported SGLang: what a run changes there ends with it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def alone(function: Callable[..., Any], *args: Any, plugins: str = "none") -> Any:
    """What function(*args) returns there, or raises; ``plugins``: those that SGLang's loader may load."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integrations.sglang.cpu"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # a fork server has no other search path of ours
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_run, plugins, function, *args).result()


def _run(plugins: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ |= {"SGLANG_PLUGINS": plugins, "REPLAYSSM_DEBUG": "1"}
    return function(*args)
