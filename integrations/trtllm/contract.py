"""The contract with TensorRT-LLM as data: contract.yaml, read and checked."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from inspect import Parameter, Signature
from typing import Annotated, Literal

import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Standing = Literal["main", "branch", "inferred"]
Family = Literal["mamba2", "gdn", "kda"]
Form = Literal["current", "strategy", "state"]
Kind = Literal["function", "method", "class", "dataclass", "attributes", "tensors"]
DTypes = Literal["act", "pool", "float32", "int32", "int64", "bool"]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Source(_Facts):
    """Where a fact was read: a file of the repository, at a commit or in a pull request, and how far it can be relied on."""

    file: str
    commit: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
    pull: int | None = None
    standing: Standing

    @model_validator(mode="after")
    def _located(self) -> Source:
        if self.commit is None and self.pull is None:
            raise ValueError(f"{self.file}: expected a commit or a pull request, got neither")
        return self


class Tensor(_Facts):
    """Rank, dtype and layout of an argument or attribute; for what is no tensor, its meaning alone."""

    rank: int | list[int] | None = None
    dtype: DTypes | None = None
    layout: str

    def refuse(self, name: str, rank: int) -> str | None:
        """What is wrong with a tensor of this rank, or None."""
        ranks = self.rank if isinstance(self.rank, list) else [self.rank]
        return None if None in ranks or rank in ranks else f"{name}: expected rank {self.rank}, {self.layout}, got rank {rank}"


def signature(names: list[str]) -> Signature:
    """The signature that a list of parameters says: ``name=`` has a default, ``*`` begins keywords, ``**`` takes further ones.

    Raises: ValueError: a parameter without a default after one with, or anything after ``**``.
    """
    kind, parameters = Parameter.POSITIONAL_OR_KEYWORD, []
    for name in names:
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
        elif name == "**":
            parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD))
        else:
            default = None if name.endswith("=") else Parameter.empty
            parameters.append(Parameter(name.removesuffix("="), kind, default=default))
    return Signature(parameters)


def _parameters(names: list[str]) -> list[str]:
    signature(names)
    return names


Parameters = Annotated[list[str], BeforeValidator(_parameters)]


class Symbol(_Facts):
    """One thing of TensorRT-LLM that the shim calls, subclasses or reads.

    Attributes:
        modules: where it may live, the newest first.
        form: the shape of the cache managers that it belongs to; None: every one.
        optional: whether a release may lack it.
        parameters: of a function or method; of a class, its constructor's.
        methods: their parameters, or "property".
        tensors: of parameters; attributes: of instances.
    """

    name: str
    kind: Kind
    modules: list[str] = Field(min_length=1)
    source: str
    form: Form | None = None
    optional: bool = False
    parameters: Parameters = []
    methods: dict[str, Parameters | Literal["property"]] = {}
    tensors: dict[str, Tensor] = {}
    attributes: dict[str, Tensor] = {}
    note: str | None = None


class Model(_Facts):
    """A model class of the zoo that the shim registers over."""

    module: str
    class_name: str = Field(alias="class")
    family: Family
    standing: Standing = "main"


class Contract(_Facts):
    """Everything the shim relies on.

    Attributes:
        versions: releases that the facts hold for.
        models: by the architecture that a config.json names.
    """

    package: str
    versions: str
    sources: dict[str, Source]
    models: dict[str, Model]
    symbols: list[Symbol]

    @model_validator(mode="after")
    def _whole(self) -> Contract:
        SpecifierSet(self.versions)
        seen: set[tuple[str, str | None]] = set()
        for symbol in self.symbols:
            if symbol.source not in self.sources:
                raise ValueError(f"{symbol.name}: source: expected one of {sorted(self.sources)}, got {symbol.source!r}")
            if (symbol.name, symbol.form) in seen:
                raise ValueError(f"{symbol.name}: expected once for form {symbol.form}, got it twice")
            seen.add((symbol.name, symbol.form))
        return self

    def symbol(self, name: str, form: Form | None = None) -> Symbol:
        """The symbol of this name, of this form of the managers where there are several."""
        found = [one for one in self.symbols if one.name == name and form in (None, one.form)]
        if len(found) != 1:
            raise KeyError(f"{name}: expected one symbol of form {form}, found {len(found)}")
        return found[0]

    def supports(self, version: str) -> bool:
        """Whether the facts hold for this release, pre-releases included."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def parse(text: str) -> Contract:
    """A contract from YAML text. Raises pydantic.ValidationError (a ValueError) naming each field that is wrong."""
    return Contract.model_validate(yaml.safe_load(text))


@cache
def load() -> Contract:
    """The contract that ships with this package."""
    return parse(files(__package__).joinpath("contract.yaml").read_text())
