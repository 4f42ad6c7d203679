"""Number formats by themselves: encodings bit for bit, bounds, randomness, the same bits of both backends, names, bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy
import pytest
import torch
from torch import Tensor

from replayssm import GDN, Layout, ReplayState, formats
from replayssm.formats import E4M3, FORMATS, LOADED, Format
from replayssm.layout import STORED
from tests.harness import BACKENDS, DEVICE

EVERY = [
    "fp32", "bf16", "fp16", "fp16+sr", "e4m3", "e4m3+sr", "int8", "nvfp4", "e4m3:row", "e4m3+sr:64", "int8:row", "int8:32",
    "int16:row",
]  # fmt: skip


def awkward_numbers() -> Tensor:
    """fp32 of every exponent, halves and neighbours of the small types' numbers, zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator, dtype=torch.int64).to(torch.int32)
    spread = bits.view(torch.float32)
    grid = torch.arange(-500, 500, dtype=torch.float32)
    grids = [grid * 2.0**e for e in range(-12, 3)]
    ties = torch.cat([torch.nextafter(x, x + sign) for x in grids for sign in (-1, 0, 1)])
    x = torch.cat([spread[spread.isfinite()], ties, torch.tensor([0.0, -0.0])])
    return x


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# ---- number types, against independent implementations ------------------------------------------------------------------


def test_e4m3_is_torchs():
    x = awkward_numbers().clamp(-448, 448)
    assert torch.equal(bits(formats.rounded(x, FORMATS["e4m3"]).to(E4M3)), bits(x.to(E4M3)))


def test_fp16_is_torchs():
    x = awkward_numbers().clamp(-65504, 65504)
    assert torch.equal(bits(formats.rounded(x, FORMATS["fp16"]).half()), bits(x.half()))


def test_int8_is_numpys():
    x = awkward_numbers().clamp(-127, 127)
    assert torch.equal(formats.rounded(x, FORMATS["int8"]), torch.from_numpy(numpy.rint(x.numpy())))


@pytest.fixture(scope="module")
def e2m1():
    """The independent implementation; on a GPU host, whose Python is its own, it may be missing."""
    return pytest.importorskip("ml_dtypes").float4_e2m1fn


def test_e2m1_is_that_of_ml_dtypes(e2m1):
    """All 16 codes, and the rounding of every number; the row's first half in the low nibbles."""
    codes = numpy.arange(16, dtype=numpy.uint8)
    known = torch.from_numpy(codes.view(e2m1).astype(numpy.float32))
    packed = torch.arange(8, dtype=torch.uint8) | torch.arange(8, 16, dtype=torch.uint8) << 4
    assert torch.equal(bits(formats.unpack(packed)), bits(known)) and torch.equal(formats.pack(known), packed)
    x = awkward_numbers()
    x = x[: len(x) // 2 * 2].clamp(-6, 6)
    theirs = torch.from_numpy(x.numpy().astype(e2m1).view(numpy.uint8))
    low, high = theirs.chunk(2)
    assert torch.equal(formats.pack(formats.rounded(x, FORMATS["nvfp4"])), low | high << 4)


def test_nvfp4_is_the_definition(e2m1):
    """Scales in torch's e4m3 and numbers in ml_dtypes' e2m1, from the definition, over rows of very different sizes."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-4, 4)[:, None]
    x[3, 16:32] = 0
    stored = FORMATS["nvfp4"].encode(x)
    row = x.abs().amax(-1) / (448 * 6)
    scale = (x.unflatten(-1, (4, 16)).abs().amax(-1) / 6 / row[:, None]).to(E4M3)
    both = (scale.float() * row[:, None]).repeat_interleave(16, -1)
    numbers = torch.where(both > 0, x / both, 0.0).clamp(-6, 6).numpy().astype(e2m1).astype(numpy.float32)
    assert torch.equal(stored.row_scale, row) and torch.equal(bits(stored.scale), bits(scale))
    assert torch.equal(formats.unpack(stored.values), torch.from_numpy(numbers))
    assert torch.equal(FORMATS["nvfp4"].decode(stored), torch.from_numpy(numbers) * both)


# ---- formats -------------------------------------------------------------------------------------------------------------


def cast(one: Format, x: Tensor, seed: int = 0) -> Tensor:
    draws = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) if one.stochastic else None
    return one.decode(one.encode(x, draws))


@pytest.mark.parametrize("name", EVERY)
def test_error_of_a_cast(name):
    """Half a spacing of the number type (stochastically a whole one) times the scale, the largest of a block exact."""
    one, K = formats.named(name), 128
    x = torch.randn(16, K, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-8, 8)[:, None]
    x = x.clamp(-6e4, 6e4)
    x[5] = 0.0
    largest = x.abs().unflatten(-1, (-1, one.span(K))).amax(-1).repeat_interleave(one.span(K), -1)
    unit = largest / one.most if one.block is not None else 1.0
    if name == "nvfp4":  # a block's scale may be rounded up by 2^-4, or be the least of e4m3
        unit = torch.maximum(unit * (1 + 2**-4), x.abs().amax(-1, keepdim=True) / 448 / 6 * 2**-9)
    spacing = torch.maximum(x.abs() * 2.0**-one.mbits, torch.as_tensor(unit * 2.0 ** (one.emin - one.mbits)))
    error = (cast(one, x) - x).abs()
    in_fp32 = 1e-2 if one.mbits > 10 and one.block is not None else 1e-5  # x times 1 / scale has 24 bits
    assert (error <= spacing * (1.0 if one.stochastic else 0.5) * (1 + in_fp32)).all()
    if one.block is not None and name != "nvfp4":
        assert (error[x.abs() == largest] <= 2e-7 * largest[x.abs() == largest]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_finite_stays_so(name, bad):
    """In its own place at least, and beyond its row nowhere."""
    x = torch.ones(4, 64)
    x[1, 7] = bad
    y = cast(formats.named(name), x)
    assert not y[1, 7].isfinite() and torch.equal(y[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.parametrize("name", EVERY)
def test_small_and_zero_rows(name):
    """Zeros stay zeros; rows of the least fp32 numbers decode to something no larger than the least scale's spacing."""
    x = torch.zeros(3, 64)
    x[1], x[2] = 1e-45, -1e-39
    y = cast(formats.named(name), x)
    assert y.isfinite().all() and not y[0].any() and (y.abs() <= 2.0**-14).all()


@pytest.mark.parametrize("name", EVERY)
def test_bytes(name):
    one = formats.named(name)
    state = torch.zeros(3, 16, 64)
    stored = one.encode(state, state if one.stochastic else None)
    assert one.bytes(16, 64) * 3 == sum(x.nbytes for x in stored if x is not None)
    for field, x in stored._asdict().items():
        shape, dtype = one.tensors(16, 64).get(field, (None, None))
        assert x is None if shape is None else (tuple(x.shape), x.dtype) == ((3, *shape), dtype), field


def test_bytes_by_hand():
    """Of a [128, 128] state: 2, 1 or half a byte a value and 4 bytes a scale; nvfp4 1 byte per 16 and 4 a row."""
    sizes = {"fp16+sr": 32768, "e4m3:row": 16384 + 512, "int8:32": 16384 + 2048, "nvfp4": 8192 + 1024 + 512}
    assert {name: formats.named(name).bytes(128, 128) for name in sizes} == sizes


# ---- randomness ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """Source: Random123's kat_vectors."""
    counter, key, expected = ([int(word, 16) for word in words.split()] for words in (counter, key, expected))
    assert [int(x) for x in formats.philox(tuple(map(torch.tensor, counter)), tuple(key))] == expected


def draw(seed=1, layer=2, key=2**40 + 3, flush=4) -> Tensor:
    return formats.draws(seed, layer, torch.tensor([key]), torch.tensor([flush]), 2, 16, 32)[0]


def test_draws_depend_on_all_they_are_keyed_by():
    """Reproducible; another seed, layer, key (either half) or flush draws other numbers, unrelated to these."""
    others = [draw(seed=2), draw(layer=3), draw(key=2**41 + 3), draw(key=2**40 + 4), draw(flush=5), draw(flush=LOADED)]
    assert torch.equal(draw(), draw())
    for one, other in itertools.combinations([draw(), *others], 2):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 5 / 32  # 5 sigma of 1024
    x = draw()
    assert x.unique().numel() > 1020 and 0 <= float(x.min()) and float(x.max()) < 1
    both = formats.draws(1, 2, torch.tensor([2**40 + 3, 7]), torch.tensor([4, 9]), 2, 16, 32)
    assert torch.equal(both[0], draw()) and torch.equal(both[1], draw(key=7, flush=9))


@pytest.mark.parametrize("name", ["fp16+sr", "e4m3+sr", "e4m3+sr:row", "int8+sr:row"])
def test_stochastic_rounding_is_unbiased(name):
    """Over 4,096 requests' draws of the same state each value's mean is the value, within 5 sigma; large, small and subnormal
    numbers of the type, of both signs; and all values together."""
    N, one = 4096, formats.named(name)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * 2.0 ** -torch.arange(16)[:, None]
    x[7, 1:] *= 2.0**-11  # subnormal beside a large one
    draws = formats.draws(0, 0, torch.arange(N), torch.zeros(N, dtype=torch.int32), 1, 16, 32)[:, 0]
    y = one.decode(one.encode(x.expand(N, 16, 32), draws)).double()
    down, up = (one.decode(one.encode(x, torch.full_like(x, r))).double() for r in (1 - 2.0**-24, 0.0))
    p = ((x.double() - down) / torch.where(up == down, 1.0, up - down)).clamp(0, 1)
    sigma = (up - down).abs() * (p * (1 - p) / N).sqrt() + 2e-7 * x.double().abs()  # and the rounding of the scale
    z = (y.mean(0) - x.double()) / sigma.clamp(min=1e-300)
    assert float(z.abs().max()) < 5 and abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    assert (up != down).float().mean() > 0.9 and ((y == down) | (y == up)).all(), "to the two neighbours alone"
    nearest = formats.named(name.replace("+sr", ""))
    bias = (nearest.decode(nearest.encode(x)).double() - x.double()) / sigma.clamp(min=1e-300)
    assert float(bias.abs().max()) > 20, "the test must see a biased rounding"


# ---- both backends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state, read, V, K",
    [
        ("fp16+sr", "nvfp4", 16, 64),
        ("e4m3+sr", "int8:32", 16, 32),
        ("e4m3+sr:row", "int8:row", 16, 80),
        ("int8+sr:row", None, 16, 32),
        ("int16:row", None, 16, 32),
        ("nvfp4", "e4m3:row", 32, 96),
        ("int8", "nvfp4", 16, 128),
        ("e4m3+sr:64", "nvfp4", 16, 64),
    ],
)
def test_backends_store_the_same_bits(state, read, V, K):
    """A load and a fold of an empty ring cast the same fp32 values: every stored tensor is equal bit for bit, in any layer."""
    if BACKENDS[1].marks[0].args[0]:
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    layout = Layout(GDN, 2, 1, V, K, W=2, state=state, read=read, seed=2**31 + 5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 2, V, K, generator=generator) * torch.exp(2 * torch.randn(2, 2, 2, V, 1, generator=generator))
    x[0, 0, 0, :2], x[0, 0, 1, 0, 3] = 0.0, 1e-40
    keys = torch.tensor([2**40 + 2**31 + 1, 7], device=DEVICE)
    one, other = (ReplayState(layout, 2, 3, DEVICE, backend) for backend in ("torch", "triton"))
    slots = torch.tensor([2, 0], device=DEVICE)
    kept = []
    for _ in range(2):
        for s in (one, other):
            if not kept:
                s.load(slots, x.to(DEVICE), keys=keys)
            else:
                s.fold(slots)
        for name in STORED:
            a, b = getattr(one.buffers, name), getattr(other.buffers, name)
            assert a is None if b is None else torch.equal(bits(a), bits(b)), name
        assert torch.equal(one.materialize(slots), other.materialize(slots))
        kept.append(one.buffers.state.clone())


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_bits_come_from_key_layer_and_flush(backend):
    """The stored bits are those of the host's draws for (seed, layer, key, flush), after a restart too, and of one layer."""
    layout = Layout(GDN, 2, 1, 16, 32, W=2, state="fp16+sr", seed=9)
    x = torch.randn(2, 1, 2, 16, 32, generator=torch.Generator().manual_seed(0))
    slots, keys = torch.tensor([1], device=DEVICE), torch.tensor([2**33 + 1], device=DEVICE)
    for _ in range(2):
        s = ReplayState(layout, 2, 2, DEVICE, backend)
        s.load(slots, x.to(DEVICE), keys=keys)
        expected = [formats.draws(9, layer, keys.cpu(), torch.tensor([LOADED]), 2, 16, 32)[0] for layer in range(2)]
        for layer in range(2):
            assert torch.equal(s.buffers.state[layer, 1].cpu(), layout.format.encode(x[layer, 0], expected[layer]).values)
    s.load_layer(1, slots, x[0].to(DEVICE))
    assert torch.equal(s.buffers.state[1, 1].cpu(), layout.format.encode(x[0, 0], expected[1]).values)
    assert not torch.equal(s.buffers.state[0, 1], s.buffers.state[1, 1])


# ---- names and layouts ---------------------------------------------------------------------------------------------------

SIZES = dict(recurrence=GDN, H=4, G=2, V=32, K=64, W=8)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(state="fp64"), "state format: expected one of .*'e4m3.sr'.* got 'fp64'"),
        (dict(state="fp16+rn"), "state format: expected one of .* got 'fp16.rn'"),
        (
            dict(state="nvfp4+sr"),
            r"state format: stochastic rounding is supported for \['fp16', 'e4m3', 'int8'\], got 'nvfp4.sr'",
        ),
        (
            dict(state="bf16+sr"),
            r"state format: stochastic rounding is supported for \['fp16', 'e4m3', 'int8'\], got 'bf16.sr'",
        ),
        (dict(read="int8+sr"), r"read format: expected one of .* got 'int8.sr'; a read copy rounds to nearest"),
        (
            dict(read="e4m3+sr"),
            r"read format: expected one of \['e4m3', 'int8', 'nvfp4'\], got 'e4m3.sr'; .* does not accumulate",
        ),
        (dict(read="fp16"), r"read format: expected one of \['e4m3', 'int8', 'nvfp4'\], got 'fp16'"),
        (
            dict(state="e4m3:24"),
            r"values per scale can be chosen for \['e4m3', 'int8', 'int16'\] among \['16', .*'row'\], got 'e4m3:24'",
        ),
        (dict(read="nvfp4:32"), "read format: values per scale can be chosen for .* got 'nvfp4:32'"),
        (dict(state="fp16+sr:16"), "state format: values per scale can be chosen for .* got 'fp16.sr:16'"),
        (dict(read="int8:32", K=48), r"read 'int8:32': expected K a multiple of 32 \(32 values a scale\), got 48"),
        (dict(read="nvfp4", K=48), r"read 'nvfp4': expected K a multiple of 32 \(2 times 16 values a scale\), got 48"),
        (dict(state="e4m3+sr:64", K=96), "state 'e4m3.sr:64': expected K a multiple of 64 .* got 96"),
    ],
)
def test_refused_formats(change, message):
    with pytest.raises(NotImplementedError, match=message):
        Layout(**SIZES | change)


def test_refused_seed_and_draws():
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed: expected 0 ... 2.32 - 1, got {seed}"):
            Layout(**SIZES, seed=seed)
    state = torch.zeros(2, 32)
    with pytest.raises(ValueError, match=r"draws: expected numbers in \[0, 1\) of the state's shape for fp16.sr, got None"):
        formats.named("fp16+sr").encode(state)
    with pytest.raises(ValueError, match=r"draws: expected None for int8, got \[2, 32\]"):
        formats.named("int8").encode(state, state)


def test_e4m3_needs_a_gpu_that_converts_it(monkeypatch):
    """On older ones the kernels would not compile; what is served there is named."""
    from replayssm.checks import number_formats

    layout = Layout(**SIZES, state="fp16+sr", read="nvfp4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(NotImplementedError, match=r"read 'nvfp4': expected compute capability 8.9 .* got 8.0; .*int8"):
        number_formats(layout, torch.device("cuda", 0))
    number_formats(dataclasses.replace(layout, read="int8"), torch.device("cuda", 0))
    number_formats(layout, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    number_formats(layout, torch.device("cuda", 0))


SPLIT = Layout(**SIZES, state="e4m3+sr", read="nvfp4", seed=3)


def test_split_layout():
    """Shapes by hand; spec round trip; bytes are those of the tensors; values of stored states contiguous, slots not."""
    expected = {
        "state": ((4, 32, 64), E4M3),
        "state_scale": ((4, 32, 4), torch.float32),
        "read": ((4, 32, 32), torch.uint8),
        "read_scale": ((4, 32, 4), E4M3),
        "read_row_scale": ((4, 32), torch.float32),
    }
    assert {name: SPLIT.tensors[name] for name in STORED if name in SPLIT.tensors} == expected
    assert Layout.parse(SPLIT.spec) == SPLIT
    buffers = SPLIT.allocate(2, 3, "cpu")
    SPLIT.check(buffers)
    sizes = {name: x.nbytes // 6 for name, x in buffers._asdict().items() if x is not None}
    assert SPLIT.state_bytes == sizes["state"] + sizes["state_scale"]
    assert SPLIT.copy_bytes == sizes["read"] + sizes["read_scale"] + sizes["read_row_scale"]
    assert SPLIT.slot_bytes == sum(sizes.values())
    wide = {
        name: torch.zeros(2, 4, 5, *shape[1:], dtype=dtype)[:, 1:, 1:] if name in STORED else getattr(buffers, name)
        for name, (shape, dtype) in SPLIT.tensors.items()
    }
    SPLIT.check(buffers._replace(**wide))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("read", lambda x: None, r"read: expected \[2, 3, 4, 32, 32\] torch.uint8, got None"),
        ("read", lambda x: x.view(torch.int8), r"read: expected .* torch.uint8, got .* torch.int8"),
        ("read", lambda x: x.mT.contiguous().mT, r"read: expected contiguous \[V, K\], got strides"),
        ("read_scale", lambda x: x.float(), r"read_scale: expected \[.*\] torch.float8_e4m3fn, got .* torch.float32"),
        ("read_row_scale", lambda x: x.mT.contiguous().mT, "read_row_scale: expected contiguous heads"),
        ("state_scale", lambda x: x[..., :2], r"state_scale: expected \[2, 3, 4, 32, 4\] .*, got \[2, 3, 4, 32, 2\]"),
        ("state_row_scale", lambda x: torch.zeros(2, 3, 4, 32), r"state_row_scale: expected None for .*, got \[2, 3, 4, 32\]"),
    ],
)  # fmt: skip
def test_check_refuses_by_name(name, change, message):
    buffers = SPLIT.allocate(2, 3, "cpu")
    with pytest.raises(ValueError, match=message):
        SPLIT.check(buffers._replace(**{name: change(getattr(buffers, name))}))


def test_step_bytes_by_hand():
    """GDN, 4 heads of [128, 128], W = 16: S = fp32 262144, read copy nvfp4 4 (8192 + 1024 + 512) = 38912 bytes.

    One step in 16 flushes, which reads S and writes both; every step reads the copy. Records as in test_layout.
    """
    layout = Layout(GDN, 4, 2, 128, 128, W=16, u=torch.float32, read="nvfp4")
    one = layout.step_bytes()
    assert one.replay.read == 38912 + (262144 + 16 * 1568) / 16 + 7.5 * 2584
    assert one.replay.written == 3640 + (262144 + 38912) / 16
    assert one.conventional.total == 2 * 262144
    assert dataclasses.replace(layout, read=None).step_bytes().replay.read == 262144 * (1 + 1 / 16) + 1568 + 7.5 * 2584


def test_plain_formats_take_a_callers_dtype():
    assert [formats.plain(dtype).name for dtype in (torch.float32, torch.bfloat16, torch.float16)] == ["fp32", "bf16", "fp16"]
