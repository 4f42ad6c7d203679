"""What runs scenarios: our own state under any layout and slot numbering; shims and native kernels by the same calls."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..export import Export
from ..layout import Buffers, Layout
from ..state import ReplayState
from .problem import Problem
from .scenarios import PADDING


class Implementation:
    """One way to decode a problem's requests. It knows requests by number and gives them places as it likes.

    ``__init__`` raises NotImplementedError or ModuleNotFoundError where it cannot run the problem, and so may every method;
    the message is what the matrix says. Tensors are on the problem's device.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        """Requests start from these states [L, B, H, V, K], fp32."""
        raise NotImplementedError

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        """One step and its commit.

        Args:
            rows: requests, or PADDING.
            t, accepted: each row's tokens and how many stay.
            x: per input of ``ReplayState.step`` [L, B, T, ...]; beyond a row's t, NaN.

        Returns:
            Outputs [L, B, T, H, V].
        """
        raise NotImplementedError

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """The states [L, B, H, V, K] as they are held, and how many kept tokens of each request they still lack."""
        raise NotImplementedError

    def snapshot(self, request: int, back: int) -> Tensor:
        """The exact state [L, H, V, K] that a request had `back` kept tokens ago; the request goes on."""
        raise NotImplementedError

    def leave(self, request: int) -> Export:
        """A request as one unit on the host; its place is free."""
        raise NotImplementedError

    def enter(self, request: int, exported: Export) -> None:
        """A request that left an implementation, this one or another."""
        raise NotImplementedError

    def finish(self, request: int) -> None:
        """A request ends; its place is free."""
        raise NotImplementedError


class Ours(Implementation):
    """ReplayState by its public calls. Subclasses choose layout, backend, buffers and slots, or make other calls."""

    backend: str | None = "torch"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.layout, self.device = self.arrange(problem.layout), problem.device
        self.free = self.slots(problem.scenario.requests + 1)
        self.at: dict[int, int] = {}
        derived = self.layout.recurrence.decay == "derived"
        self.state = self.build(max(self.free) + 1, problem.weights["A"] if derived else None)
        self.weights = [
            {name: None if x is None or (name == "A" and derived) else x[layer] for name, x in problem.weights.items()}
            for layer in range(problem.layers)
        ]

    def build(self, slots: int, A: Tensor | None) -> ReplayState:
        """The state of so many slots."""
        layers = self.problem.layers
        return ReplayState(
            self.layout, layers, slots, self.device, self.backend, A=A, buffers=self.buffers(layers, slots),
            max_rows=slots + 8, debug=True,
        )  # fmt: skip

    def arrange(self, layout: Layout) -> Layout:
        """This implementation's own layout of the problem's layer."""
        return layout

    def slots(self, n: int) -> list[int]:
        """The slots it gives to requests, the next one first: at least n."""
        return random.Random(n).sample(range(n), n)

    def buffers(self, layers: int, slots: int) -> Buffers | None:
        """Tensors that an engine owns; None allocates our own."""
        return None

    def tensor(self, values: Sequence[int]) -> Tensor:
        """Integers as the state takes them."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def admit(self, requests: Sequence[int], states: Tensor) -> None:
        for request in requests:
            self.at[request] = self.free.pop(0)
        self.state.load(self.of(requests), states, keys=torch.tensor(requests, device=self.device))

    def of(self, requests: Sequence[int]) -> Tensor:
        """The requests' slots; padding's is negative."""
        return self.tensor([PADDING if request == PADDING else self.at[request] for request in requests])

    def step(self, rows: Sequence[int], t: Sequence[int], accepted: Sequence[int], x: dict[str, Tensor]) -> Tensor:
        T = x["v"].shape[2]
        even = all(n == T for n, row in zip(t, rows, strict=True) if row != PADDING)
        plan = self.state.plan(self.of(rows), T if even else self.tensor(t))
        o = [
            self.state.step(layer, plan, **{name: one[layer].flatten(0, 1) for name, one in x.items()}, **self.weights[layer])  # type: ignore[arg-type]
            for layer in range(self.problem.layers)
        ]
        self.state.commit(plan, self.tensor(accepted))
        return torch.stack(o).unflatten(1, (len(rows), T))

    def states(self, requests: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        return self.state.materialize(self.of(requests)), [0] * len(requests)

    def snapshot(self, request: int, back: int) -> Tensor:
        slots = self.of([request])
        return self.state.materialize(slots, self.state.cursors.count[slots.long()] - back)[:, 0]

    def leave(self, request: int) -> Export:
        exported = self.state.export(self.of([request]))
        self.finish(request)
        return exported

    def enter(self, request: int, exported: Export) -> None:
        self.at[request] = self.free.pop(0)
        self.state.import_(self.of([request]), exported)

    def finish(self, request: int) -> None:
        self.state.release(self.of([request]))
        self.free.insert(0, self.at.pop(request))  # the next request's


class Pages(Ours):
    """Ring rows token-major, in slots with a page's stride between them, and a window of other length."""

    def arrange(self, layout: Layout) -> Layout:
        return replace(layout, order="token", W=layout.W + 1, R=0)

    def buffers(self, layers: int, slots: int) -> Buffers | None:
        whole = self.layout.allocate(layers, 2 * slots, self.device)
        return Buffers(*(None if x is None else x[:, ::2] for x in whole))  # type: ignore[arg-type]  # as Layout.allocate


class Kernels(Ours):
    """The Triton kernels, compiled on a GPU, in Triton's interpreter on a CPU."""

    backend = "triton"


@dataclass(frozen=True)
class Entry:
    """An implementation by name.

    Attributes:
        name: as results call it.
        make: it for a problem; NotImplementedError or ModuleNotFoundError says why there is none.
        native: whether it is an engine's or a library's own, whose errors are findings and not failures of ours.
    """

    name: str
    make: Callable[[Problem], Implementation]
    native: bool = False

    def __str__(self) -> str:
        return self.name


def imported(path: str) -> Callable[[Problem], Implementation]:
    """The class "module:name", imported when it is needed."""
    module, _, name = path.partition(":")
    return lambda problem: getattr(importlib.import_module(module), name)(problem)


OURS = [
    Entry("core torch", Ours),
    Entry("core torch, pages", Pages),
    Entry("core Triton", Kernels),
    Entry("SGLang shim", imported("replayssm.integrations.sglang.parity:Shim")),
    Entry("FlashInfer shim", imported("replayssm.integrations.flashinfer.parity:Shim")),
    Entry("TensorRT-LLM shim", imported("replayssm.integrations.trtllm.parity:Shim")),
]


def implementations() -> list[Entry]:
    """All, ours first."""
    from ..bench.natives import NATIVES

    return [*OURS, *(Entry(name, make, native=True) for name, make in NATIVES.items())]
