"""Compiles the plugins' kernels ahead of time through TensorRT's Python front end, without a GPU.

usage: python tests/integrations/trtllm/compile_plugins.py TARGET FAMILY PLUGIN ...
       python tests/integrations/trtllm/compile_plugins.py TARGET probe

TARGET: sm_90, sm_100; FAMILY: of tests/cases.py. Run without TRITON_INTERPRET. Prints a line of JSON per plugin and tactic: the
launch at several numbers of rows, the kernel's parameters, and the size of the binary that ptxas makes of the PTX. "probe" is a
kernel that writes a number of its own through each of its pointers; its line says what is written through which parameter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

sys.path.insert(0, __file__.rsplit("/", 4)[0])

from tests.cases import FAMILY
from tests.integrations.trtllm import frontend

frontend.load()

from tensorrt.plugin import SymInt32

from replayssm import ahead, launch
from replayssm.integrations.trtllm.plugin.kernel import Number, Operand, built
from replayssm.integrations.trtllm.plugin.signature import Signature
from tests.integrations.trtllm.network import Network, Node

ROWS = (1, 7, 64)


class Pair(NamedTuple):
    """Two pointers with a number between them."""

    ptr: Any
    row: Any
    other: Any


@triton.jit
def _probe_kernel(a, x, n, b, THREE: tl.constexpr):
    tl.store(a, 1)
    tl.store(x.ptr, x.row)
    tl.store(x.other, THREE)
    tl.store(b, n)


def probe(target: GPUTarget) -> dict:
    """Values stored by parameter, of a kernel whose pointers come nested and in another order than TensorRT's tensors."""
    signature = Signature("probe", (), ("q", "a", "b", "idle"), ("out", "b"), (), {})
    a, b, q, out = (torch.empty(1, dtype=torch.int32, device="meta").as_subclass(Operand) for _ in range(4))
    a.called, b.called, q.called, out.called = "a", "b", "q", "out"
    n = Number(9, lambda: SymInt32(9))
    made = ahead.Launch(_probe_kernel, (1,), (a, Pair(out, 5, q), n, b), {"THREE": 3})
    _, ptx, _, _ = built(signature, made, target)
    parameters = dict(re.findall(r"ld\.param\.b\d+\s+(%\w+), \[_probe_kernel_argument_(\d+)\]", ptx))
    numbers = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    stores = re.findall(r"st\.global\.b32 \[ (%rd\d+) \+ 0 \], \{ (%r\d+) \}", ptx)
    return {parameters[at]: numbers.get(what) or f"parameter {parameters[what]}" for at, what in stores}


GIVEN = {"mamba2": ("dt_bias", "D", "z", "accepted"), "gla": ("accepted",)}


def assembled(ptx: str) -> int:
    """Bytes of the binary that ptxas makes; it refuses what is no PTX."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source, tempfile.NamedTemporaryFile() as binary:
        source.write(ptx)
        source.flush()
        target = re.search(r"\.target (\w+)", ptx)[1]
        tool = get_ptxas(int(re.search(r"\d+", target)[0]))
        subprocess.run([tool.path, f"-arch={target}", source.name, "-o", binary.name], check=True)
        return len(binary.read())


def described(node: Node, tactic: int) -> dict:
    """One kernel as TensorRT gets it."""
    made = node.launch(tactic)
    entry = re.search(r"\.entry \w+\((.*?)\n\)", made.ptx, re.DOTALL)[1]
    return {
        "tactic": tactic,
        "kernel": made.name,
        "grids": [made.grid(rows) for rows in ROWS],
        "block": made.block,
        "shared": made.shared,
        "integers": [made.integers(rows) for rows in ROWS],
        "parameters": re.findall(r"\.param \.(\w+)", entry),
        "used": sorted({int(place) for place in re.findall(r"_argument_(\d+)\]", made.ptx)}),
        "target": re.search(r"\.target (\w+)", made.ptx)[1],
        "bytes": assembled(made.ptx),
    }


def main(target: str, family: str, names: list[str]) -> None:
    gpu = GPUTarget("cuda", int(target[3:]), 32)
    if family == "probe":
        print(json.dumps(probe(gpu)))
        return
    layout = FAMILY[family].layout(W=6, T_max=4, act=torch.bfloat16, state="bf16")
    one = Network(layout, 2, 5, GIVEN.get(family, ("dt_bias", "accepted")), target=gpu)
    for name in names:
        node = one.add(name, ahead=True, layer=1, T=4)
        for tactic in node.tactics or [0]:
            rule = {"decode": launch.decode, "verify": launch.verify}.get(name)
            programs = None if rule is None else layout.H * rule(layout, tactic).SPLIT
            io = {"plugin": name, "inputs": node.names, "outputs": len(node.types), "programs": programs}
            aliases = {i: source for i, source in node.aliases.items()}
            print(json.dumps(io | {"aliases": aliases} | described(node, tactic)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
