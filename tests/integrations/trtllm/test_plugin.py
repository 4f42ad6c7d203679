"""TensorRT's own Python front end registers, describes and runs the plugins. No engine is built."""

import ctypes
import dataclasses
from contextlib import nullcontext

import pytest
import torch

from tests.integrations.trtllm import frontend

if frontend.missing():
    pytest.skip(frontend.missing(), allow_module_level=True)
frontend.load()

import tensorrt as trt
import tensorrt.plugin as trtp

from replayssm import GDN, KDA, MAMBA2, ReplayState
from replayssm.cursor import PLAN_WIDTH
from replayssm.integrations.trtllm import plugin
from replayssm.integrations.trtllm.plugin import kernel, registration
from replayssm.integrations.trtllm.plugin.signature import PLUGINS, STATE
from tests.cases import FAMILY, inputs, weights
from tests.harness import GPU
from tests.integrations.trtllm.network import Network

LAYERS, SLOTS = 2, 4
SMALL = {"W": 4, "T_max": 2}
TINY = {name: dataclasses.replace(case, V=16, K=16) for name, case in FAMILY.items()}
IN_PYTHON = pytest.mark.skipif(GPU, reason="the plugins' memory is on the host here")


@pytest.fixture(autouse=True)
def no_launches_to_time(monkeypatch):
    """The interpreter has no launches to choose among; test_plugin_ahead.py sees tactics."""
    monkeypatch.setattr(kernel, "tactics", lambda launched: None)


def network(family: str, given=(), cases=FAMILY, **kwargs) -> Network:
    """A family's plugins, in a namespace of its own."""
    sizes = {name: kwargs.pop(name) for name in ("rows", "tokens", "dtypes") if name in kwargs}
    layout = cases[family].layout(**SMALL | kwargs)
    return Network(layout, LAYERS, SLOTS, tuple(given), f"test_{family}_{'_'.join(given)}", **sizes)


def test_registered():
    """In TensorRT's registry under the default names, with the attributes' types; again changes nothing."""
    layout = FAMILY["gdn"].layout()
    made = plugin.register(layout, ("dt_bias",))
    assert plugin.register(layout.with_window(8), ("dt_bias",)) == made
    found = {c.name: c for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == "replayssm"}
    assert set(found) == set(PLUGINS)
    integer, text = trt.PluginFieldType.INT64, trt.PluginFieldType.CHAR
    fields = {name: {f.name: f.type for f in creator.field_names} for name, creator in found.items()}
    assert fields["decode"] == {"layer": integer, "layout": text}
    assert fields["verify"] == {"layer": integer, "T": integer, "layout": text}
    assert fields["commit"] == {"layout": text}
    assert all(getattr(trtp.op.replayssm, name) is one for name, one in made.items())


@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda", "gla"])
def test_aliases(family):
    """Every tensor of the state that a plugin takes comes back as itself, so that one chain orders reads and writes."""
    one, state = network(family), set(STATE)
    assert {"start", "count", "pending", "flushes", "buffer_state", "buffer_k", "buffer_v"} <= state
    assert not {"plan", "key", "q", "k", "v"} & state
    for name in PLUGINS:
        node = one.add(name, layer=1, T=2)
        assert set(node.aliases.values()) == state & set(node.names)
        own = [i for i in range(len(node.types)) if i not in node.aliases]
        assert own == ([] if PLUGINS[name].out is None else [0])
        for i, source in node.aliases.items():
            at = node.names.index(source)
            assert [size.at(7) for size in node.shapes[i]] == [size.at(7) for size in node.inputs[at]]
            assert node.types[i] == node.descs[at].desc.type
        types = [(desc.desc.type, trt.TensorFormat.LINEAR) for desc in node.descs]
        assert node.combinations == [types]


def test_outputs_follow_the_batch():
    """The plan has the slots' rows, outputs the tokens'."""
    one = network("gdn", tokens=2)
    plan, verify = one.add("plan", T=2), one.add("verify", layer=0, T=2)
    assert [[size.at(rows) for size in plan.shapes[0]] for rows in (1, 7)] == [[1, PLAN_WIDTH], [7, PLAN_WIDTH]]
    assert [[size.at(rows) for size in verify.shapes[0]] for rows in (1, 7)] == [[2, 2, 32], [14, 2, 32]]


def test_packed_formats():
    """Bytes of packed and scaled states cross TensorRT as its own types."""
    one = network("mamba2", ("z",), state="e4m3+sr", read="nvfp4", act=torch.bfloat16)
    node = one.add("decode", layer=0)
    types = {name: desc.desc.type for name, desc in zip(node.names, node.descs, strict=False)}
    assert types["buffer_state"] == trt.fp8 and types["buffer_read"] == trt.int8 and types["q"] == trt.bfloat16
    assert types["buffer_read_scale"] == trt.fp8 and types["buffer_read_row_scale"] == trt.float32


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"shapes": {"buffer_state": [2, 4, 2, 32, 16]}}, r"buffer_state: expected \['L', 'S', 2, 32, 32\], got \[2, 4, 2, 32"),
        ({"shapes": {"buffer_v": [2, 5, 2, 6, 32]}}, r"buffer_v: expected \['L', 'S', 2, 6, 32\] with L = 2, S = 4, got \[2"),
        ({"shapes": {"q": ["N", 32]}}, r"q: expected \['N', 1, 32\], got \['\?', '\?'\]"),
        ({"dtypes": {"v": torch.float16}}, r"v: expected torch.float32, got DataType.HALF"),
        ({"layer": 2}, r"layer: expected 0 ... 1, got 2"),
        ({"layer": -1}, r"layer: expected 0 ... L - 1, got -1"),
        ({"layout": FAMILY["gdn"].layout(T_max=2).spec}, r"buffer_k: expected \['L', 'S', 1, 18, 32\]"),
        ({"layout": FAMILY["mamba2"].layout(**SMALL).spec}, r"layout: expected one with the tensors that test_gdn_::dec"),
    ],
)  # fmt: skip
def test_refusals(wrong, message):
    one = network("gdn", **({"dtypes": wrong.pop("dtypes")} if "dtypes" in wrong else {}))
    with pytest.raises(ValueError, match=message):
        one.add("decode", **{"layer": 0} | wrong)


def test_refused_numbers():
    with pytest.raises(ValueError, match="T: expected 1 ... 2, got 3"):
        network("gdn").add("verify", layer=0, T=3)


def test_refused_registrations():
    with pytest.raises(ValueError, match=r"given: expected some of \['t', .*\] for gdn, got 'b'"):
        plugin.register(FAMILY["gdn"].layout(), ("b",))
    network("gdn")
    with pytest.raises(
        ValueError, match="namespace: expected one of its own for these tensors or this target, got 'test_gdn_'"
    ):
        plugin.register(FAMILY["mamba2"].layout(), namespace="test_gdn_")


def test_tensorrt_checks_the_signatures():
    """TensorRT itself refuses functions that do not match what was registered, so ours were read and accepted."""
    network("gdn")
    with pytest.raises(ValueError, match="does not match the expected input arg schema"):
        trtp.impl("test_gdn_::commit")(lambda plan, outputs, stream: None)
    with pytest.raises(ValueError, match="Expected trt.ITensor"):
        trtp.op.test_gdn_.commit(1, layout="")
    with pytest.raises(ValueError, match="Unexpected schema"):
        trtp.op.test_gdn_.commit(layout="")
    definition = trtp.op.test_gdn_.decode
    assert definition.num_outputs == len(network("gdn").add("decode", layer=0).types)
    assert definition.impl_func is not None and definition.aot_impl_func is not None


def on_host(tensor, dtype):
    """A TensorRT tensor's memory on the host as a torch tensor."""
    size = torch.Size(tensor.shape).numel() * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(tensor.shape))


@IN_PYTHON
@pytest.mark.parametrize(
    "family, act, T", [("mamba2", torch.bfloat16, 1), ("kda", torch.bfloat16, 1), ("gdn", torch.float32, 2)]
)
def test_steps_in_place(family, act, T, monkeypatch):
    """Steps of a network of plugins, drafts partly accepted, a padded row: bit-identical to ReplayState's."""
    monkeypatch.setattr(registration, "view", on_host)
    monkeypatch.setattr(registration, "on_stream", lambda stream: nullcontext())
    optional = tuple(name for name in ("dt_bias", "D") if weights(FAMILY[family].layout(), torch.Generator())[name] is not None)
    one = network(
        family, (*optional, "accepted"), tokens=T, rows=(3, 3, 3), cases=TINY, W=2, dtypes={"a": act, "b": act}, act=act
    )
    generator = torch.Generator().manual_seed(0)
    w = [weights(one.layout, generator) for _ in range(LAYERS)]
    A = torch.stack([x["A"] for x in w]) if one.layout.recurrence.decay == "derived" else None
    truth, ours = (ReplayState(one.layout, LAYERS, SLOTS, "cpu", "triton", A=A) for _ in range(2))
    states = torch.randn(LAYERS, 3, one.layout.H, one.layout.V, one.layout.K, generator=generator)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    for state in (truth, ours):
        state.load(slots, states)
    bound = {f"buffer_{name}": x for name, x in ours.buffers._asdict().items() if x is not None} | ours.cursors._asdict()
    plan, flush, commit = one.add("plan", T=T), one.add("flush"), one.add("commit")
    steps = [one.add("decode" if T == 1 else "verify", layer=layer, T=T) for layer in range(LAYERS)]
    for accepted in ([1, 0, T], [T, 0, 1], [1, 0, T]):
        x = inputs(one.layout, 3 * T, generator)
        kept, planned = torch.tensor(accepted, dtype=torch.int32), truth.plan(slots, t=T)
        rows = plan.enqueue(bound | {"slots": slots}, 3)[0]
        assert torch.equal(rows, planned.rows)
        flush.enqueue(bound | {"plan": rows, "A": A}, 3)
        for layer, step in enumerate(steps):
            taken = w[layer] | ({"A": None} if A is not None else {})
            wanted = truth.step(layer, planned, **x, **taken)
            out = step.enqueue(bound | {"plan": rows} | x | w[layer], 3)[0]
            assert torch.equal(out, wanted)
        truth.commit(planned, kept)
        commit.enqueue(bound | {"plan": rows, "accepted": kept}, 3)
    for wanted, got in zip((*truth.buffers, *truth.cursors), (*ours.buffers, *ours.cursors), strict=True):
        assert (wanted is None and got is None) or torch.equal(wanted, got)
    assert truth.cursors.count.any() and truth.cursors.flushes.any()


def test_families_have_different_tensors():
    """What a family does not have is no input: absence is not a placeholder."""
    names = {row.name: set(network(row.name).add("decode", layer=0).names) for row in (MAMBA2, GDN, KDA)}
    assert names["gdn"] - names["mamba2"] == {"a", "buffer_g", "buffer_gsum", "buffer_u", "buffer_rnorm"}
    assert names["kda"] == names["gdn"]
