"""Our calls beside FlashInfer's compiled kernels and the fp64 oracle, on equal inputs.

usage: python tests/integrations/flashinfer/parity.py OUT.json [STEPS]

FlashInfer must be importable with its kernels compiled for these shapes (``replayssm bench stage``), on a CUDA machine. Both
keep rings and states of their own, by the bookkeeping that FlashInfer leaves to its caller; per call, the worst |difference|
of an output over the outputs' rms: ours to theirs, and both to the oracle; and that of the states at the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, __file__.rsplit("/", 4)[0])
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")  # a missing object is absent, not minutes of compilation

import flashinfer.mamba

from replayssm import MAMBA2, reference
from replayssm.integrations import flashinfer as fi
from tests.integrations.flashinfer.harness import expanded

B, SLOTS, WINDOW = 4, 6, 16
H, G, V, K = 128, 8, 64, 128  # Nemotron-3-Super-120B-A12B
DTYPE = torch.bfloat16
TOKENS = (1, 4, 8)


class Inputs:
    """Weights, tokens and starting states, equal for everyone."""

    def __init__(self, T: int) -> None:
        self.T, self.g = T, torch.Generator("cuda").manual_seed(T)
        self.A = -torch.exp(self.rand(H) * 3 - 2)
        self.D, self.dt_bias = self.rand(H).to(DTYPE), (self.rand(H) * 2 - 3).to(DTYPE)
        self.states = torch.randn(SLOTS, H, V, K, generator=self.g, device="cuda") * K**-0.5
        self.slots = torch.tensor([5, 0, 3, 2], dtype=torch.int32, device="cuda")

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.g, device="cuda")

    def tokens(self) -> dict[str, torch.Tensor]:
        """x, B, C and dt of [B, T] tokens."""
        shapes = {"x": (H, V), "B": (G, K), "C": (G, K), "dt": (H,)}
        x = {n: torch.randn(B, self.T, *s, generator=self.g, device="cuda") for n, s in shapes.items()}
        return {n: (one * K**-0.5 if n == "B" else one).to(DTYPE) for n, one in x.items()}

    def given(self, x: dict[str, torch.Tensor]) -> dict:
        """As both take them."""
        weights = {"A": expanded(self.A, V, K), "D": expanded(self.D, V), "dt_bias": expanded(self.dt_bias, V)}
        return x | {"dt": expanded(x["dt"], V), "dt_softplus": True, "pad_slot_id": -1} | weights

    def oracle(self, state: torch.Tensor, x: dict[str, torch.Tensor], row: int, n: int):
        """fp64 outputs and state of a row's first n tokens."""
        token = {ours: x[theirs][row, :n] for ours, theirs in zip("qkvb", ("C", "B", "x", "dt"), strict=True)}
        return reference.decode(MAMBA2, state, **token, A=self.A, D=self.D, dt_bias=self.dt_bias)


class Ring:
    """One side's pool and its caller's cursors."""

    def __init__(self, of: Inputs, call) -> None:
        self.call, self.R = call, WINDOW + of.T
        self.pool = {
            "state": of.states.clone(),
            "x_cache": torch.zeros(SLOTS, H, self.R, V, dtype=DTYPE, device="cuda"),
            "B_cache": torch.zeros(SLOTS, G, self.R, K, dtype=DTYPE, device="cuda"),
            "dt_cache": torch.zeros(SLOTS, H, self.R, device="cuda"),
        }
        self.start, self.prev = (torch.zeros(SLOTS, dtype=torch.int32, device="cuda") for _ in range(2))

    def step(self, of: Inputs, x: dict, accepted: torch.Tensor) -> torch.Tensor:
        """Outputs, then the bookkeeping."""
        out = torch.empty_like(x["x"])
        cursors = {"ring_start": self.start, "prev_num_accepted_tokens": self.prev}
        self.call(**self.pool, **cursors, **of.given(x), out=out, state_batch_indices=of.slots)
        at = of.slots.long()
        flush = self.prev[at] + of.T > WINDOW
        self.start[at] = torch.where(flush, (self.start[at] + self.prev[at]) % self.R, self.start[at])
        self.prev[at] = torch.where(flush, accepted, self.prev[at] + accepted)
        return out


def worst(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest |x - y| over the rms of y."""
    return float((x.double() - y.double()).abs().max() / y.double().square().mean().sqrt())


def checkpointing(T: int, steps: int) -> dict[str, float]:
    """200 steps of both rings, random acceptance, every row through several flushes."""
    of, chance = Inputs(T), random.Random(T)
    ours, theirs = Ring(of, fi.checkpointing_ssu), Ring(of, flashinfer.mamba.checkpointing_ssu)
    exact = {int(slot): of.states[slot].double() for slot in of.slots}
    found = {"ours to theirs": 0.0, "ours to fp64": 0.0, "theirs to fp64": 0.0}
    for _ in range(steps):
        x, accepted = of.tokens(), [chance.randint(1, T) for _ in range(B)]
        kept = torch.tensor(accepted, dtype=torch.int32, device="cuda")
        mine, other = ours.step(of, x, kept), theirs.step(of, x, kept)
        truth = torch.stack([of.oracle(exact[int(slot)], x, row, T)[0] for row, slot in enumerate(of.slots)])
        for name, pair in zip(found, ((mine, other), (mine, truth), (other, truth)), strict=True):
            found[name] = max(found[name], worst(*pair))
        for row, slot in enumerate(of.slots):
            exact[int(slot)] = of.oracle(exact[int(slot)], x, row, accepted[row])[1]
    same = torch.equal(ours.start, theirs.start) and torch.equal(ours.prev, theirs.prev)
    rings = {n: worst(ours.pool[n], theirs.pool[n]) for n in ("x_cache", "B_cache", "dt_cache", "state")}
    return found | {f"{n}: ours to theirs": error for n, error in rings.items()} | {"cursors equal": float(same)}


def update(T: int, steps: int) -> dict[str, float]:
    """The conventional step: one token in place; several with a state after each token."""
    of = Inputs(T)
    pools = of.states.clone(), of.states.clone()
    exact = of.states.double()
    found = {"ours to theirs": 0.0, "ours to fp64": 0.0, "theirs to fp64": 0.0, "states: ours to theirs": 0.0}
    rows = torch.arange(B, dtype=torch.int32, device="cuda")
    for _ in range(steps):
        x, outs = of.tokens(), []
        given = of.given(x)
        if T == 1:
            given = {n: one[:, 0] if n in ("x", "B", "C", "dt") else one for n, one in given.items()}
        for pool, call in zip(pools, (fi.selective_state_update, flashinfer.mamba.selective_state_update), strict=True):
            out, options = torch.empty_like(given["x"]), {}
            buffer = torch.zeros(B, T, H, V, K, device="cuda")
            if T > 1:
                options = {"cache_steps": T, "disable_state_update": True, "intermediate_states_buffer": buffer}
                options["intermediate_state_indices"] = rows
            call(pool, **given, state_batch_indices=of.slots, out=out, **options)
            if T > 1:
                pool[of.slots.long()] = buffer[:, -1]
            outs.append(out.view(B, T, H, V))
        results = [of.oracle(exact[slot], x, row, T) for row, slot in enumerate(of.slots)]
        truth = torch.stack([o for o, _ in results])
        exact[of.slots.long()] = torch.stack([s for _, s in results])
        for name, pair in zip(found, ((outs[0], outs[1]), (outs[0], truth), (outs[1], truth), pools), strict=True):
            found[name] = max(found[name], worst(*pair))
    return found


def main(out: Path, steps: int) -> None:
    """Measure, write ``out``, print a table."""
    results: dict[str, dict] = {}
    for call in (checkpointing, update):
        for T in TOKENS:
            name = f"{'checkpointing_ssu' if call is checkpointing else 'selective_state_update'}, T = {T}"
            try:
                results[name] = call(T, steps)
            except Exception as error:  # an object that was not staged
                results[name] = {"absent": repr(error).splitlines()[0], "trace": traceback.format_exc()[-1500:]}
            print(name, {n: one if isinstance(one, str) else f"{one:.1e}" for n, one in results[name].items() if n != "trace"})
    device = torch.cuda.get_device_name()
    out.write_text(json.dumps({"flashinfer": flashinfer.__version__, "device": device, "steps": steps, "results": results}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
