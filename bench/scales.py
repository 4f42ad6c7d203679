"""Which values should share a scale? Error of a state read in each format, per byte it takes.

usage: python -m bench.scales [--tokens N] [--seeds N] [--out FILE]

States are those of the recurrences after N random tokens with the gates models are initialised with: A_log of uniform(1, 16),
softplus(dt_bias) log-uniform in 0.001 ... 0.1. "uneven": channels of k, q and v have log-normal magnitudes (sigma 1), as
trained models' have, and k and q pass through silu; "even": all channels alike. Axis K: a scale covers values along K in one
row of V; axis V: along V in one column of K, so that writing it needs the maximum over rows of V.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import lru_cache

import torch
from torch import Tensor

from replayssm import GDN, KDA, MAMBA2, formats, reference
from replayssm.bench import tables
from tests.cases import relative

SIZES = {"mamba2": (MAMBA2, 64, 128), "gdn": (GDN, 128, 128), "kda": (KDA, 128, 128)}  # V, K as served
BLOCKS = (16, 32, 64, formats.ROW)
HEADS = 4


@lru_cache
def states(name: str, uneven: bool, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """(states [H, V, K] after `tokens` tokens, 64 further queries [64, H, K])."""
    row, V, K = SIZES[name]
    H, generator = HEADS, torch.Generator().manual_seed(seed)

    def channels(n: int) -> Tensor:
        return torch.exp(torch.randn(H, n, generator=generator)) if uneven else torch.ones(H, n)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = torch.nn.functional.silu if uneven else torch.nn.Identity()
    magnitude = channels(K)
    q, k = (shape(randn(tokens + 64, H, K) * magnitude) for _ in range(2))
    v = randn(tokens, H, V) * channels(V)
    dt = torch.exp(torch.rand(H, generator=generator) * 4.6 - 6.9)
    gate = (tokens, H, K) if row.per_channel else (tokens, H)
    bias = dt + torch.log(-torch.expm1(-dt))  # softplus(bias) = dt
    x = {"q": q[:tokens], "k": k[:tokens], "v": v, "b": randn(tokens, H)}
    if row.stores_g:
        x["a"] = randn(*gate)
    w = {"A": -(torch.rand(H, generator=generator) * 15 + 1)}
    w["dt_bias"] = bias[:, None].expand(H, K) if row.per_channel else bias
    _, s = reference.decode(row, torch.zeros(H, V, K), **x, **w, dtype=torch.float32)
    return s, torch.nn.functional.normalize(q[tokens:], dim=-1)


def stored(s: Tensor, one: formats.Format, axis: str) -> Tensor:
    """What a state decodes to, its scales along K or along V."""
    return one.decode(one.encode(s)) if axis == "K" else one.decode(one.encode(s.mT.contiguous())).mT


def measure(base: str, axis: str, block: int, family: str, uneven: bool, tokens: int, seeds: int) -> dict:
    """One row: bytes a value and relative errors of state and readout, means over the seeds' states."""
    one = formats.named(base if base == "nvfp4" else f"{base}:{block or 'row'}")
    state, output = [], []
    for seed in range(seeds):
        s, q = states(family, uneven, tokens, seed)
        read = stored(s, one, axis)
        state.append(relative(read, s))
        output.append(relative(torch.einsum("hvk,thk->thv", read, q), torch.einsum("hvk,thk->thv", s, q)))
    V, K = s.shape[1:] if axis == "K" else s.shape[:0:-1]
    size = one.bytes(V, K) / (V * K)
    error = sum(output) / seeds
    return {
        "format": base,
        "axis": axis,
        "block": block or "row",
        "family": family,
        "channels": "uneven" if uneven else "even",
        "bytes_per_value": size,
        "state_error": sum(state) / seeds,
        "output_error": error,
        "error_bytes": error * size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out")
    args = parser.parse_args()
    kinds = [(base, axis, block) for base in ("int8", "e4m3") for axis in "KV" for block in BLOCKS]
    kinds += [("nvfp4", axis, 16) for axis in "KV"]
    rows = []
    for (base, axis, block), family, uneven in itertools.product(kinds, SIZES, (False, True)):
        rows.append(measure(base, axis, block, family, uneven, args.tokens, args.seeds))
    print(tables.scales(rows))
    if args.out:
        header = {"device": "CPU, backend torch", "torch": torch.__version__, "tokens": args.tokens, "seeds": args.seeds}
        with open(args.out, "w") as file:
            json.dump({"header": header, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
