"""Exports: files that say what they are, other layouts, other tensor-parallel degrees."""

import dataclasses
import json
import os

import pytest
import torch

from replayssm import Conv, Export, ReplayState
from replayssm.layout import STORED
from tests.cases import FAMILY, Case, inputs, weights
from tests.harness import DEVICE, Requests, rows, sliced

B, LAYERS = 3, 2


def noise(case: Case = FAMILY["gdn"], **kwargs) -> Export:
    """Requests of finite noise, their rings wrapped."""
    layout = case.layout(**{"W": 4, "conv": Conv(2 * case.G * case.K + case.H * case.V)} | kwargs)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for field, (shape, dtype) in layout.tensors.items():
        x = torch.rand(LAYERS, B, *shape, generator=generator)
        tensors[field] = (x * 100).to(dtype) if dtype in (torch.uint8, torch.int8) else x.to(dtype)
    cursors = {"start": [6, 0, 2], "count": [4, 0, 1], "flushes": [9, 0, 3]}
    tensors |= {f"cursor.{one}": torch.tensor(x, dtype=torch.int32) for one, x in cursors.items()}
    return Export(layout, tensors | {"cursor.key": torch.arange(B) + 2**40})


def equal(one: Export, other: Export) -> bool:
    """The same layout, the same bits."""
    same = one.layout == other.layout and one.tensors.keys() == other.tensors.keys()
    return same and all(torch.equal(rows(x), rows(other.tensors[name])) for name, x in one.tensors.items())


# ---- files ----------------------------------------------------------------------------------------------------------


FORMATS = [{}, {"state": "nvfp4", "read": "int8"}, {"state": "e4m3+sr", "act": torch.bfloat16, "order": "token", "seed": 3}]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: str(formats.get("state")))
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_round_trip(case, formats, tmp_path):
    """A file says its layout itself and gives every bit back; a view of other strides is no other request."""
    one = noise(case, **formats)
    assert equal(Export.from_bytes(one.to_bytes()), one)
    strided = {field: x.transpose(0, 1).contiguous().transpose(0, 1) for field, x in one.tensors.items() if x.dim() > 1}
    dataclasses.replace(one, tensors=one.tensors | strided).save(tmp_path / "requests", model="qwen")
    assert equal(Export.load(tmp_path / "requests", model="qwen"), one)


def changed(data: bytes, **header: str | None) -> bytes:
    """The file with other words in its header."""
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])
    about["__metadata__"] = {key: x for key, x in (about["__metadata__"] | header).items() if x is not None}
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def test_files_that_are_refused():
    good = noise().to_bytes(model="a")
    size = 8 + int.from_bytes(good[:8], "little")
    assert equal(Export.from_bytes(changed(good), "a"), noise())
    for cut in (0, 7, size - 1, size, len(good) - 1):
        with pytest.raises(ValueError, match="^exported: expected a safetensors file, got"):
            Export.from_bytes(good[:cut], "a")
    for at in (size, size + 12345, len(good) - 1):
        damaged = bytearray(good)
        damaged[at] ^= 16
        with pytest.raises(ValueError, match="damaged$"):
            Export.from_bytes(bytes(damaged), "a")
    other = noise(W=5).layout.spec
    for data, message in (
        (changed(good, layout=other), "damaged$"),
        (changed(good, replayssm="2"), "^exported: expected version 1, got 2"),
        (changed(good, replayssm=None), "another program's file$"),
    ):
        with pytest.raises(ValueError, match=message):
            Export.from_bytes(data, "a")
    for model in ("", "b"):
        with pytest.raises(ValueError, match=f"^exported: expected model '{model}', got 'a'"):
            Export.from_bytes(good, model)


@pytest.mark.parametrize("change, message", [
    ({"state": None}, "expected \\['beta', "),
    ({"k": torch.zeros(LAYERS, B, 1, 4, 32)}, "expected k \\[2, 3, 1, 8, 32\\] torch.float32, got \\[2, 3, 1, 4, 32\\]"),
    ({"state": torch.zeros(3)}, "expected state \\[L, B, H, V, K\\]"),
    ({"cursor.count": torch.tensor([5, 0, 0], dtype=torch.int32)}, "expected count 0 ... 4, got \\[5, 0, 0\\]"),
    ({"cursor.start": torch.tensor([0, -1, 0], dtype=torch.int32)}, "expected start 0 ... 6, got \\[0, -1, 0\\]"),
], ids=["missing", "shape", "rank", "count", "start"])  # fmt: skip
def test_tensors_that_cannot_be(change, message):
    one = noise()
    if "k" in change:
        one = noise(W=4, conv=None, T_max=4)
    tensors = {name: x for name, x in (one.tensors | change).items() if x is not None}
    wrong = dataclasses.replace(one, tensors=tensors)
    state = ReplayState(one.layout, LAYERS, 3, DEVICE, "torch")
    with pytest.raises(ValueError, match=message):
        state.import_(torch.arange(3, device=DEVICE), wrong)
    assert not state.buffers.k.any()
    if "rank" not in message:
        with pytest.raises(ValueError, match=message):
            Export.from_bytes(wrong.to_bytes())


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """Wherever it dies, the path holds a whole file."""
    old, new, path = noise(), noise(W=5), tmp_path / "requests"
    old.save(path)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, name, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            new.save(path)
        assert equal(Export.load(path), old) and os.listdir(tmp_path) == ["requests"]
    new.save(path)
    assert equal(Export.load(path), new)


def test_without_safetensors(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'replayssm\\[export\\]'"):
        noise().to_bytes()


# ---- other layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"W": 4}, {"W": 9, "order": "token"}, {"R": 17, "T_max": 3}], ids=str)
@pytest.mark.parametrize("case", FAMILY.values(), ids=str)
def test_a_request_goes_on_in_another_layout(case, change):
    """Mid-window, its ring wrapped, into page-strided buffers full of NaN: outputs and state as if it had never moved."""
    here = Requests(case.layout(W=6, stagger=False), [0, 1], "torch")
    for _ in range(7):
        here.decode([0, 1])
    for _ in range(3):
        here.decode([1])
    layout = case.layout(**{"W": 6, "stagger": False} | change)
    pages = layout.allocate(1, 5, DEVICE)
    buffers = type(pages)(*(None if x is None else torch.cat([x, x + 1], 1)[:, ::2] for x in pages))
    there = Requests(layout, [3, 1], "torch", buffers=buffers)
    there.state.import_(there.tensor([3, 1]), here.state.export(here.tensor([0, 1])))
    assert there.state.cursors.count.tolist() == [0, 4, 0, 1, 0]
    there.w, there.step_weights, there.initial = here.w, here.step_weights, here.initial
    there.tokens = {3: here.tokens[0], 1: here.tokens[1]}
    there.outputs = {3: here.outputs[0], 1: here.outputs[1]}
    for _ in range(5):
        there.decode([1, 3])
    there.check(3e-5)


def test_the_convolution_goes_along():
    """The window before and after any record is the one it was, whatever the number of ring rows."""
    one, at = noise(), torch.arange(B)
    state = ReplayState(one.layout, LAYERS, B, "cpu", "torch")
    state.import_(at, one)
    for W in (4, 6, 11):
        layout = dataclasses.replace(one.layout, W=W, T_max=W, R=0)
        other = ReplayState(layout, LAYERS, B, "cpu", "torch")
        other.import_(at, one)
        for n in (None, torch.zeros(B, dtype=torch.int32)):
            assert torch.equal(other.conv_window(at, n), state.conv_window(at, n))
        assert torch.equal(other.materialize(at), state.materialize(at))


@pytest.mark.parametrize("formats", [{"state": "bf16"}, {"state": "e4m3+sr", "read": "nvfp4"}, {"read": "int8"}], ids=str)
def test_formats_from_fp32_are_those_of_a_load(formats):
    one = noise(FAMILY["kda"])
    layout = dataclasses.replace(one.layout, **formats, u=torch.float16)
    there, loaded = (ReplayState(layout, LAYERS, B, "cpu", "torch") for _ in range(2))
    at = torch.arange(B)
    there.import_(at, one)
    conv = torch.zeros(LAYERS, B, layout.conv.width - 1, layout.conv.channels)
    loaded.load(at, one.tensors["state"], conv, one.tensors["cursor.key"])
    for name in STORED:
        ours, expected = getattr(there.buffers, name), getattr(loaded.buffers, name)
        assert (ours is None) == (expected is None)
        assert ours is None or torch.equal(rows(ours), rows(expected)), name


def test_what_is_rounded_is_not_rounded_again():
    one = noise(state="bf16", read="int8")
    for change in ({"state": "fp16"}, {"state": "fp32"}, {"read": None}):
        layout = dataclasses.replace(one.layout, **change)
        with pytest.raises(NotImplementedError, match="got 'bf16', 'int8'; supported from fp32 alone"):
            one.to(layout)


@pytest.mark.parametrize("change, message", [
    ({"K": 16}, "exported: expected layout.K 16, got 32"),
    ({"H": 4}, "exported: expected layout.H 4, got 2; shard or merge first"),
    ({"act": torch.bfloat16}, "exported: expected layout.act torch.bfloat16, got torch.float32"),
    ({"conv": None}, "exported: expected layout.conv None, got Conv"),
    ({"seed": 1}, "exported: expected layout.seed 1, got 0"),
    ({"recurrence": FAMILY["kda"].recurrence}, "exported: expected layout.recurrence Recurrence\\(name='kda'"),
    ({"W": 3, "R": 0}, "exported: expected at most W = 3 live records, got \\[4, 0, 1\\]; fold slots before their export"),
], ids=lambda change: next(iter(change)) if isinstance(change, dict) else "")  # fmt: skip
def test_layouts_that_are_refused(change, message):
    one = noise()
    with pytest.raises(ValueError, match=message):
        one.to(dataclasses.replace(one.layout, **change))


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def wide(name: str, G: int, **kwargs) -> tuple[Export, str]:
    case = dataclasses.replace(FAMILY[name], H=8, G=8 if name == "kda" else G)
    return noise(case, **kwargs), "vkq" if name == "mamba2" else "qkv"


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("name, formats", [("mamba2", {}), ("gdn", {"state": "e4m3", "read": "nvfp4"}), ("kda", {})])
def test_merge_takes_shard_back(name, formats, G, parts):
    one, conv = wide(name, G, **formats)
    shards = one.shard(parts, conv)
    for shard in shards:
        shard.check()
    assert equal(Export.merge(shards, one.layout.G, conv), one)
    if parts == 8:
        halves = [Export.merge(half, max(1, one.layout.G // 2), conv) for half in (shards[:4], shards[4:])]
        assert all(equal(x, y) for x, y in zip(halves, one.shard(2, conv), strict=True))


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
def test_ranks_go_on_where_the_whole_was(name, G):
    """Mid-window, split over four ranks and later merged: outputs of the heads and the state are those of one rank."""
    case = dataclasses.replace(FAMILY[name], H=4, G=4 if name == "kda" else G)
    layout, generator = case.layout(W=4), torch.Generator().manual_seed(0)
    w = {key: None if x is None else x.to(DEVICE) for key, x in weights(layout, generator).items()}
    derived = layout.recurrence.decay == "derived"

    def rank(layout, w):
        A = w["A"][None] if derived else None
        return ReplayState(layout, 1, 2, DEVICE, "torch", A=A), {k: x for k, x in w.items() if not (derived and k == "A")}

    whole, w_step = rank(layout, w)
    slots = torch.tensor([1, 0], device=DEVICE)

    def step(state, x, w):
        plan = state.plan(slots)
        o = state.step(0, plan, **x, **w)
        state.commit(plan)
        return o

    for _ in range(6):
        step(whole, inputs(layout, 2, generator, DEVICE), w_step)
    ranks = []
    for i, one in enumerate(whole.export(slots).shard(4)):
        state, mine = rank(one.layout, sliced(layout, w, i, 4))
        state.import_(slots, one)
        ranks.append((state, mine))
    for _ in range(3):
        x = inputs(layout, 2, generator, DEVICE)
        expected = step(whole, x, w_step)
        got = [step(state, sliced(layout, x, i, 4), mine) for i, (state, mine) in enumerate(ranks)]
        torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-4, atol=1e-5)
    merged = Export.merge([state.export(slots) for state, _ in ranks], layout.G)
    again, _ = rank(layout, w)
    again.import_(slots, merged)
    torch.testing.assert_close(again.materialize(slots), whole.materialize(slots), rtol=1e-4, atol=1e-5)


def test_parts_that_do_not_fit():
    one, conv = wide("gdn", 4)
    for parts in (0, 3, 16):
        with pytest.raises(ValueError, match=f"^parts: expected a divisor of H = 8 .* G = 4, got {parts}"):
            one.shard(parts, conv)
    with pytest.raises(ValueError, match="^conv: expected letters of .* that fill 512, got ''"):
        one.shard(2)
    shards = one.shard(8, conv)
    with pytest.raises(ValueError, match="^parts: expected at least one"):
        Export.merge([])
    with pytest.raises(ValueError, match="^G: expected a divisor of 8, got 3"):
        Export.merge(shards, 3, conv)
    for name, message in (("cursor.count", "expected count .* at 1"), ("k", "expected equal k of 2 ranks .* at 1")):
        odd = shards[1].tensors | {name: shards[1].tensors[name] - 1}
        with pytest.raises(ValueError, match=f"^parts: {message}"):
            Export.merge([shards[0], dataclasses.replace(shards[1], tensors=odd), *shards[2:]], 4, conv)
    with pytest.raises(ValueError, match="^parts: expected .* at 1$"):
        Export.merge([shards[0], one.shard(4, conv)[0]], 4, conv)
