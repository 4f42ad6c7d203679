"""Shapes, dtypes, strides and bytes: spelled once more, by hand, against what Layout allocates, checks and counts."""

import dataclasses
import math
import random

import pytest
import torch

from replayssm import GDN, KDA, MAMBA2, Buffers, Conv, Layout, schedule
from replayssm.cursor import committed, flush_rule
from tests.cases import AWKWARD, FAMILY, MODELS, READY

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SMALL = [*FAMILY.values(), *READY.values()]
W, T_MAX, R, C = 6, 2, 11, 8
LAYERS, SLOTS = 2, 3


def small(case, **kwargs) -> Layout:
    """A layout in which every dtype differs from its default and R is larger than needed."""
    sizes = {"W": W, "T_max": T_MAX, "R": R, "act": BF16, "state": "fp16", "u": FP16, "conv": Conv(C, 4)}
    return case.layout(**sizes | kwargs)


def expected(case) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """name: (shape for one slot, dtype) as design and issue spell it, families by name."""
    family, H, G, V, K = case.recurrence.name, case.H, case.G, case.V, case.K
    KG = K if family in ("kda", "kda_safe", "gla") else 1
    tensors = {"state": ((H, V, K), FP16), "k": ((G, R, K), BF16), "v": ((H, R, V), BF16), "conv": ((1, R, C), BF16)}
    if family != "gla":
        tensors["beta"] = ((H, R), FP32)
    if family != "mamba2":
        tensors |= {"g": ((H, R, KG), FP32), "gsum": ((H, R, KG), FP32)}
    if family in ("gdn", "kda", "kda_safe"):
        tensors |= {"u": ((H, R, V), FP16), "rnorm": ((G, R), FP32)}
    return tensors


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_allocate(case, order):
    layout, tensors = small(case, order=order), expected(case)
    buffers = layout.allocate(LAYERS, SLOTS, "cpu")
    layout.check(buffers)
    for name, x in buffers._asdict().items():
        if name not in tensors:
            assert x is None, name
            continue
        shape, dtype = tensors[name]
        assert (tuple(x.shape), x.dtype) == ((LAYERS, SLOTS, *shape), dtype), name
        assert not x.any(), name
        size = math.prod(shape)
        if order == "head" or name in ("state", "conv"):
            inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        else:
            heads, dim = shape[0], math.prod(shape[2:])
            inner = [dim, heads * dim] + [1] * (len(shape) - 2)
        assert list(x.stride()) == [SLOTS * size, size, *inner], name


def test_without_a_convolution_none_is_kept():
    layout = small(FAMILY["gdn"], conv=None, R=0)
    assert layout.R == W + T_MAX and "conv" not in layout.tensors and layout.allocate(1, 1, "cpu").conv is None


def test_ring_rows_default_to_the_minimum():
    """W + T_max; with a convolution, the inputs before a full window too."""
    layout = FAMILY["gdn"].layout
    assert layout(W=16).R == 17 and layout(W=16, T_max=8).R == 24
    assert [layout(W=16, T_max=2, conv=Conv(C, width)).R for width in (2, 3, 4)] == [18, 18, 19]
    assert layout(W=16, conv=Conv(C)).with_window(5).R == 8


def test_u_defaults_to_the_width_of_activations():
    assert [FAMILY["gdn"].layout(act=act).u for act in (FP32, BF16, FP16)] == [FP32, FP16, FP16]
    assert FAMILY["gdn"].layout(act=BF16, u=FP32).u is FP32


def test_check_takes_an_engines_strides():
    """Slots wider than their tensors, heads and rows apart: adopted as they are."""
    layout = small(FAMILY["gdn"])
    wide = {}
    for name, (shape, dtype) in layout.tensors.items():
        heads, *rest = shape
        inner = rest if name == "state" else [2 * rest[0], *rest[1:]]
        x = torch.zeros(LAYERS, SLOTS + 1, heads + 1, *inner, dtype=dtype)[:, 1:, 1:]
        wide[name] = x if name == "state" else x[:, :, :, ::2]
    layout.check(Buffers(*(wide.get(name) for name in Buffers._fields)))


def wrong_tensors():
    """(family, name, change of that tensor, what the message says after the name)"""
    yield "gdn", "k", lambda x: x[:, :, :, :-1], r"expected \[2, 3, 1, 11, 32\] torch.bfloat16, got \[2, 3, 1, 10, 32\]"
    yield "gdn", "v", lambda x: x.float(), r"expected \[2, 3, 2, 11, 32\] torch.bfloat16, got .* torch.float32"
    yield "gdn", "g", lambda x: x[:1], r"expected \[2, 3, 2, 11, 1\] torch.float32, got \[1, 3, "
    yield "gdn", "gsum", lambda x: x[..., 0], r"expected \[2, 3, 2, 11, 1\] torch.float32, got \[2, 3, 2, 11\]"
    yield "gdn", "beta", lambda x: x[:, :2], r"expected \[2, 3, 2, 11\] torch.float32, got \[2, 2, 2, 11\]"
    yield "gdn", "rnorm", lambda x: x.half(), r"expected \[2, 3, 1, 11\] torch.float32, got .* torch.float16"
    yield "gdn", "u", lambda x: None, r"expected \[2, 3, 2, 11, 32\] torch.float16, got None"
    yield "gdn", "conv", lambda x: x.to("meta"), "expected device cpu, got meta"
    yield "gdn", "u", lambda x: x.mT.contiguous().mT, r"expected contiguous rows, got strides \(2112, 704, 352, 1, 11\)"
    yield "gdn", "state", lambda x: x.mT.contiguous().mT, r"expected contiguous \[V, K\], got strides"
    yield "gdn", "state", lambda x: torch.cat([x, x], 4)[..., :32], r"expected contiguous \[V, K\], got strides"
    yield "gdn", "state", lambda x: x[0], r"expected \[L, S, H, V, K\], got \[3, 2, 32, 32\]"
    yield "gdn", "state", lambda x: x.float(), r"expected \[2, 3, 2, 32, 32\] torch.float16, got .* torch.float32"
    yield "mamba2", "g", lambda x: torch.zeros(2, 3, 2, 11, 1), r"expected None for mamba2, got \[2, 3, 2, 11, 1\]"
    yield "gla", "beta", lambda x: torch.zeros(2, 3, 2, 11), r"expected None for gla, got \[2, 3, 2, 11\]"
    yield "kda", "g", lambda x: x[..., :1], r"expected \[2, 3, 2, 11, 32\] torch.float32, got \[2, 3, 2, 11, 1\]"


def test_allocate_around_an_engines_checkpoints():
    """Its own tensor is the state, with whatever slot stride it has; only the rest is new."""
    layout = Layout(**SIZES | dict(recurrence=GDN))
    shape, dtype = layout.tensors["state"]
    held = torch.ones(LAYERS, 2 * SLOTS, *shape, dtype=dtype)[:, ::2]
    buffers = layout.allocate(LAYERS, SLOTS, "cpu", state=held)
    layout.check(buffers)
    assert buffers.state is held and bool((held == 1).all())
    assert sum(x.nbytes for x in buffers[1:] if x is not None) == LAYERS * SLOTS * (layout.slot_bytes - layout.state_bytes)


@pytest.mark.parametrize("family, name, change, message", list(wrong_tensors()))
def test_check_refuses_by_name(family, name, change, message):
    layout = small(FAMILY[family])
    buffers = layout.allocate(LAYERS, SLOTS, "cpu")
    with pytest.raises(ValueError, match=rf"^{name}: {message}"):
        layout.check(buffers._replace(**{name: change(getattr(buffers, name))}))


SIZES = dict(recurrence=GDN, H=4, G=2, V=32, K=32, W=8)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(recurrence="mamba3"), ValueError, "recurrence: expected one of .*'gdn'.* got 'mamba3'"),
        *(({name: 0}, ValueError, f"{name}: expected >= 1, got 0") for name in ("H", "G", "V", "K", "W", "T_max")),
        (dict(G=3), ValueError, "G: expected a divisor of H = 4, got 3"),
        (dict(G=8), ValueError, "G: expected a divisor of H = 4, got 8"),
        (dict(V=40), NotImplementedError, "V: supported are multiples of 16 up to 256, got 40"),
        (dict(K=8), NotImplementedError, "K: supported are multiples of 16 up to 256, got 8"),
        (dict(K=272), NotImplementedError, "K: supported are multiples of 16 up to 256, got 272"),
        (dict(V=272), NotImplementedError, "V: supported are multiples of 16 up to 256, got 272"),
        (dict(T_max=9), ValueError, "T_max: expected at most W = 8, got 9"),
        (dict(R=8), ValueError, "R: expected at least 9 .*got 8"),
        (dict(T_max=4, R=11), ValueError, "R: expected at least 12 .*got 11"),
        (dict(R=-1), ValueError, "R: expected at least 9 .*got -1"),
        (dict(R=10, conv=Conv(C)), ValueError, r"R: expected at least 11 .*width=4.* got 10"),
        (dict(state="fp64"), NotImplementedError, "state format: expected one of .*'fp16'.* got 'fp64'"),
        (dict(act=torch.float64), NotImplementedError, "act: supported are .*torch.bfloat16.* got torch.float64"),
        (dict(u=torch.int8), NotImplementedError, "u: supported are .*torch.float16.* got torch.int8"),
        (dict(order="row"), ValueError, "order: expected 'head' or 'token', got 'row'"),
    ],
    ids=lambda x: "-".join(f"{n}={v}" for n, v in x.items()) if isinstance(x, dict) else "",
)  # fmt: skip
def test_refused_layouts(change, error, message):
    with pytest.raises(error, match=message):
        Layout(**SIZES | change)


def test_sizes_that_look_odd_and_are_served():
    """K up to 256, no power of two, T_max = W, a ring larger than needed."""
    for V, K in ((80, 128), (256, 256), (48, 80), (16, 16)):
        Layout(**SIZES | dict(V=V, K=K, W=7, T_max=7, R=31)).allocate(1, 1, "cpu")


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_spec_round_trip(case, order):
    for layout in (case.layout(), small(case, order=order), small(case, conv=None, order=order)):
        assert Layout.parse(layout.spec) == layout
        assert "\n" not in layout.spec
    by_name = Layout("gdn", 4, 2, 32, 32)
    assert by_name == Layout(GDN, 4, 2, 32, 32) and Layout.parse(by_name.spec) == by_name


@pytest.mark.parametrize("conv", [None, Conv(C)], ids=["", "conv"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_bytes_are_those_of_the_allocated_tensors(case, conv):
    layout = small(case, conv=conv)
    sizes = {name: x.nbytes for name, x in layout.allocate(1, 1, "cpu")._asdict().items() if x is not None}

    def row(*names):
        return sum(sizes.get(name, 0) for name in names) / R

    assert layout.state_bytes == sizes["state"]
    assert layout.fold_bytes == row("k", "v", "beta", "g")
    assert layout.record_bytes == row("k", "v", "beta", "g", "u", "gsum", "rnorm")
    values = ("u",) if case.recurrence.delta else ("v", "beta")
    assert layout.read_bytes == row("k", "gsum", "rnorm", *values)
    assert layout.slot_bytes == sum(sizes.values())


def test_step_bytes_by_hand():
    """One GDN layer, two value heads a group, bf16 activations, fp32 checkpoint and u.

    S = 4 128 128 4 = 262144. Per token: io = 2 (2 2 128 + 2 4 128 + 4 + 4) = 3088; a record is k 512, v 1024, beta 16,
    g 16, u 2048, gsum 16, rnorm 8 = 3640, of which a readout reads k u gsum rnorm = 2584 and a fold k v beta g = 1568.
    """
    layout = Layout(GDN, 4, 2, 128, 128, W=16, T_max=4, u=FP32)
    one = layout.step_bytes()
    assert one.io.total == 3088 and one.io.written == 2 * 4 * 128
    assert (one.conventional.read, one.conventional.written) == (262144, 262144)
    assert one.replay.read == 262144 + 7.5 * 2584 + (262144 + 16 * 1568) / 16
    assert one.replay.written == 3640 + 262144 / 16
    assert layout.step_bytes(gated=True).io.read == one.io.read + 2 * 4 * 128
    four = layout.step_bytes(tokens=4)  # counts 4, 8, 12 and 16, the last of which flushes
    assert four.io.total == 4 * 3088
    assert (four.conventional.read, four.conventional.written) == (262144, 4 * 262144)
    assert four.replay.total == 262144 + 6 * 2584 + 4 * 3640 + (2 * 262144 + 16 * 1568) / 4
    assert layout.with_window(4).step_bytes(tokens=4).replay.total == 262144 + 4 * 3640 + 2 * 262144 + 4 * 1568


@pytest.mark.parametrize(("tokens", "window"), [(1, 16), (2, 2), (2, 16), (4, 24), (8, 16), (16, 16), (16, 40)])
def test_step_bytes_with_random_acceptance(tokens, window):
    """Drafts stay with probability 0.75 until the first that does not: the model against 200,000 simulated steps."""
    layout = FAMILY["gdn"].layout(W=window, T_max=tokens, act=BF16)
    draw, count, total, steps = random.Random(0), 0, 0, 200_000
    for _ in range(steps):
        flush = bool(flush_rule(0, count, tokens, window, 0))
        total += layout.state_bytes + layout.record_bytes * tokens
        total += 2 * layout.state_bytes + count * layout.fold_bytes if flush else count * layout.read_bytes
        accepted = 1
        while accepted < tokens and draw.random() < 0.75:
            accepted += 1
        _, count = committed(0, count, int(flush), accepted, layout.R)
    assert layout.step_bytes(tokens, 0.75).replay.total == pytest.approx(total / steps, rel=2e-3)


def test_snapshot_bytes_by_hand():
    """The same layer, S = 262144 and T_max = 4; inputs of a convolution take 8 2 = 16, width - 1 + T of them."""
    layout = Layout(GDN, 4, 2, 128, 128, W=16, T_max=4)
    assert layout.snapshot_bytes() == 5 * 262144
    assert dataclasses.replace(layout, conv=Conv(C, 4)).snapshot_bytes(2) == 3 * 262144 + 5 * 16


@pytest.mark.parametrize("window", [1, 2, 7, 16])
@pytest.mark.parametrize("case", [*MODELS, *AWKWARD], ids=str)
def test_step_bytes_are_the_mean_of_real_steps(case, window):
    """The model equals what plain decode reads and writes over whole windows, counted by the real cursor rules."""
    layout = case.layout(W=window, act=BF16)
    S, start, count, total, steps = layout.state_bytes, 0, window, 0, 5 * window
    for _ in range(steps):
        flush = bool(flush_rule(0, count, 1, window, 0))
        readout = 0 if flush else count * layout.read_bytes
        total += S + readout + layout.record_bytes + (2 * S + count * layout.fold_bytes if flush else 0)
        start, count = committed(start, count, int(flush), 1, layout.R)
    assert layout.step_bytes().replay.total == pytest.approx(total / steps, rel=1e-12)


@pytest.mark.parametrize("case", [*MODELS, *AWKWARD], ids=str)
def test_best_window_is_near_the_root_of_4S_over_r(case):
    """A flush reads and writes the state, 2 S / W a step; readouts find (W - 1) / 2 records."""
    for state in ("fp32", "bf16"):
        layout = case.layout(act=BF16, u=BF16, state=state)
        root = math.sqrt(4 * layout.state_bytes / layout.read_bytes)
        assert abs(schedule.best_window(layout) - root) <= 1


def test_best_windows_of_served_layers():
    """fp32 checkpoints, bf16 activations and u, heads as served: Nemotron-3, Qwen3.5, Kimi."""
    layers = ((MAMBA2, 64, 8, 64, 128), (GDN, 32, 16, 128, 128), (KDA, 32, 32, 128, 128))
    assert [schedule.best_window(Layout(*sizes, u=BF16)) for sizes in layers] == [28, 26, 16]


def test_best_window_holds_the_draft():
    layout = Layout(KDA, 32, 32, 128, 128, W=32, T_max=16)
    assert schedule.best_window(layout) == 16
    with pytest.raises(ValueError, match="windows: expected one of at least T_max = 16, got range"):
        schedule.best_window(layout, range(1, 16))


def test_layouts_are_values():
    """Equal layouts hash alike, as caches of launches and specs need; with_window changes window and ring alone."""
    a, b = (small(FAMILY["kda"]) for _ in range(2))
    assert a == b and hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.W = 3
    assert a.with_window(9) == dataclasses.replace(a, W=9, R=12)
