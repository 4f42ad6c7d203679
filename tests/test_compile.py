"""Every kernel variant compiles for the GPUs it will meet, on a machine that has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import FAMILY

ROOT = Path(__file__).parents[1]
KERNELS = {
    "_plan_kernel",
    "_commit_kernel",
    "_compact_kernel",
    "_count_plan_kernel",
    "_count_commit_kernel",
    "_decode_kernel",
    "_verify_kernel",
    "_materialize_kernel",
    "_conv_kernel",
    "_conventional_kernel",
}


def compiled(*arguments: str, cache: Path, script: str = "tests/compile_kernels.py") -> set[tuple[str, str]]:
    """(kernel, case) of every binary made, in a process without the interpreter and with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, *arguments]
    ran = subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert all(int(size) > 1000 for *_, size, _ in rows)
    return {(kernel, case) for kernel, case, *_ in rows}


def test_families_compile(tmp_path):
    """Each family's kernels for Hopper."""
    made = compiled("--quick", "sm_90", *FAMILY, cache=tmp_path)
    assert made == {(kernel, name) for kernel in KERNELS for name in FAMILY}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_everything_compiles(target, tmp_path):
    """All geometries, from Ampere to Blackwell, and AMD's CDNA 3."""
    assert {kernel for kernel, _ in compiled(target, cache=tmp_path)} == KERNELS
