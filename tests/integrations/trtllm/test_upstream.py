"""`replayssm patch trtllm` on a package of the names that it edits, made here, and on the checkout that a user points to.

The first is not TensorRT-LLM: it shows that edits, hooks and configuration fit together. The second needs a checkout or an
installed package in TENSORRT_LLM_SOURCE, and is not run without.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytest.importorskip("typer")
pytest.importorskip("pydantic")

from replayssm.integrations.trtllm.settings import Settings
from replayssm.integrations.trtllm.upstream import EDITS, ENTRY, recipe
from replayssm.patches.recipe import locate
from tests.integrations import patched as made
from tests.integrations.patched import AS_SOMEONE, git

RECIPE = recipe("depend")
SOURCE = os.environ.get("TENSORRT_LLM_SOURCE")
PAGE = RECIPE.sections[0].file
LINT = ("--select", "I,F", "--config", "lint.isort.known-first-party=['tensorrt_llm']")

PACKAGE = {
    "__init__.py": '__version__ = "1.4.0"\n',
    "llmapi/__init__.py": "",
    "llmapi/utils.py": '''from pydantic import BaseModel, ConfigDict


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")
''',
    "llmapi/llm_args.py": '''from typing import Optional

from pydantic import Field as PydanticField

from .utils import StrictBaseModel


def Field(default, *, status=None, **kwargs):
    return PydanticField(default, **kwargs)


class KvCacheConfig(StrictBaseModel):
    """Of the pool."""
    dtype: Optional[str] = Field(default=None, description="which")

    def told(self):
        return self.dtype
''',
    "_torch/__init__.py": "",
    "_torch/utils.py": "NAME = 1\n",
    "_torch/pyexecutor/__init__.py": "",
    "_torch/pyexecutor/model_loader.py": '''from types import SimpleNamespace

from ..utils import NAME


class ModelLoader:

    def __init__(self, llm_args):
        self.llm_args = llm_args

    def _load_and_validate_config(self, checkpoint_dir):
        return SimpleNamespace(pretrained_config=SimpleNamespace(dir=checkpoint_dir, text_config=SimpleNamespace()))
''',
    "_torch/pyexecutor/_util.py": '''from ..utils import NAME


def get_kv_cache_manager_cls(model_config, kv_cache_config, is_disagg=False):
    return "manager", kv_cache_config, is_disagg
''',
    "_torch/models/__init__.py": "",
    "_torch/models/modeling_auto.py": '''from ..utils import NAME


class AutoModelForCausalLM:

    @staticmethod
    def from_config(config):
        return "model"
''',
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    for file, text in PACKAGE.items():
        (root / "tensorrt_llm" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "tensorrt_llm" / file).write_text(text)
    (root / PAGE).parent.mkdir(parents=True)
    (root / PAGE).write_text("Text.\n")
    (root / RECIPE.mark).touch()
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, *AS_SOMEONE, "commit", "-qm", "all")
    return root


@pytest.fixture(scope="module")
def patched(original, tmp_path_factory):
    return made.commit("trtllm", original, tmp_path_factory.mktemp("commit"))


def test_commit(patched):
    package = {f"tensorrt_llm/{file}" for file in (*(edit.file for edit in EDITS), *RECIPE.files)}
    assert set(made.changed(patched)) == package | {PAGE, *RECIPE.beside}
    assert (patched / PAGE).read_text() == f"Text.\n\n{RECIPE.sections[0].text}"
    done = made.patch("trtllm", patched)
    assert done.exit_code == 0 and done.stdout == "" and ": changed: " not in done.stderr


def test_formatter_changes_nothing_more(original, patched):
    """In ruff's form of 100 columns, imports sorted."""
    assert made.complaints(patched, patched, LINT, columns=100) == made.complaints(original, patched, LINT, columns=100)


WORKS = """
import importlib, sys
from types import SimpleNamespace
from tensorrt_llm._torch.models.modeling_auto import AutoModelForCausalLM
from tensorrt_llm._torch.pyexecutor._util import get_kv_cache_manager_cls
from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
from tensorrt_llm.llmapi.llm_args import KvCacheConfig

def both(**fields):
    pool = KvCacheConfig(**fields)
    config = ModelLoader(SimpleNamespace(kv_cache_config=pool))._load_and_validate_config("folder")
    return AutoModelForCausalLM.from_config(config), get_kv_cache_manager_cls(config, 1, is_disagg=2)

assert both() == both(mamba_replay={"mode": "off"}) == ("model", ("manager", 1, 2))
assert not any("replayssm." in name for name in sys.modules)

builtin = importlib.import_module(sys.argv[1])
engine, register = (sys.modules[f"{builtin.__package__}.{name}"] for name in ("engine", "register"))
assert engine.built_in() and register.register() == []
seen = []
builtin.built = lambda original, config: seen.append(("built", original(config), config.pretrained_config.replayssm["window"]))
builtin.selected = lambda original, *args, **kwargs: seen.append(("selected", original(*args, **kwargs)))
both(mamba_replay={"window": 8})
assert seen == [("built", "model", 8), ("selected", ("manager", 1, 2))], seen
"""


def test_the_package_calls_what_the_field_asks_for(patched):
    made.run(patched / "tensorrt_llm", "-c", WORKS, ENTRY)


@pytest.mark.slow
def test_vendored_package_calls_its_copy(original, tmp_path):
    patched = made.commit("trtllm", original, tmp_path, "--style", "vendor")
    assert made.complaints(patched, patched, LINT, columns=100) == made.complaints(original, patched, LINT, columns=100)
    without = f"import sys; sys.modules['replayssm'] = None\n{WORKS}"
    made.run(patched / "tensorrt_llm", "-c", without, ENTRY.replace("replayssm", "tensorrt_llm._torch.replayssm_kernels", 1))


def test_brought_test_passes(patched):
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", str(patched))
    made.run(patched / "tensorrt_llm", "-m", "pytest", *options, str(patched / next(iter(RECIPE.beside))))


def test_fields_are_the_settings():
    """The engine's field has the names, defaults and limits of what the shim then reads."""
    scope = {"StrictBaseModel": Settings.__mro__[1]}
    text = RECIPE.files["llmapi/mamba_replay_config.py"].replace("from .utils import StrictBaseModel\n", "")
    exec(compile(text, "mamba_replay_config.py", "exec", dont_inherit=True), scope)
    theirs, ours = scope["MambaReplayConfig"].model_fields, Settings.model_fields
    assert {name: (one.default, one.annotation, str(one.metadata)) for name, one in theirs.items()} == {
        name: (one.default, one.annotation, str(one.metadata)) for name, one in ours.items()
    }


def test_a_missing_name_writes_nothing(original, tmp_path):
    root = tmp_path / "checkout"
    shutil.copytree(original, root)
    file = root / "tensorrt_llm/_torch/pyexecutor/_util.py"
    file.write_text(file.read_text().replace("def get_kv", "def pick_kv"))
    done = made.patch("trtllm", root, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and not (tmp_path / "out").exists()
    assert "_util.py: anchor get_kv_cache_manager_cls: expected one definition, got 0 (tensorrt-llm " in done.stderr


@pytest.mark.skipif(
    SOURCE is None, reason="not run: no TensorRT-LLM; TENSORRT_LLM_SOURCE names a checkout or a package's folder"
)
def test_applies_to_the_real_source(tmp_path):
    found = locate(Path(SOURCE or ""), RECIPE)
    assert made.patch("trtllm", Path(SOURCE), "--out", str(tmp_path / "out")).exit_code == 0
    git(found.root, "apply", "--check", str(tmp_path / "out"))
