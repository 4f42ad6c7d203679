"""Fakes of TensorRT-LLM, generated from contract.yaml: modules, classes and functions of its names and parameters.

They are not TensorRT-LLM. A fake does what a *behaviour* says, and a behaviour must have the contract's parameters; without one
it raises, which is how tests see that the shim replaced a call. Tensor arguments are checked for the contract's ranks.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from replayssm.integrations.trtllm.contract import Contract, Form, Symbol, signature

VERSION = "1.4.0rc4+fake"


class NotReplaced(AssertionError):
    """A fake without a behaviour was called."""


def generate(contract: Contract, form: Form, behaviours: dict[str, Any], version: str = VERSION) -> dict[str, ModuleType]:
    """Modules by name, holding every symbol of the contract that managers of this form go with.

    Args:
        behaviours: by symbol: a function, or a class whose methods and properties the fake class gets.
    """
    modules: dict[str, ModuleType] = {}
    names = {symbol.name for symbol in contract.symbols}
    for symbol in contract.symbols:
        if symbol.form in (None, form) and symbol.kind in ("function", "class", "dataclass"):
            places = symbol.modules if symbol.kind == "function" else symbol.modules[:1]
            made = _made(symbol, behaviours.get(symbol.name), _module(modules, places[0]), names)
            for place in places:
                setattr(_module(modules, place), symbol.name, made)
        elif symbol.kind == "method":
            owner, name = symbol.name.split(".")
            method = classmethod(_raising(symbol.name, symbol.parameters))
            setattr(_module(modules, symbol.modules[0]), owner, type(owner, (), {name: method}))
    for model in contract.models.values():
        behaviour = behaviours.get(model.class_name) or behaviours["model"]
        setattr(_module(modules, model.module), model.class_name, type(model.class_name, (behaviour,), {}))
    _module(modules, contract.package).__version__ = version  # type: ignore[attr-defined]
    return modules


def install(modules: dict[str, ModuleType], monkeypatch: Any) -> None:
    """Import finds these, until the test is over."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def check(symbol: Symbol, instance: Any) -> None:
    """An instance has the attributes of the contract, its tensors the ranks."""
    for name, fact in symbol.attributes.items():
        value = getattr(instance, name)
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            value = value[0][None]
        wrong = fact.refuse(f"{symbol.name}.{name}", value.dim()) if isinstance(value, Tensor) else None
        assert wrong is None, wrong


def _module(modules: dict[str, ModuleType], name: str) -> ModuleType:
    parent, _, child = name.rpartition(".")
    if name not in modules:
        module = ModuleType(name, "A fake generated from contract.yaml; not TensorRT-LLM.")
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        modules[name] = module
        if parent:
            setattr(_module(modules, parent), child, module)
    return modules[name]


def _made(symbol: Symbol, behaviour: Any, module: ModuleType, names: set[str]) -> Any:
    if symbol.kind == "dataclass":
        return make_dataclass(symbol.name, list(signature(symbol.parameters).parameters), kw_only=True, frozen=True)
    if symbol.kind == "function":
        return _function(symbol, behaviour)
    return _class(symbol, behaviour, module, names)


def _function(symbol: Symbol, behaviour: Any) -> Any:
    wanted = signature(symbol.parameters)
    if behaviour is not None:
        _same(symbol.name, behaviour, symbol.parameters)

    def fake(*args, **kwargs):
        bound = wanted.bind(*args, **kwargs)
        for name, fact in symbol.tensors.items():
            value = bound.arguments.get(name)
            wrong = fact.refuse(f"fake {symbol.name}: {name}", value.dim()) if isinstance(value, Tensor) else None
            assert wrong is None, wrong
        if behaviour is None:
            raise NotReplaced(f"fake {symbol.name} was called")
        return behaviour(*args, **kwargs)

    fake.__name__, fake.__signature__ = symbol.name, wanted  # type: ignore[attr-defined]
    return fake


def _class(symbol: Symbol, behaviour: Any, module: ModuleType, names: set[str]) -> type:
    """Methods are the behaviour's code, finding the fake module's names: the shim rebinds some of those for its own."""
    members: dict[str, Any] = {"__module__": module.__name__}
    if behaviour is not None and symbol.parameters:
        _same(symbol.name, behaviour.__init__, symbol.parameters)
    for name, parameters in symbol.methods.items():
        if parameters == "property":
            members[name] = property(_raising(f"{symbol.name}.{name}", []))
        elif behaviour is None or not hasattr(behaviour, name):
            members[name] = _raising(f"{symbol.name}.{name}", parameters)
    if behaviour is None and symbol.parameters:
        members["__signature__"] = signature(symbol.parameters)
    for one in reversed(() if behaviour is None else behaviour.__mro__[:-1]):
        for name, member in vars(one).items():
            if name in symbol.methods:
                _same(f"{symbol.name}.{name}", member, symbol.methods[name])
            if isinstance(member, FunctionType) and not member.__closure__:
                for known, value in member.__globals__.items():
                    if known not in names:
                        vars(module).setdefault(known, value)
                there = FunctionType(member.__code__, vars(module), name, member.__defaults__)
                there.__kwdefaults__ = member.__kwdefaults__
                member = there
            if name not in ("__dict__", "__weakref__"):
                members[name] = member
    return type(symbol.name, getattr(behaviour, "bases", ()), members)


def _raising(name: str, parameters: list[str]) -> Any:
    """A method without a behaviour."""

    def fake(self: Any, *args, **kwargs) -> Any:
        raise NotReplaced(f"fake {name} was called")

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    fake.__signature__ = inspect.Signature([own, *signature(parameters).parameters.values()])  # type: ignore[attr-defined]
    return fake


def _same(name: str, behaviour: Any, parameters: Any) -> None:
    """A behaviour has the contract's parameters: names, order, kinds, and which have defaults."""
    if parameters == "property":
        assert isinstance(behaviour, property), f"{name}: expected a property, got {behaviour}"
        return

    def facts(of: inspect.Signature) -> list[tuple]:
        return [
            (p.kind, p.name if p.kind != p.VAR_KEYWORD else "", p.default is p.empty)
            for p in of.parameters.values()
            if p.name != "self"
        ]

    wanted, found = facts(signature(parameters)), facts(inspect.signature(behaviour))
    assert wanted == found, f"behaviour of {name}: expected {signature(parameters)}, got {inspect.signature(behaviour)}"
