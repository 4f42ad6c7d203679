"""Engines' and libraries' own kernels as implementations of parity's problems: the benchmark's contestants, beside fp64."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.parity import Implementation, Problem

from .contest import Contestant
from .peers import fla, flashinfer, sglang, transformers, vllm
from .work import Work

Kinds = Mapping[tuple[str, str], type[Contestant]]  # by family, and "decode" or "verify"


class Given(Work):
    """One layer of a problem, its tokens ready for every step."""

    def __init__(self, problem: Problem, layer: int) -> None:
        layout, scenario = problem.layout, problem.scenario
        self.layout, self.layers, self.groups, self.seed, self.staggered = layout, 1, 1, 0, False
        self.B, self.T, self.device = scenario.requests, scenario.T, problem.device
        self.steps = self.entries = len(scenario.steps)
        self.slots = torch.arange(self.B, dtype=torch.int32, device=self.device)[None]
        self.w = {name: None if x is None else x[layer] for name, x in problem.weights.items()}
        accepted = torch.tensor([one.accepted for one in scenario.steps], dtype=torch.int32, device=self.device)
        before = (accepted.cumsum(0) - accepted).tolist()
        tokens = [problem.inputs(i, positions) for i, positions in enumerate(before)]
        self.x = {name: torch.stack([x[name][layer].flatten(0, 1) for x in tokens]) for name in tokens[0]}
        self.accepted, self.initial = accepted[:, None], problem.initial[layer]

    def states_of(self, layer: int) -> Tensor:
        return self.layout.format.decode(self.layout.format.encode(self.initial))


class Native(Implementation):
    """A project's kernels, one contestant a layer, driven through the problem's steps.

    What an engine's own Python does around its kernels (batches that change, padding, prefixes, host copies) is not run here.
    """

    def __init__(self, problem: Problem, kinds: Kinds, interpreted: bool = True) -> None:
        super().__init__(problem)
        layout, scenario = problem.layout, problem.scenario
        kind = kinds.get((layout.recurrence.name, "decode" if scenario.T == 1 else "verify"))
        if kind is None:
            raise NotImplementedError(
                f"it has no kernel for {layout.recurrence.name} with T {'=' if scenario.T == 1 else '>'} 1"
            )
        if not scenario.uniform:
            raise NotImplementedError("kernels alone are run here: the engine's Python does the rest of this scenario")
        if layout.read is not None or layout.format.block is not None or layout.format.stochastic:
            raise NotImplementedError("it has no such format of the state")
        if interpreted and problem.device.type == "cpu":
            _interpret(kind, layout.act)
        self.kind, self.number = kind, 0
        self.layers = [self.guarded(kind, Given(problem, layer), kind.candidates[-1]) for layer in range(problem.layers)]

    @staticmethod
    def guarded(call: Callable, *args):
        """The call; whatever it raises becomes the reason why there is no result."""
        try:
            return call(*args)
        except ModuleNotFoundError:
            raise
        except Exception as failed:
            cause = failed.__cause__ or failed
            line = next(iter(str(cause).splitlines()), "")
            raise NotImplementedError(f"{type(cause).__name__}: {line}") from failed

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        """They were there from the beginning."""

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        o = torch.stack([self.guarded(self._step, one) for one in self.layers])
        self.number += 1
        return o.unflatten(1, x["v"].shape[1:3])

    def _step(self, one: Contestant) -> Tensor:
        i = self.number
        one.begin(i, 0)
        o = one.step(0, 0, i, i).clone()
        one.end(i, 0)
        one.settle(i, 0)
        return o

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        held = [one.held(self.number) for one in self.layers]
        lacking = torch.as_tensor(held[0][1]).expand(self.problem.scenario.requests).tolist()
        rows = list(requests)
        return torch.stack([states[rows].float() for states, _ in held]), [int(lacking[request]) for request in rows]


# Kernels that multiply bf16 operands on tensor cores.
_DOTS: tuple[type[Contestant], ...] = (sglang.Replay, vllm.Replay)


@triton.jit
def _exp(x):
    return tl.exp(x)


def _interpret(kind: type[Contestant], act: torch.dtype) -> None:
    """Make ready for Triton's interpreter, or say why it cannot."""
    if kind.__module__ == flashinfer.__name__:
        raise NotImplementedError("compiled kernels need a CUDA GPU")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise NotImplementedError("Triton kernels need a CUDA GPU, or TRITON_INTERPRET=1")
    if kind in _DOTS and act == torch.bfloat16:
        raise NotImplementedError("Triton's interpreter multiplies bf16 operands wrongly")
    if kind is sglang.PackedDecode:
        from sglang.kernels.ops.attention.fla import fused_recurrent

        fused_recurrent.exp = _exp  # the interpreter does not see through another name of tl.exp


_PAIR = ("gdn", "kda", "kda_safe")
_KINDS: dict[str, Kinds] = {
    "SGLang decode and verify": {(name, "decode"): sglang.PackedDecode for name in _PAIR}
    | {(name, "verify"): sglang.Verify for name in _PAIR},
    "SGLang ReplaySSM": {
        ("gdn", "decode"): sglang.Replay,
        ("kda", "decode"): sglang.Replay,
        ("gdn", "verify"): sglang.GDNReplayVerify,
        ("kda", "verify"): sglang.KDAReplayVerify,
        ("kda_safe", "verify"): sglang.KDAReplayVerify,
    },
    "vLLM selective_state_update": {("mamba2", "decode"): vllm.Update, ("mamba2", "verify"): vllm.Verify},
    "vLLM ReplaySSM": {("mamba2", "decode"): vllm.Replay},
    "FlashInfer selective_state_update": {("mamba2", "decode"): flashinfer.Update, ("mamba2", "verify"): flashinfer.Verify},
    "FlashInfer checkpointing_ssu, one kernel": {("mamba2", step): flashinfer.Checkpointing for step in ("decode", "verify")},
    "FlashInfer checkpointing_ssu, two kernels": {
        ("mamba2", step): flashinfer.TwoKernelCheckpointing for step in ("decode", "verify")
    },
    "flash-linear-attention": {
        ("gdn", "decode"): fla.GDN,
        ("kda", "decode"): fla.KDA,
        ("kda_safe", "decode"): fla.KDA,
    },
}
_TRANSFORMERS: Kinds = {
    ("gdn", "decode"): transformers.GDN,
    ("kda", "decode"): transformers.KDA,
    ("mamba2", "decode"): transformers.Mamba2,
}
NATIVES: dict[str, Callable[[Problem], Implementation]] = {
    name: partial(Native, kinds=kinds) for name, kinds in _KINDS.items()
} | {"transformers": partial(Native, kinds=_TRANSFORMERS, interpreted=False)}
