"""A continuous-batching engine in miniature: random tokens instead of a model, real states, each request beside its truth."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import present
from ..export import Export
from ..layout import Buffers, Conv, Layout
from ..state import ReplayState
from . import truth
from .check import Check, distance
from .graphs import Graph
from .inputs import Inputs
from .request import Parked, Request
from .step import Step, draft
from .truth import Truth

BUCKETS = (1, 2, 4, 8, 16)  # then multiples of 16, from 128 on of a fourth of the power of two below: sizes of graphs


@dataclass(frozen=True)
class Setup:
    """What an engine is made of.

    Attributes:
        layout: of the first worker, without a convolution, which is added; the second has half the window, token-major rings
            and a page's stride between slots.
        layers, slots: of each worker.
        requests: most at a time, parked ones included.
        block: tokens between the positions at which prefix-cache snapshots are taken.
        tokens: most tokens of a prompt and of an answer.
        chunk: most tokens of a prefill chunk.
        graphs: whether steps of padded rows are replayed from CUDA graphs; on a CPU from tensors of fixed places.
    """

    layout: Layout
    layers: int = 2
    slots: int = 8
    requests: int = 12
    block: int = 5
    tokens: int = 40
    chunk: int = 6
    backend: str | None = None
    device: str = "cpu"
    debug: bool = True
    graphs: bool = False


class Engine:
    """Workers, requests and what happens to them. Every method is one event; ``check`` holds what was found wrong."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        if setup.graphs and setup.debug:
            raise ValueError("graphs: expected False with debug, which reads the device within steps, got True")
        layout, device = setup.layout, present(setup.device)
        layout = replace(layout, conv=Conv(2 * layout.G * layout.K + layout.H * layout.V), R=0)
        pages = replace(layout, W=max(layout.T_max, layout.W // 2), order="token", R=0)
        self.setup, self.seed, self.device = setup, seed, device
        self.random = random.Random(seed)
        self.inputs = Inputs(layout, setup.layers, device, seed)
        A = self.inputs.A if layout.recurrence.decay == "derived" else None
        options = {"backend": setup.backend, "A": A, "debug": setup.debug, "max_rows": _bucket(setup.slots + 4)}
        sizes = setup.layers, setup.slots
        self.workers = [ReplayState(one, *sizes, buffers=_poisoned(one, *sizes, device), **options) for one in (layout, pages)]  # type: ignore[arg-type]
        self.conv = "qkv" if layout.recurrence.delta else "vkq"
        self.sharded = layout.H % 2 == 0 and (layout.G == 1 or layout.G % 2 == 0)
        self.truth = Truth(layout, self.inputs.weights, setup.requests, device)
        self.check = Check(layout, device)
        self.live: list[Request] = []
        self.parked: list[Parked] = []
        self.snapshots: list[tuple[Tensor, Tensor, Tensor, int]] = []  # states, window, truth, position
        self.events: Counter[str] = Counter()
        self.graphs: dict[Hashable, Graph] = {}
        self.files = importlib.util.find_spec("safetensors") is not None

    def replayed(self, key: Hashable, run: Callable[[dict[str, Tensor]], Any], given: dict[str, Tensor]) -> Any:
        """``run(given)``, from a graph where the setup says so; the key says all that shapes depend on."""
        if not self.setup.graphs:
            return run(given)
        if key not in self.graphs:
            self.graphs[key] = Graph(run, given)
        else:
            self.events["graph replays"] += 1
        return self.graphs[key](given)

    # ---- where requests are --------------------------------------------------------------------------------------------

    def of(self, worker: int) -> list[Request]:
        """The worker's live requests."""
        return [one for one in self.live if one.worker == worker]

    def free(self, worker: int) -> list[int]:
        """The worker's slots that nobody has, in random order."""
        taken = {one.slot for one in self.of(worker)}
        return self.random.sample(free := [slot for slot in range(self.setup.slots) if slot not in taken], len(free))

    def numbers(self) -> list[int]:
        """Numbers that no request has."""
        taken = {one.number for one in self.live} | {one.number for group in self.parked for one in group.requests}
        return [number for number in range(self.setup.requests) if number not in taken]

    def some(self, requests: Iterable[Request], most: int) -> list[Request]:
        """Up to that many of them."""
        return self.random.sample(known := list(requests), min(most, len(known)))

    def ints(self, values: Iterable[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype).to(self.device, non_blocking=True)

    def slots(self, requests: list[Request]) -> Tensor:
        return self.ints(one.slot for one in requests)

    # ---- admission and prefill -----------------------------------------------------------------------------------------

    def admit(self, worker: int, most: int, hit: bool) -> None:
        """New requests in free slots, from nothing or from a prefix's snapshot."""
        found = list(zip(self.free(worker), self.numbers(), strict=False))[:most]
        hit = hit and bool(self.snapshots)
        picked = [self.random.choice(self.snapshots) for _ in found] if hit else []
        new = [
            Request(
                number, worker, slot, self.random.getrandbits(63), picked[i][3] if hit else 0,
                self.random.randint(0, self.setup.tokens), self.random.randint(1, self.setup.tokens),
            )
            for i, (slot, number) in enumerate(found)
        ]  # fmt: skip
        if not new:
            return
        slots, at = self.slots(new), self.ints((one.number for one in new), torch.int64)
        keys = self.ints((one.key for one in new), torch.int64)
        if hit:
            states, windows, exact = (torch.stack(x, 1) for x in list(zip(*picked, strict=True))[:3])
            self.workers[worker].load(slots, states, windows, keys)
            self.truth.states[:, at], self.truth.windows[:, at] = exact, windows
        else:
            self.workers[worker].reset(slots, keys)
            self.truth.states[:, at], self.truth.windows[:, at] = 0, 0
        self.live += new
        self.events["prefix hits" if hit else "admissions"] += len(new)

    def prefill(self, worker: int, most: int) -> None:
        """A chunk of some prompts as an engine's own kernel does it: exact states out, fp32 recurrence, states in."""
        rows = self.some((one for one in self.of(worker) if one.prompt and not one.spoiled), most)
        if not rows:
            return
        n = [self.random.randint(1, min(one.prompt, self.setup.chunk)) for one in rows]
        state, slots = self.workers[worker], self.slots(rows)
        x, conv = self.inputs.draw(len(rows), max(n))
        states, windows, taken = state.materialize(slots), state.conv_window(slots), self.ints(n)
        states = truth.run(state.layout, self.inputs.weights, states, x, taken, dtype=torch.float32).states
        windows = truth.slide(windows, conv, taken)
        if self.random.random() < 0.5:
            state.load(slots, states, windows)
        else:
            state.reset(slots)
            for layer in range(self.setup.layers):
                state.load_layer(layer, slots, states[layer], windows[layer])
        self.truth.advance(self.ints((one.number for one in rows), torch.int64), x, conv, taken, taken)
        for one, took in zip(rows, n, strict=True):
            one.position, one.prompt = one.position + took, one.prompt - took
        self.events["prefill chunks"] += len(rows)

    # ---- steps ---------------------------------------------------------------------------------------------------------

    def step(self, worker: int, style: str, share: float = 1.0, abort: int = 0, fault: bool = False) -> None:
        """One step of a random share of the worker's requests, some of them gone before it is committed."""
        chosen = [one for one in self.of(worker) if self.random.random() < share]
        if not chosen:
            return
        if fault:
            self._spoil(chosen)
        gone = self.some(chosen, abort)
        rows: list[Request | None] = [*chosen, *[None] * (_bucket(len(chosen) + self.random.randint(0, 2)) - len(chosen))]
        self.random.shuffle(rows)
        drafts = [draft(self, one, style) for one in rows]
        step = Step(self, worker, style, rows, drafts, gone)
        step.launch()
        step.compare()
        for one, part in zip(rows, drafts, strict=True):
            if one is not None:
                kept = len(part.path)
                one.position += kept
                one.prompt, one.answer = (one.prompt - kept, one.answer) if one.prompt else (0, one.answer - kept)
        self.events[f"{style} steps"] += 1
        self.events["request-steps"] += len(chosen)
        self.events["padding rows"] += len(rows) - len(chosen)
        self.events["tokens kept"] += sum(len(part.path) for part in drafts)
        self.events["tokens rejected"] += sum(len(part.parents) - len(part.path) for part in drafts)
        if gone:
            self.live = [one for one in self.live if one not in gone]
            self.events["aborts within a step"] += len(gone)
        self.finish([one for one in chosen if one not in gone and not one.answer])

    def _spoil(self, chosen: list[Request]) -> None:
        for one in self.some((one for one in chosen if not one.spoiled), 1):
            one.spoiled = True
            self.events["faults"] += 1

    def finish(self, requests: list[Request]) -> None:
        """The requests end: their final states are compared, their slots free."""
        for worker in {one.worker for one in requests}:
            mine = [one for one in requests if one.worker == worker]
            self._compare_states(worker, mine)
            self.workers[worker].release(self.slots(mine))
        self.live = [one for one in self.live if one not in requests]
        self.events["finished"] += len(requests)

    def audit(self, worker: int) -> None:
        """All live states now."""
        self._compare_states(worker, self.of(worker))

    def _compare_states(self, worker: int, requests: list[Request]) -> None:
        requests = [one for one in requests if not one.spoiled]
        if requests:
            state, slots = self.workers[worker], self.slots(requests)
            at = self.ints((one.number for one in requests), torch.int64)
            self.check.note("states", distance(state.materialize(slots), self.truth.states[:, at], 3))
            self.check.note("windows", distance(state.conv_window(slots), self.truth.windows[:, at], 2))
            self.events["states compared"] += len(requests)

    # ---- requests come and go ------------------------------------------------------------------------------------------

    def abort(self, requests: list[Request]) -> None:
        """Requests end between two steps."""
        for worker in {one.worker for one in requests}:
            self.workers[worker].release(self.slots([one for one in requests if one.worker == worker]))
        self.live = [one for one in self.live if one not in requests]
        self.events["aborts"] += len(requests)

    def preempt(self, worker: int, most: int, fold: bool) -> None:
        """Requests leave for host memory, as bytes of a file where that can be, folded or with their rings."""
        requests = self.some((one for one in self.of(worker) if not one.spoiled), most)
        if not requests:
            return
        state, slots = self.workers[worker], self.slots(requests)
        if fold:
            state.fold(slots)
        exported, file = state.export(slots), self.files and self.random.random() < 0.5
        self.events["files"] += file
        state.release(slots)
        self.live = [one for one in self.live if one not in requests]
        self.parked.append(Parked(worker, requests, exported.to_bytes("soak") if file else exported))
        self.events["preemptions"] += len(requests)

    def resume(self, worker: int) -> None:
        """Requests that were parked first go on, here or where they were; sometimes over two ranks' shares of them."""
        if not self.parked:
            return
        group = self.parked[0]
        exported = Export.from_bytes(group.exported, "soak") if isinstance(group.exported, bytes) else group.exported
        if int(exported.tensors["cursor.count"].max()) > self.workers[worker].layout.W:
            worker = group.worker
        free = self.free(worker)[: len(group.requests)]
        if len(free) < len(group.requests):
            return
        if self.sharded and self.random.random() < 0.3:
            exported = Export.merge(exported.shard(2, self.conv), exported.layout.G, self.conv)
            self.events["shards merged"] += 1
        self.workers[worker].import_(self.ints(free), exported)
        self.events["migrations" if worker != group.worker else "resumptions"] += len(free)
        for one, slot in zip(group.requests, free, strict=True):
            one.worker, one.slot = worker, slot
        self.parked.pop(0)
        self.live += group.requests

    def fork(self, worker: int, most: int) -> None:
        """Copies of live requests in free slots; both go on."""
        sources = self.some((one for one in self.of(worker) if not one.spoiled), most)
        found = list(zip(sources, self.free(worker), self.numbers(), strict=False))
        if found:
            new = [replace(one, slot=slot, number=number) for one, slot, number in found]
            self.workers[worker].copy(self.slots([one for one, *_ in found]), self.slots(new))
            source, at = (self.ints((one.number for one in x), torch.int64) for x in ([one for one, *_ in found], new))
            self.truth.states[:, at], self.truth.windows[:, at] = self.truth.states[:, source], self.truth.windows[:, source]
            self.live += new
            self.events["forks"] += len(new)

    def move(self, worker: int, most: int) -> None:
        """Live requests change slots, also among themselves."""
        requests = self.some(self.of(worker), most)
        if requests:
            slots = self.slots(requests)
            targets = self.random.sample([one.slot for one in requests] + self.free(worker), len(requests))
            self.workers[worker].move(slots, self.ints(targets))
            for one, slot in zip(requests, targets, strict=True):
                one.slot = slot
            self.events["moves"] += len(requests)

    def snapshot(self, states: Tensor, windows: Tensor, exact: Tensor, positions: list[int]) -> None:
        """Keep a few prefixes for later hits."""
        for i in self.random.sample(range(len(positions)), min(2, len(positions))):
            self.snapshots = [*self.snapshots[-7:], (states[:, i], windows[:, i], exact[:, i], positions[i])]
        self.events["snapshots"] += len(positions)


def _bucket(n: int) -> int:
    """The batch size that a graph was captured for."""
    apart = max(16, 1 << max(0, n - 1).bit_length() >> 3)
    return next((size for size in BUCKETS if size >= n), -(-n // apart) * apart)


def _poisoned(layout: Layout, layers: int, slots: int, device: torch.device) -> Buffers:
    """Buffers whose every row is NaN; token-major ones with two slots' stride between slots."""
    pages = 2 if layout.order == "token" else 1
    whole = layout.allocate(layers, slots * pages, device)
    for x in whole:
        if x is not None:
            x.fill_(float("nan") if x.is_floating_point() else 0x7F)
    return Buffers(*(None if x is None else x[:, ::pages] for x in whole))  # type: ignore[arg-type]  # as Layout.allocate
