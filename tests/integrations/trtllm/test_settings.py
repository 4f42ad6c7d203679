"""What users write, and what is refused: by name, at load, or said once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pydantic")
yaml = pytest.importorskip("yaml")

from replayssm import GDN, KDA, MAMBA2
from replayssm.integrations.trtllm import contract, engine, layouts
from replayssm.integrations.trtllm.engine import Refused
from replayssm.integrations.trtllm.managers import managed
from replayssm.integrations.trtllm.settings import Settings, settings_of
from tests.integrations.trtllm import fakes, serving
from tests.integrations.trtllm.serving import Serving, behaviours

# ---- the YAML ---------------------------------------------------------------------------------------------------------


def read(text: str) -> Settings:
    """Settings of an LLM YAML, as model_kwargs put them on a pretrained config."""
    return settings_of(SimpleNamespace(**yaml.safe_load(text)["model_kwargs"]))


def test_yaml():
    full = "{mode: auto, window: 24, checkpoint: fp16+sr, read: int8, stagger: false, backend: torch, seed: 7, debug: true}"
    found = read(f"model_kwargs: {{replayssm: {full}}}")
    assert (found.mode, found.window, found.checkpoint, found.read) == ("auto", 24, "fp16+sr", "int8")
    assert (found.stagger, found.backend, found.seed, found.debug) == (False, "torch", 7, True)
    assert read("model_kwargs: {replayssm: {}}") == Settings(mode="require")
    assert read("model_kwargs: {text_config: {replayssm: {window: 8}}}").window == 8
    assert read("model_kwargs: {other: 1}").mode == "off"


@pytest.mark.parametrize("value, message", [
    ("{mode: must}", "model_kwargs.replayssm.mode: Input should be 'require', 'auto' or 'off', got 'must'"),
    ("{windows: 16}", "model_kwargs.replayssm.windows: Extra inputs are not permitted, got 16"),
    ("{window: '16'}", "model_kwargs.replayssm.window: Input should be a valid integer, got '16'"),
    ("{window: 0}", "model_kwargs.replayssm.window: Input should be greater than or equal to 1, got 0"),
    ("{stagger: 1}", "model_kwargs.replayssm.stagger: Input should be a valid boolean, got 1"),
    ("{checkpoint: e4m3}", "model_kwargs.replayssm.checkpoint: Input should be 'auto', 'fp32', 'bf16', 'fp16' or 'fp16+sr'"),
    ("{seed: -1}", "model_kwargs.replayssm.seed: Input should be greater than or equal to 0, got -1"),
    ("on", "model_kwargs.replayssm: expected a mapping such as {mode: require}, got True"),
])  # fmt: skip
def test_wrong_yaml(value, message):
    with pytest.raises(ValueError) as error:
        read(f"model_kwargs: {{replayssm: {value}}}")
    assert message in str(error.value)


def test_two_places_that_differ():
    with pytest.raises(ValueError, match="expected replayssm once"):
        read("model_kwargs: {replayssm: {window: 8}, text_config: {replayssm: {window: 9}}}")


# ---- layouts ----------------------------------------------------------------------------------------------------------


def context(tokens=None, **changed):
    """Sizes as a manager has them."""
    spec = None if tokens is None else SimpleNamespace(tokens_per_gen_step=tokens)
    sizes = {"ssm_state_shape": (4, 16, 32), "conv_state_shape": (128, 3), "n_groups_per_rank": 2}
    return SimpleNamespace(
        **{"spec_config": spec, "conv_state_dtype": torch.bfloat16, "stochastic_rounding": False} | sizes | changed
    )


def test_layouts():
    plain = layouts.layout_of(MAMBA2, context(), torch.float32, Settings(), None)
    assert (plain.H, plain.G, plain.V, plain.K, plain.W, plain.T_max, plain.order) == (4, 2, 16, 32, 16, 1, "token")
    assert plain.conv is None and plain.state == "fp32" and plain.act == torch.bfloat16
    drafts = layouts.layout_of(GDN, context(5), torch.bfloat16, Settings(window=20), history=16)
    assert (drafts.W, drafts.T_max, drafts.R, drafts.state) == (20, 5, 32, "bf16")
    kimi = layouts.layout_of(KDA, context(20, ssm_state_shape=(2, 16, 16)), torch.float32, Settings(), None)
    assert (kimi.G, kimi.W, kimi.conv.channels, kimi.conv.width) == (2, 20, 128, 4)
    rounded = layouts.layout_of(MAMBA2, context(stochastic_rounding=True), torch.float16, Settings(), None)
    assert rounded.state == "fp16+sr"


@pytest.mark.parametrize("kind, tokens, pool, settings, history, message", [
    (ValueError, 4, torch.float32, {"window": 29}, 16, "window: expected at most 28, the engine's history of 32 rows less 4"),
    (ValueError, 8, torch.float32, {"window": 4}, None, "T_max: expected at most W = 4, got 8"),
    (ValueError, None, torch.float32, {"checkpoint": "bf16"}, None, "checkpoint: expected fp32, the state pool's format"),
    (NotImplementedError, None, torch.float8_e4m3fn, {}, None, "mamba_ssm_cache_dtype: supported are"),
    (NotImplementedError, 40, torch.float32, {}, None, "T_max: supported are 1 ... 32"),
    (NotImplementedError, None, torch.float32, {"read": "int9"}, None, "read format: expected one of"),
])  # fmt: skip
def test_layouts_that_cannot_be(kind, tokens, pool, settings, history, message):
    with pytest.raises(kind, match=message):
        layouts.layout_of(MAMBA2, context(tokens), pool, Settings(**settings), history)


def test_rings_live_in_the_history():
    """Rows of keys and values are the engine's, in place: two halves of 16 are one ring of 32; only scalars are permuted."""
    L, S, act = 2, 3, {"dtype": torch.bfloat16}
    history = SimpleNamespace(
        old_x=torch.zeros(L, S, 2, 16, 4, 16, **act),
        old_B=torch.zeros(L, S, 2, 16, 2, 32, **act),
        old_dt=torch.zeros(L, S, 2, 4, 16),
        old_dA_cumsum=torch.zeros(L, S, 2, 4, 16),
    )
    layout = layouts.layout_of(GDN, context(4), torch.float32, Settings(), 16)
    rings = layouts.rings_in(history, layout)
    assert rings["v"].shape == (L, S, 4, 32, 16) and rings["k"].shape == (L, S, 2, 32, 32)
    rings["v"][1, 2, 3, 17] = 5.0
    assert history.old_x[1, 2, 1, 1, 3].eq(5).all() and history.old_x.count_nonzero() == 16
    rings["k"][0, 1, 1, 15] = 7.0
    assert history.old_B[0, 1, 0, 15, 1].eq(7).all()
    for name, of in (("beta", history.old_dt), ("g", history.old_dA_cumsum)):
        rings[name].fill_(1)
        assert of.eq(1).all() and rings[name].data_ptr() == of.data_ptr()
    with pytest.raises(ValueError, match="history: expected 18 rows"):
        layouts.rings_in(history, layouts.layout_of(MAMBA2, context(2), torch.float32, Settings(), None))


def test_stacked_pools():
    """Layers at one stride become one view; others are refused by name."""
    memory = torch.arange(3 * 4 * 10.0).view(3, 4, 10)  # slots, layers
    views = [memory[:, layer, :6].view(3, 2, 3) for layer in range(4)]
    whole = layouts.stacked(views)
    assert whole.shape == (4, 3, 2, 3) and torch.equal(whole, torch.stack(views)) and whole.data_ptr() == memory.data_ptr()
    assert layouts.stacked(whole) is whole and layouts.stacked(views[:1]).shape == (1, 3, 2, 3)
    apart = [torch.zeros(3, 2, 3) for _ in range(3)]
    for odd in (views[:2] + views[3:], apart):
        with pytest.raises(NotImplementedError, match="state pool: expected 3 layers of one shape at one stride"):
            layouts.stacked(odd)


def test_stacked_pools_of_several_storages(monkeypatch):
    """V2's views each have a storage of their own: the engine's own wrapper of an address makes one view of them."""
    run = Serving("current", "gdn", 0, monkeypatch)
    memory = torch.randn(3, 4, 10)  # slots, layers
    at = [serving.fake_managers.TensorWrapper(memory[0, layer].data_ptr(), torch.float32, [82]) for layer in range(4)]
    views = [serving.fake_managers.convert_to_torch_tensor(one).as_strided((3, 2), (40, 1)) for one in at[:3]]
    whole = layouts.stacked(views, engine.memory)
    assert whole.shape == (3, 3, 2) and torch.equal(whole, memory[:, :3, :2].transpose(0, 1))
    whole[1, 2, 0] = 9.0
    assert memory[2, 1, 0] == 9 and run.recurrent.pool.data_ptr() == run.manager.all_ssm_states[0].data_ptr()


# ---- modes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog):
    engine._said.clear()
    caplog.set_level(logging.INFO, logger="replayssm")
    return lambda text: sum(text in one.getMessage() for one in caplog.records)


def test_registers_every_model(monkeypatch):
    """Over the built-in classes, which stay what they are; under the name that a worker imports."""
    run = Serving("current", "gdn", 0, monkeypatch)
    assert sorted(serving.REGISTERED) == sorted(contract.load().models) == sorted(run.registered)
    made = type(run.model)
    assert made.__module__ == "replayssm.integrations.trtllm" and made.__name__ == "Qwen3_5ForCausalLM"
    assert run.model.extra == 3 and made.__mro__[1].__module__ != made.__module__
    from replayssm.integrations.trtllm import register

    before = dict(serving.REGISTERED)
    register.register()
    assert serving.REGISTERED == before


def test_off_changes_nothing(monkeypatch):
    monkeypatch.setattr(Serving, "_manager", lambda self, pool: _cls(self))
    run = Serving("current", "mamba2", 0, monkeypatch, mode="off")
    assert run.manager is run.config.fake_manager and "forward" not in vars(run.model.layers[0])
    del run.config.pretrained_config.replayssm
    assert _cls(run) is run.config.fake_manager


def _cls(run):
    """The manager class that the engine would take."""
    from tensorrt_llm._torch.pyexecutor._util import get_kv_cache_manager_cls

    return get_kv_cache_manager_cls(run.config, None)


@pytest.mark.parametrize("mode", ["require", "auto"])
def test_unknown_versions(mode, monkeypatch, said):
    """Refused by name at load, or said once."""
    monkeypatch.setattr(fakes, "install", _with_version(fakes.install, "1.2.1"))
    monkeypatch.setattr(Serving, "_manager", lambda self, pool: _cls(self))
    reason = "TensorRT-LLM 1.2.1: supported are >=1.4.0rc4,<1.5"
    if mode == "require":
        with pytest.raises(Refused, match="TensorRT-LLM 1.2.1: supported are >=1.4.0rc4,<1.5"):
            Serving("current", "mamba2", 0, monkeypatch, mode=mode)
    else:
        run = Serving("current", "mamba2", 0, monkeypatch, mode=mode)
        assert run.manager is run.config.fake_manager and "forward" not in vars(run.model.layers[0])
        assert said(reason) == 1


def _with_version(install, version):
    def changed(modules, monkeypatch):
        modules["tensorrt_llm"].__version__ = version
        install(modules, monkeypatch)

    return changed


class Unknown:
    """A manager of no known shape."""


@pytest.mark.parametrize("mode", ["require", "auto"])
def test_unknown_managers(mode, monkeypatch, said):
    run = Serving("current", "mamba2", 0, monkeypatch, mode=mode)
    monkeypatch.setattr(run.config, "fake_manager", Unknown)
    if mode == "require":
        with pytest.raises(Refused, match="Unknown: supported are hybrid managers with _initialize_model_state"):
            _cls(run)
    else:
        assert _cls(run) is Unknown and _cls(run) is Unknown
        assert said("ReplaySSM is not used: Unknown: supported are") == 1


@pytest.mark.parametrize("family, function", [
    ("mamba2", "selective_state_update"), ("gdn", "fused_sigmoid_gating_delta_rule_update"),
])  # fmt: skip
def test_a_manager_without_its_state(family, function, monkeypatch, said):
    """Mode "require" never decodes the engine's way; "auto" does, by the engine's own functions."""
    reason = "_Bare: expected a cache manager with ReplaySSM's state, got one without"
    for mode, kind, message in (("require", Refused, reason), ("auto", fakes.NotReplaced, f"fake {function} was called")):
        run = Serving("current", family, 0, monkeypatch, mode=mode)
        rid = run.admit()
        run.step({rid: 2}, [])
        run.manager = _Bare(run.manager)
        with pytest.raises(kind, match=message):
            run.step({}, [rid])
    assert said(f"ReplaySSM is not used: {reason}") == 1


class _Bare:
    """A manager of the engine's, with nothing of ours."""

    def __init__(self, of):
        self.of = of

    def __getattr__(self, name):
        if name == "replayssm":
            raise AttributeError(name)
        return getattr(self.__dict__["of"], name)


def test_other_architectures_are_refused(monkeypatch):
    run = Serving("current", "mamba2", 0, monkeypatch)
    run.config.pretrained_config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(Refused, match="architecture \\['LlamaForCausalLM'\\]: supported are \\['KimiK3"):
        _cls(run)


def test_a_composite_model_hooks_once(monkeypatch):
    """Its own settings and those of the model within find the same modules."""
    run = Serving("state", "kda", 2, monkeypatch)
    from replayssm.integrations.trtllm import register

    assert not register.enable(run.model, "kda", Settings()).hooks
    rid = run.admit()
    run.step({rid: 3}, [])
    for _ in range(3):
        run.step({}, [rid])
    assert run.states_of(rid) < 1e-4


def test_modules_that_call_other_functions_are_refused(monkeypatch):
    """A release whose mixer no longer calls what the shim replaces."""

    class Changed(serving.fake_mixers.Mamba2Mixer):
        def forward(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, lora_params=None, **kwargs):
            return None

    monkeypatch.setattr(serving.fake_mixers, "Mamba2Mixer", Changed)
    with pytest.raises(
        Refused, match="Mamba2Mixer.forward: expected calls of \\['replay_selective_state_update'\\], found none"
    ):
        Serving("current", "mamba2", 0, monkeypatch)


def test_managers_that_complete_transfers_later(monkeypatch):
    """The C++ manager names a slot before its state is there: nothing may read it then."""

    class CppMambaHybridCacheManager:
        _refresh_dummy_request_mask = _setup_mtp_intermediate_states = None

    assert managed(CppMambaHybridCacheManager, MAMBA2, Settings()).__name__ == "CppMambaHybridCacheManager"
    for row, settings in ((KDA, {}), (GDN, {"read": "int8"})):
        with pytest.raises(Refused, match="CppMambaHybridCacheManager: supported without a read copy"):
            managed(CppMambaHybridCacheManager, row, Settings(**settings))


def test_a_pool_that_may_grow_is_refused(monkeypatch):
    run = Serving("state", "gdn", 0, monkeypatch)
    monkeypatch.setattr(serving, "SimpleNamespace", lambda **x: SimpleNamespace(**x | {"enable_kv_pool_rebalance": True}))
    with pytest.raises(ValueError, match="kv_cache_config.enable_kv_pool_rebalance: expected false"):
        run._manager(torch.float32)


def test_what_a_step_refuses(monkeypatch):
    run = Serving("current", "mamba2", 2, monkeypatch)
    rid = run.admit()
    run.step({rid: 1}, [])
    with pytest.raises(NotImplementedError, match="accepted_leaf_positions: expected None, got a tensor"):
        run.manager.update_mamba_states(None, None, accepted_leaf_positions=torch.zeros(1))
    metadata = run._metadata({}, 2, 0, 5)
    with pytest.raises(NotImplementedError, match="as many tokens in every request, got 5 tokens of 2 requests"):
        run.model.layers[0].forward(torch.zeros(5, run.width), metadata, metadata.mamba_metadata)
    metadata = run._metadata({}, 1, 0, 4)
    with pytest.raises(ValueError, match="draft length: expected at most 2 drafts a row, got 3"):
        run.model.layers[0].forward(torch.zeros(4, run.width), metadata, metadata.mamba_metadata)
    with pytest.raises(ValueError, match="requests: expected at most 6, got 7"):
        run.recurrent.dummies([False] * 7)


def test_requests_round_by_keys_of_their_own(monkeypatch):
    run = Serving("state", "mamba2", 0, monkeypatch, pool=torch.float16, checkpoint="fp16+sr")
    run.recurrent.restart([3, 1], brought=False)
    run.recurrent.restart([3], brought=True)
    keys = run.recurrent.state.cursors.key
    assert run.recurrent.layout.state == "fp16+sr" and [int(keys[slot]) for slot in (1, 3)] == [1, 2]


def test_the_contract_says_what_managers_have(monkeypatch):
    """The behaviours' attributes are those of the contract, ranks included."""
    run = Serving("current", "gdn", 2, monkeypatch)
    fakes.check(contract.load().symbol("replay history of MambaHybridCacheManagerV2"), _history(run.manager))
    fakes.check(contract.load().symbol("layer cache"), run.manager.mamba_layer_cache(1))
    state = Serving("state", "mamba2", 2, monkeypatch)
    fakes.check(contract.load().symbol("layer cache"), state.manager.mamba_layer_cache(3))
    assert behaviours("state").keys() > {"register_auto_model"}


def _history(manager):
    tensors = {name: getattr(manager, name) for name in ("old_x", "old_B", "old_dt", "old_dA_cumsum")}
    counters = torch.zeros(1, dtype=torch.int32)
    return SimpleNamespace(**tensors, prev_num_accepted_tokens=counters, cache_buf_idx=counters)
