"""The plugins on a GPU, called as TensorRT calls them: kernels by the CUDA driver, with inputs, integers, then outputs.

TensorRT's front end gives PTX, launch and parameters, or calls the plugin in Python; no engine is built.
"""

import ctypes
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.harness import GPU
from tests.integrations.trtllm import frontend

if not GPU or frontend.missing():
    pytest.skip(frontend.missing() or "needs a CUDA device", allow_module_level=True)
frontend.load()

from replayssm import ReplayState
from replayssm.layout import STORED
from tests.cases import FAMILY, inputs, relative, weights
from tests.integrations.trtllm.network import Network, Node

pytestmark = pytest.mark.gpu
LAYERS, SLOTS, ROWS = 2, 8, 5


class Kernel:
    """A node's kernel in the GPU."""

    def __init__(self, node: Node, tactic: int) -> None:
        self.node, self.made = node, node.launch(tactic)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(self.module), self.made.ptx.encode() + b"\0"))
        name = self.made.name.encode()
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), self.module, name))

    @staticmethod
    def check(error: int) -> None:
        assert error == 0, f"CUDA driver error {error}"

    def __call__(self, bound: dict[str, torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Runs it on these inputs; outputs that are no alias are made, full of another number."""
        held, outputs = self.node.memory(bound, rows)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*held, *outputs)]
        values = [ctypes.c_int32(value) for value in self.made.integers(rows)]
        arguments = [*pointers[: len(held)], *values, *pointers[len(held) :]]
        table = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = (*self.made.grid(rows), *self.made.block)
        self.check(self.cuda.cuLaunchKernel(self.function, *shape, self.made.shared, stream, table, None))
        return outputs


@pytest.mark.parametrize("ahead", [True, False], ids=["kernels", "python"])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_called_as_tensorrt_does(family, T, ahead):
    """Steps through windows and flushes, drafts partly accepted, a padded row: ReplayState's cursors, outputs and states."""
    act = torch.float32
    layout = FAMILY[family].layout(W=8, T_max=4, act=act)
    generator = torch.Generator().manual_seed(0)
    w = [weights(layout, generator, "cuda") for _ in range(LAYERS)]
    given = tuple(name for name in ("dt_bias", "D") if w[0][name] is not None)
    A = torch.stack([x["A"] for x in w]) if layout.recurrence.decay == "derived" else None
    one = Network(layout, LAYERS, SLOTS, (*given, "accepted"), f"gpu_{family}", tokens=T)
    truth, ours = (ReplayState(layout, LAYERS, SLOTS, "cuda", "triton", A=A) for _ in range(2))
    states = torch.randn(LAYERS, ROWS, layout.H, layout.V, layout.K, generator=generator).cuda()
    slots = torch.tensor([6, 2, -1, 0, 3], dtype=torch.int32, device="cuda")
    for state in (truth, ours):
        state.load(slots, states)
    bound = {f"buffer_{name}": x for name, x in ours.buffers._asdict().items() if x is not None} | ours.cursors._asdict()

    def calls(name: str, **attributes) -> list[Callable]:
        """The plugin's kernels, one per tactic, or the plugin in Python."""
        node, stream = one.add(name, ahead, **attributes), torch.cuda.current_stream().cuda_stream
        return [Kernel(node, tactic) for tactic in node.tactics or [0]] if ahead else [partial(node.enqueue, stream=stream)]

    (plan,), (flush,), (commit,) = calls("plan", T=T), calls("flush"), calls("commit")
    steps = [calls("decode" if T == 1 else "verify", layer=layer, T=T) for layer in range(LAYERS)]
    for i in range(24):
        x = inputs(layout, ROWS * T, generator, "cuda")
        kept = torch.randint(1, T + 1, (ROWS,), generator=generator, dtype=torch.int32).cuda()
        planned = truth.plan(slots, t=T)
        (rows, *_) = plan(bound | {"slots": slots}, ROWS)
        assert torch.equal(rows, planned.rows)
        flush(bound | {"plan": rows, "A": A}, ROWS)
        for layer, choices in enumerate(steps):
            taken = w[layer] | ({"A": None} if A is not None else {})
            wanted = truth.step(layer, planned, **x, **taken)
            out = choices[i % len(choices)](bound | {"plan": rows} | x | w[layer], ROWS)[0]
            assert relative(out, wanted) < 1e-5
        truth.commit(planned, kept)
        commit(bound | {"plan": rows, "accepted": kept}, ROWS)
    for wanted, got in zip(truth.cursors, ours.cursors, strict=True):
        assert torch.equal(wanted, got)
    for name in STORED:
        if (wanted := getattr(truth.buffers, name)) is not None:
            assert relative(getattr(ours.buffers, name), wanted) < 1e-5
    assert truth.cursors.flushes.max() > 1
