"""The contract file and its loader: facts that are whole, and errors that name the field."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
yaml = pytest.importorskip("yaml")

from replayssm.integrations.trtllm import contract
from tests.integrations.trtllm import fakes

SMALL = """
package: engine
versions: ">=1.0,<2"
sources: {here: {file: a.py, commit: %s, standing: main}}
models: {A: {module: engine.a, class: A, family: gdn}}
symbols: [{name: f, kind: function, modules: [engine.a], source: here, parameters: [x, "*", y=, "**"]}]
""" % ("a" * 40)


def test_the_extra_installs_the_contract_s_versions():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert f"tensorrt-llm{contract.load().versions}" in project["optional-dependencies"]["trtllm"]


def test_custom_module_dirs(monkeypatch):
    """TensorRT-LLM puts the folder's parent first on sys.path: nothing else may lie there."""
    folder = Path(contract.__file__).parent / "modules" / "replayssm_trtllm"
    assert {one.name for one in folder.parent.iterdir()} <= {"__init__.py", "__pycache__", folder.name}
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.import_module(folder.name)
    assert sys.modules[folder.name].replayssm.integrations.trtllm.contract is contract


def test_every_symbol_says_where_it_was_read():
    of = contract.load()
    assert len(of.symbols) > 20 and {model.family for model in of.models.values()} == {"mamba2", "gdn", "kda"}
    for symbol in of.symbols:
        source = of.sources[symbol.source]
        assert source.commit or source.pull, symbol.name
        assert all(module.startswith(("tensorrt_llm.", "fla.")) for module in symbol.modules)
    assert {symbol.form for symbol in of.symbols} == {None, "current", "strategy", "state"}


def test_parameters_are_signatures():
    of = contract.parse(SMALL)
    assert str(contract.signature(of.symbol("f").parameters)) == "(x, *, y=None, **kwargs)"
    assert of.symbol("f").tensors == {}
    with pytest.raises(KeyError, match="g: expected one symbol"):
        of.symbol("g")


@pytest.mark.parametrize("version, supported", [
    ("1.4.0rc4", True), ("1.4.0", True), ("1.4.3", True), ("1.4.0rc3", False), ("1.2.1", False), ("1.5.0rc1", False),
])  # fmt: skip
def test_versions(version, supported):
    assert contract.load().supports(version) == supported


@pytest.mark.parametrize("old, new, message", [
    ("kind: function", "kind: functions", "kind"),
    ("standing: main", "standing: sure", "standing"),
    ("source: here", "source: there", "expected one of \\['here'\\], got 'there'"),
    ("commit: " + "a" * 40, "commit: abc", "commit"),
    (", commit: " + "a" * 40, "", "a.py: expected a commit or a pull request"),
    ("family: gdn", "family: gdm", "family"),
    ("[x, \"*\", y=, \"**\"]", "[x=, y]", "non-default argument follows default"),
    ("[x, \"*\", y=, \"**\"]", "[\"**\", y]", "wrong parameter order"),
    ("package: engine", "packages: engine", "packages"),
    (">=1.0,<2", "one", "nvalid specifier"),
    ("symbols: [", "symbols: [{name: f, kind: function, modules: [engine.a], source: here}, ", "twice"),
    ("modules: [engine.a], source", "modules: [], source", "modules"),
])  # fmt: skip
def test_wrong_contracts_name_the_field(old, new, message):
    assert old in SMALL
    with pytest.raises(ValueError, match=message):
        contract.parse(SMALL.replace(old, new))


def test_fakes_raise_where_no_behaviour_is_given_and_check_ranks():
    modules = fakes.generate(contract.load(), "current", {"model": object})
    mixer = modules["tensorrt_llm._torch.modules.mamba.mamba2_mixer"]
    with pytest.raises(fakes.NotReplaced, match="fake Mamba2Mixer.forward was called"):
        mixer.Mamba2Mixer().forward(1, 2, 3)
    with pytest.raises(TypeError, match="missing a required argument"):
        modules["tensorrt_llm._torch.models.modeling_utils"].register_auto_model()
    with pytest.raises(AssertionError, match="expected rank 5"):
        import torch

        of = modules["tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager"]
        of._promote_mamba_state_triton(torch.zeros(1, 1, 1, 1), torch.zeros(1), None, None, None)


def test_fakes_refuse_behaviours_of_other_parameters():
    def register_auto_model(names):
        return names

    with pytest.raises(AssertionError, match="register_auto_model: expected \\(name\\), got \\(names\\)"):
        fakes.generate(contract.load(), "current", {"model": object, "register_auto_model": register_auto_model})
