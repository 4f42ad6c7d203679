"""Kernels that the TensorRT plugins compile ahead of time: launch and parameters as TensorRT gets them, valid PTX."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.integrations.trtllm import frontend

if frontend.missing():
    pytest.skip(frontend.missing(), allow_module_level=True)
frontend.load()

from replayssm.integrations.trtllm.plugin.kernel import Number, renumbered
from replayssm.layout import HELPERS

ROOT = Path(__file__).parents[3]
ROWS = (1, 7, 64)


def compiled(*arguments: str, cache: Path) -> list[dict]:
    """What compile_plugins.py prints, in a process without the interpreter and with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "tests/integrations/trtllm/compile_plugins.py", *arguments]
    ran = subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


# What an op takes for its schema's sake.
IDLE = {"commit": {"start", "key", "flushes"}, "flush": {f"buffer_{name}" for name in HELPERS}}


def check(one: dict, target: str) -> None:
    """A kernel's launch and parameters are those that TensorRT calls it with."""
    inputs, aliases, steps = one["inputs"], one["aliases"], one["plugin"] in ("decode", "verify")
    assert one["target"] == f"{target}a" and one["bytes"] > 1000
    assert one["parameters"] == ["u64"] * len(inputs) + ["u32"] + ["u64"] * one["outputs"]
    # The integer is a step's layer, and elsewhere the batch's rows.
    assert one["integers"] == [[1 if steps else rows] for rows in ROWS]
    if steps:
        assert one["grids"] == [[one["programs"] * rows, 1, 1] for rows in ROWS]
    # What comes back as an alias is read and written there; every other input is read as itself.
    outputs = [aliases.get(str(i), "out") for i in range(one["outputs"])]
    names = [*(None if name in outputs else name for name in inputs), "", *outputs]
    used = {names[place] for place in one["used"]} - {""}
    assert used == {*inputs, *outputs} - IDLE.get(one["plugin"], set())
    assert one["block"][0] % 32 == 0 and one["block"][1:] == [1, 1] and 0 <= one["shared"] <= 48 << 10


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_decode(target, tmp_path):
    """A network of plain decode: plan, flush, decode, commit; the decode with a choice of launches for TensorRT to time."""
    made = compiled(target, "gdn", "plan", "flush", "decode", "commit", cache=tmp_path)
    for one in made:
        check(one, target)
    tactics = [one["tactic"] for one in made if one["plugin"] == "decode"]
    assert tactics == sorted(set(tactics)) and tactics[0] == 1 and len(tactics) > 1
    grids = [one["grids"][0][0] for one in made if one["plugin"] == "decode"]
    assert grids == sorted(grids, reverse=True), "a small batch takes more programs a head"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda", "kda_safe", "gla"])
def test_everything(target, family, tmp_path):
    for one in compiled(target, family, "plan", "flush", "decode", "verify", "commit", cache=tmp_path):
        check(one, target)


def test_pointers_arrive_where_tensorrt_puts_them(tmp_path):
    """What a compiled kernel stores, told by the parameter that it stores it through: none has moved to another's place."""
    (stored,) = compiled("sm_90", "probe", cache=tmp_path)
    inputs, integer = ("q", "a", "b", "idle"), 4
    assert stored == {
        str(inputs.index("a")): "1",
        str(inputs.index("q")): "3",
        str(integer + 1): "5",  # out
        str(integer + 2): f"parameter {integer}",  # b, by its alias
    }


def test_numbers_keep_their_expressions():
    """What launchers do with the batch's rows is done with the engine's number of rows, too."""
    rows = Number(64, lambda: 7)
    for made, chosen, computed in (
        (rows * 3, 192, 21),
        (3 * rows, 192, 21),
        (rows + 1, 65, 8),
        (1 + rows, 65, 8),
        (rows - 1, 63, 6),
        (rows // 2, 32, 3),
        (triton.cdiv(rows * 2, 5), 26, 3),
    ):
        assert isinstance(made, Number) and (int(made), made.expression()) == (chosen, computed)


PTX = """
.visible .entry _k(
\t.param .u64 .ptr .global .align 1 _k_param_0,
\t.param .u32 _k_param_1,
\t.param .u64 .ptr .global .align 1 _k_param_2,
\t.param .u64 .ptr .global .align 1 _k_param_3
)
.reqntid 32
{
\tld.param.b64 \t%rd1, [_k_param_0];
\tld.param.b32 \t%r1, [_k_param_1];
\tld.param.b64 \t%rd2, [_k_param_2];
}
"""


def test_parameters_in_tensorrts_order():
    """A kernel's parameters move to their places, those that it does not have are declared, Triton's own are dropped."""
    moved = renumbered(PTX, [3, 1, 0], 4)
    declared = moved[moved.index("(") : moved.index(")")].split()
    assert [word.strip(",") for word in declared if word.startswith("_k")] == [f"_k_argument_{i}" for i in range(4)]
    assert ".param .u32 _k_argument_1" in moved and ".param .u64 _k_argument_2" in moved
    for register, place in (("%rd1", 3), ("%r1", 1), ("%rd2", 0)):
        assert f"{register}, [_k_argument_{place}]" in moved
    assert "_param_" not in moved
    same = renumbered(PTX, [2, 1, 2], 3)  # one tensor under two of the kernel's names
    assert "%rd1, [_k_argument_2]" in same and "%rd2, [_k_argument_2]" in same and "_k_argument_0," in same


def test_scratch_memory_is_refused():
    with pytest.raises(NotImplementedError, match=r"_k: supported are kernels without scratch memory, got parameters \[2\]"):
        renumbered(PTX, [0, 1], 2)
