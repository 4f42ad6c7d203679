"""What ReplayState refuses before anything is launched or written; with ``debug``, also what only the device knows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cursor import PLAN, Cursors, Plan
from .formats import E4M3
from .layout import ACTIVATIONS, Conv, Inputs, Layout, Weights

Size = int | str | None  # of one dimension; a name where only its user knows it
INTEGERS = (torch.int32, torch.int64)
FLAGS = (torch.bool, *INTEGERS)


def describe(x: Tensor | None) -> str:
    """Shape and dtype for a message."""
    return "None" if x is None else f"{list(x.shape)} {x.dtype}"


def expect(
    name: str,
    x: Tensor,
    shape: tuple[Size, ...] | torch.Size,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    inner: bool = True,
) -> None:
    """ValueError unless x has this shape, one of these dtypes, this device and, with ``inner``, a unit inner stride."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tuple(x.shape) != tuple(shape) or x.dtype not in dtypes:
        raise ValueError(f"{name}: expected {list(shape)} {' or '.join(map(str, dtypes))}, got {describe(x)}")
    if x.device != device:
        raise ValueError(f"{name}: expected device {device}, got {x.device}")
    if inner and x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected unit inner stride, got strides {x.stride()}")


def forms(*tensors: Tensor | None) -> tuple[tuple[object, ...] | None, ...]:
    """What checks and compiled kernels depend on of tensors: all but where they are, and of that whether it is aligned."""
    of = [None if x is None else (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16 == 0) for x in tensors]
    return tuple(of)


class Wanted(NamedTuple):
    """What a tensor has to be. given: it must be there, it must not, or (None) either."""

    shape: tuple[Size, ...]
    dtypes: tuple[torch.dtype, ...]
    given: bool | None


def step_tensors(layout: Layout, N: Size) -> dict[str, Wanted]:
    """A step's N packed tokens and a layer's weights, by name."""
    row, H, G, V, K = layout.recurrence, layout.H, layout.G, layout.V, layout.K
    act, gate = (layout.act,), (H, K) if row.per_channel else (H,)
    return {
        "q": Wanted((N, G, K), act, True),
        "k": Wanted((N, G, K), act, True),
        "v": Wanted((N, H, V), act, True),
        "b": Wanted((N, H), ACTIVATIONS, row.beta != "one"),
        "a": Wanted((N, *gate), ACTIVATIONS, row.stores_g),
        "z": Wanted((N, H, V), act, None),
        "A": Wanted((H,), (torch.float32,), row.decay != "ready"),
        "dt_bias": Wanted(gate, ACTIVATIONS, None if row.biased else False),
        "D": Wanted((H,), ACTIVATIONS, None),
    }


def present(device: torch.device | str) -> torch.device:
    """The device with its index; ValueError unless this machine has it."""
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise ValueError(f"device: expected a device of this machine, got {device} and torch finds {found} CUDA GPU; use 'cpu'")
    return torch.empty(0, device=device).device  # torch.device("cuda") equals no tensor's device


def kept_A(A: Tensor | None, layout: Layout, layers: int, device: torch.device) -> None:
    """A [layers, H] where g is derived, else None."""
    derived = layout.recurrence.decay == "derived"
    if derived != (A is not None):
        expected = "[layers, H] fp32" if derived else "None"
        raise ValueError(f"A: expected {expected} for {layout.recurrence.name}, got {describe(A)}")
    if A is not None:
        expect("A", A, (layers, layout.H), torch.float32, device)
        if not A.is_contiguous():
            raise ValueError(f"A: expected contiguous [layers, H], got strides {A.stride()}")


def number_formats(layout: Layout, device: torch.device) -> None:
    """Kernels on this GPU can convert the layout's number formats."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    for name, one in (("state", layout.format), ("read", layout.read_format)):
        if one is not None and any(dtype == E4M3 for _, dtype in one.tensors(layout.V, layout.K).values()):
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise NotImplementedError(
                f"{name} {one.name!r}: expected compute capability 8.9 or higher, which converts e4m3, got {capability}; "
                "supported there: fp32, bf16, fp16, fp16+sr, int8"
            )


class Checks:
    """The checks of one ReplayState; each raises ValueError naming the argument, what was expected and what came.

    Args:
        layout, layers, slots, device, cursors: the state's own.
        debug: also read slots, counts and cursors off the device.
    """

    def __init__(self, layout: Layout, layers: int, slots: int, device: torch.device, cursors: Cursors, debug: bool) -> None:
        self.layout, self.layers, self.most_slots, self.device = layout, layers, slots, device
        self.cursors, self.debug = cursors, debug

    def slots(self, name: str, slots: Tensor, settled: bool = False, distinct: bool = False) -> int:
        """The number of rows of a slots argument; ``settled``: none has a step pending, ``distinct``: none stands twice."""
        expect(name, slots, (slots.numel(),), INTEGERS, self.device)
        if self.debug:
            self.debug_slots(name, slots, self.most_slots, distinct)
            if settled and bool((self.cursors.pending[slots[slots >= 0].long()] % 2 == 1).any()):
                raise ValueError(f"{name}: expected slots whose step was committed, got {slots.tolist()} with a step pending")
        return slots.shape[0]

    def debug_slots(self, name: str, slots: Tensor, most: int, distinct: bool) -> None:
        """Live slots are below ``most``."""
        live = slots[slots >= 0]
        if bool((live >= most).any()):
            raise ValueError(f"{name}: expected slots below {most}, got {slots.tolist()}")
        if distinct and torch.unique(live).numel() != live.numel():
            raise ValueError(f"{name}: expected each live slot once, got {slots.tolist()}")

    def plan(
        self,
        slots: Tensor,
        t: int | Tensor,
        force: Tensor | None,
        cu_seqlens: Tensor | None,
        parents: Tensor | None,
        max_rows: int,
    ) -> None:
        """A plan's arguments."""
        B, T_max = slots.numel(), self.layout.T_max
        expect("slots", slots, (B,), INTEGERS, self.device)
        if B > max_rows:
            raise ValueError(f"slots: expected at most max_rows = {max_rows} rows, got {B}")
        if isinstance(t, int) and not 0 <= t <= T_max:
            raise ValueError(f"t: expected 0 ... T_max = {T_max}, got {t}")
        for name, x, n, kind in (
            ("t", t, B, INTEGERS),
            ("force", force, B, FLAGS),
            ("cu_seqlens", cu_seqlens, B + 1, INTEGERS),
        ):
            if isinstance(x, Tensor):
                expect(name, x, (n,), kind, self.device)
        if cu_seqlens is not None and (isinstance(t, Tensor) or t != 1):
            raise ValueError("t: expected to be left alone with cu_seqlens, which says the tokens of each row")
        self.of_tree("parents", parents, B)

    def debug_plan(self, slots: Tensor, T: int, t: Tensor | None, cu_seqlens: Tensor | None, parents: Tensor | None) -> None:
        """Slots, tokens per row, the cursors of the rows' slots and what tokens follow are in range."""
        self.slots("slots", slots, settled=True, distinct=True)
        for name, n in (
            ("t", None if t is None else t[slots >= 0]),
            ("cu_seqlens", None if cu_seqlens is None else cu_seqlens.diff()),
        ):
            if n is not None and bool(((n < 0) | (n > self.layout.T_max)).any()):
                raise ValueError(f"{name}: expected 0 ... T_max = {self.layout.T_max} tokens a row, got {n.tolist()}")
        live = slots[slots >= 0].long()
        for name, most in (("start", self.layout.R - 1), ("count", self.layout.W)):
            x = getattr(self.cursors, name)[live]
            if bool(((x < 0) | (x > most)).any()):
                raise ValueError(f"cursors.{name}: expected 0 ... {most}, got {x.tolist()} in slots {live.tolist()}")
        if parents is not None:
            self._debug_parents(slots, T, t, cu_seqlens, parents)

    def of_tree(self, name: str, x: Tensor | None, B: int) -> None:
        """Integers [B, T_max], contiguous, if any."""
        if x is not None:
            expect(name, x, (B, self.layout.T_max), INTEGERS, self.device)
            if not x.is_contiguous():
                raise ValueError(f"{name}: expected contiguous [B, T_max], got strides {x.stride()}")

    def _debug_parents(self, slots: Tensor, T: int, t: Tensor | None, cu_seqlens: Tensor | None, parents: Tensor) -> None:
        """The tokens that live rows take follow an earlier one or the committed history."""
        t = torch.full_like(slots, T) if t is None else t
        t = torch.where(slots >= 0, t if cu_seqlens is None else cu_seqlens.diff(), 0)
        i = torch.arange(parents.shape[1], device=parents.device)
        wrong = ((i < t[:, None]) & ((parents < -1) | (parents >= i))).nonzero().tolist()
        if wrong:
            row, token = wrong[0]
            raise ValueError(
                f"parents: expected -1 ... {token - 1} for token {token}, got {int(parents[row, token])} in row {row}"
            )

    def commit(self, plan: Plan, accepted: Tensor | None, path: Tensor | None) -> None:
        """A commit's arguments."""
        B = plan.rows.shape[0]
        if accepted is not None:
            expect("accepted", accepted, (B,), INTEGERS, self.device)
        if (path is None) != (plan.tree is None):
            wanted = "None for a plan without parents" if plan.tree is None else f"[{B}, T_max] for a plan with parents"
            raise ValueError(f"path: expected {wanted}, got {describe(path)}")
        self.of_tree("path", path, B)

    def debug_commit(self, plan: Plan, accepted: Tensor | None, path: Tensor | None) -> None:
        """Live rows keep no more tokens than they have, and of a tree a path from a root down."""
        slot, t = (plan.rows[:, PLAN.index(name)] for name in ("slot", "t"))
        kept = t if accepted is None else accepted
        wrong = ((slot >= 0) & ((kept < 0) | (kept > t))).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"accepted: expected 0 ... t, got {int(kept[wrong[0]])} of {int(t[wrong[0]])} in row {wrong[0]}")
        if path is None or plan.tree is None or not path.numel():
            return
        i = torch.arange(path.shape[1], device=path.device)
        above = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
        parent = plan.tree[:, 0].gather(1, path.clamp(0, path.shape[1] - 1).long())
        off = (path < 0) | (path >= t[:, None]) | (parent != above)
        wrong = (off & (i < torch.where(slot >= 0, kept, 0)[:, None])).nonzero().tolist()
        if wrong:
            row, at = wrong[0]
            child = f"a child of token {int(above[row, at])}" if at else "a token that follows the committed history"
            raise ValueError(f"path: expected {child} at {at}, got {int(path[row, at])} of {int(t[row])} in row {row}")

    def debug_empty(self, slots: Tensor, first: bool) -> None:
        """The slots' rings hold no record; with ``first`` they also start at row 0."""
        live = slots[slots >= 0].long()
        for name in ("count", "start") if first else ("count",):
            x = getattr(self.cursors, name)[live]
            if bool(x.any()):
                raise ValueError(f"slots: expected {name} 0 (reset{'' if first else ' or fold'} them first), got {x.tolist()}")

    def layer(self, layer: int) -> None:
        """There is such a layer."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer: expected 0 ... {self.layers - 1}, got {layer}")

    def keys(self, keys: Tensor | None, B: int) -> None:
        """One integer a row."""
        if keys is not None:
            expect("keys", keys, (B,), INTEGERS, self.device)

    def n(self, slots: Tensor, n: Tensor | None) -> None:
        """Record counts of materialize: one integer a row, in debug mode at most the slot's count."""
        if n is None:
            return
        expect("n", n, (slots.shape[0],), INTEGERS, self.device)
        if self.debug:
            count = self.cursors.count[slots.long().clamp(min=0)]
            wrong = ((slots >= 0) & ((n < 0) | (n > count))).nonzero().flatten().tolist()
            if wrong:
                raise ValueError(f"n: expected 0 ... count = {int(count[wrong[0]])} in row {wrong[0]}, got {int(n[wrong[0]])}")

    def states(self, name: str, states: Tensor) -> None:
        """A caller's states [L, B, H, V, K]."""
        shape = (self.layout.H, self.layout.V, self.layout.K)
        if states.dim() != 5 or states.shape[2:] != shape:
            raise ValueError(f"{name}: expected [L, B, H, V, K] with H, V, K = {list(shape)}, got {list(states.shape)}")
        if states.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: expected fp32, bf16 or fp16, got {states.dtype}")
        if states.stride(-1) != 1 or states.stride(-2) != self.layout.K:
            raise ValueError(f"{name}: expected contiguous [V, K], got strides {states.stride()}")
        if states.device != self.device:
            raise ValueError(f"{name}: expected device {self.device}, got {states.device}")

    def loaded(self, layers: int, slots: Tensor, states: Tensor, conv: Tensor | None) -> None:
        """A caller's states and convolution windows, for that many layers of the slots."""
        B, spec = slots.shape[0], self.layout.conv
        self.states("states", states)
        if states.shape[:2] != (layers, B):
            raise ValueError(f"states: expected [{layers}, {B}, ...], got {list(states.shape)}")
        if (conv is None) != (spec is None):
            raise ValueError(f"conv: expected {'[L, B, width - 1, C]' if spec else 'None'}, got {describe(conv)}")
        if conv is not None and spec is not None:
            expect("conv", conv, (layers, B, spec.width - 1, spec.channels), ACTIVATIONS, self.device, inner=False)

    def step(self, tokens: int | None, x: Inputs, w: Weights, out: Tensor | None) -> None:
        """A step's tokens and weights: which are there, their shapes, dtypes and strides."""
        N = x.v.shape[0] if tokens is None and x.v is not None else tokens
        wanted = step_tensors(self.layout, N)
        for name, tensor in (*x._asdict().items(), *w._asdict().items()):
            one = wanted[name]
            if one.given not in (None, tensor is not None):
                expected = f"{list(one.shape)}" if one.given else "None"
                raise ValueError(f"{name}: expected {expected} for {self.layout.recurrence.name}, got {describe(tensor)}")
            if tensor is not None:
                expect(name, tensor, one.shape, one.dtypes, self.device)
                if name in w._fields and not tensor.is_contiguous():
                    raise ValueError(f"{name}: expected contiguous, got strides {tensor.stride()}")
        if out is not None:
            expect("out", out, x.v.shape, self.layout.act, self.device)

    def conv(self, tokens: int | None, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """A convolution's inputs and weights."""
        spec = self.convolution()
        expect("x", x, (x.shape[0] if tokens is None else tokens, spec.channels), self.layout.act, self.device)
        expect("weight", weight, (spec.channels, spec.width), ACTIVATIONS, self.device)
        if not weight.is_contiguous():
            raise ValueError(f"weight: expected contiguous [C, width], got strides {weight.stride()}")
        if bias is not None:
            expect("bias", bias, (spec.channels,), ACTIVATIONS, self.device)
        expect("out", out, x.shape, x.dtype, self.device)

    def convolution(self) -> Conv:
        """The layout's convolution."""
        if self.layout.conv is None:
            raise ValueError(
                "layout: expected conv=Conv(channels, width), got None: this engine keeps the convolution window itself"
            )
        return self.layout.conv
