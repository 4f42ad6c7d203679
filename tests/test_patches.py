"""Recipes over syntax trees: what each edit does, that doing it twice does nothing, and what a missing anchor says."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

cst = pytest.importorskip("libcst")
pytest.importorskip("typer")

from replayssm.cli.patch import ENGINES
from replayssm.patches.dispatch import dispatched
from replayssm.patches.edits import Edit, Missing, choice, decorated, entry, fields, statement
from replayssm.patches.recipe import Recipe, Section, locate, mail, make
from replayssm.patches.vendor import vendored

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = '''"""A module."""

import logging

from engine.cache import Pool
from engine.zoo import (
    Animal,
)

KINDS = {
    "a": Pool,
    "b": Animal,
}


class Options:
    backend: A[str, Arg(help="which", choices=["a", "b"])] = "a"
    decode: A[str, Arg(choices=KINDS)] = "a"


class Cache:
    def __init__(self, size):
        """Make one."""
        self.size = size  # as given

    @property
    def free(self):
        return self.size
'''

EDITS = {
    "choice of a list": (
        Edit("m.py", "Options.backend", "", choice("ours")),
        ('choices=["a", "b"]', 'choices=["a", "b", "ours"]'),
    ),
    "choice of a name": (Edit("m.py", "Options.decode", "", choice("ours")), ("choices=KINDS", 'choices=KINDS + ["ours"]')),
    "fields": (
        Edit("m.py", "Options", "", fields("window: int = 16\nbackend: int = 0\n")),
        ('(choices=KINDS)] = "a"\n', '(choices=KINDS)] = "a"\n    window: int = 16\n'),
    ),
    "entry": (Edit("m.py", "KINDS", "", entry("ours", "our.Pool")), ("Animal,\n}", 'Animal,\n    "ours": our.Pool,\n}')),
    "decorator": (
        Edit("m.py", "Cache.free", "", decorated('our.around("free")')),
        ("@property\n", '@property\n    @our.around("free")\n'),
    ),
    "last statement": (
        Edit("m.py", "Cache.__init__", "", statement("our.become(self)")),
        ("# as given\n", "# as given\n        our.become(self)\n"),
    ),
    "first statement": (
        Edit("m.py", "Cache.__init__", "", statement("our.check(size)", first=True)),
        ("        self.size =", "        our.check(size)\n        self.size ="),
    ),
    "import between": (
        Edit("m.py", "Cache", "", lambda node: node, ("from engine.layers import our",)),
        ("import Pool\n", "import Pool\nfrom engine.layers import our\n"),
    ),
    "import before": (
        Edit("m.py", "Cache", "", lambda node: node, ("from engine.ant import our",)),
        ("\nfrom engine.cache", "\nfrom engine.ant import our\nfrom engine.cache"),
    ),
    "import of another package": (
        Edit("m.py", "Cache", "", lambda node: node, ("from our import x",)),
        (")\n\nKINDS", ")\n\nfrom our import x\n\nKINDS"),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit(name):
    edit, (old, new) = EDITS[name]
    assert SOURCE.count(old) == 1
    changed = edit(cst.parse_module(SOURCE))
    assert changed.code == SOURCE.replace(old, new)
    assert edit(changed).code == changed.code


@pytest.mark.parametrize("anchor", ["Cache.size", "Options.free", "free", "Cache.__init__.size"])
def test_missing_anchor(anchor):
    with pytest.raises(Missing, match=rf"{anchor}: expected one definition, got 0"):
        Edit("m.py", anchor, "", decorated("x"))(cst.parse_module(SOURCE))


def test_names_elsewhere_are_no_anchor():
    elsewhere = "def free():\n    pass\n\n\nclass Other:\n    def free(self):\n        pass\n\n\n"
    source = elsewhere + SOURCE.replace(
        "    def __init__", "    def Cache(self):\n        def free():\n            pass\n\n    def __init__"
    )
    changed = Edit("m.py", "Cache.free", "", decorated("x"))(cst.parse_module(source))
    assert changed.code == source.replace("@property\n", "@property\n    @x\n")


def test_ambiguous_anchor():
    with pytest.raises(Missing, match="Cache: expected one definition, got 2"):
        Edit("m.py", "Cache", "", fields("x: int = 1"))(cst.parse_module(SOURCE + "\n\nclass Cache:\n    pass\n"))


@pytest.mark.parametrize(
    ("anchor", "change", "says"),
    [
        ("Options.backend", entry("a", "b"), "Dict: expected"),
        ("Options.backend", choice("a"), "choices= of backend: expected one, got 0"),
        ("KINDS", choice("a"), "AnnAssign: expected"),
        ("Cache", decorated("a"), "FunctionDef: expected"),
        ("Cache", statement("a"), "FunctionDef: expected"),
        ("Cache.free", fields("a = 1"), "ClassDef: expected"),
    ],
)
def test_anchor_of_another_shape(anchor, change, says):
    with pytest.raises(Missing, match=says):
        Edit("m.py", anchor, "", change)(cst.parse_module(SOURCE.replace("choices=", "options=")))


def test_fields_come_behind_fields():
    changed = Edit("m.py", "Cache", "", fields("y: int = 2"))(
        cst.parse_module(SOURCE + "    x: int = 1\n\n    def z(self): ...\n")
    )
    assert changed.code.endswith("    x: int = 1\n    y: int = 2\n\n    def z(self): ...\n")


# ---- a call handed on --------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "an argument that is new": (
        '''@api
def f(a, b=1):
    """Sum.

    Parameters
    ----------
    a : int
        One.

    Returns
    -------
    int
    """
    return a + b
''',
        '''@api
def f(a, b=1, backend: str = "auto"):
    """Sum.

    Parameters
    ----------
    a : int
        One.
    backend : str
        Backend to use: "auto" or "ours".
        ``"ours"`` is ours.

    Returns
    -------
    int
    """
    if backend == "ours":
        return our.f(
            a=a,
            b=b,
        )
    if backend != "auto":
        raise ValueError(f"Unknown backend: {backend}")
    return a + b
''',
    ),
    "of more values": (
        '''def f(
    a,
    *,
    backend: Literal["x", "y"] = "x",
    b,
):
    """Sum.

    Args:
        backend: which
            one.
        b: two.
    """
    return a + b
''',
        '''def f(
    a,
    *,
    backend: Literal["x", "y", "ours"] = "x",
    b,
):
    """Sum.

    Args:
        backend: which
            one.
            ``"ours"`` is ours.
        b: two.
    """
    if backend == "ours":
        return our.f(
            a=a,
            b=b,
        )
    return a + b
''',
    ),
    "by keyword": (
        '''def f(
    a,
    *,
    b,
):
    """Sum.
    """
    return a + b
''',
        '''def f(
    a,
    *,
    b,
    backend: str = "auto",
):
    """Sum.

    ``"ours"`` is ours.
    """
    if backend == "ours":
        return our.f(
            a=a,
            b=b,
        )
    if backend != "auto":
        raise ValueError(f"Unknown backend: {backend}")
    return a + b
''',
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dispatched(name):
    old, new = FUNCTIONS[name]
    edit = Edit("m.py", "f", "", dispatched("ours", "our.f", ["a", "b"], ("is ours.",)))
    changed = edit(cst.parse_module(old))
    assert changed.code == new
    assert edit(changed).code == new


def test_dispatched_knows_every_parameter():
    old, _ = FUNCTIONS["by keyword"]
    with pytest.raises(Missing, match="f: expected the parameters a, got b too"):
        Edit("m.py", "f", "", dispatched("ours", "our.f", ["a"], ("is ours.",)))(cst.parse_module(old))


# ---- whole patches -----------------------------------------------------------------------------------------------------

RECIPE = Recipe(
    package="engine", distribution="engine", home="python", mark="setup.py", message="Add ours\n\nWhy.\n",
    edits=tuple(edit for edit, _ in EDITS.values()), files={"our.py": '"""Ours. All of it."""\n'},
    beside={"tests/test_our.py": "assert True\n"}, sections=(Section("docs/page.md", "## Ours", "## Ours\n\nText.\n", "docs"),),
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "python" / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "m.py").write_text(SOURCE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "setup.py").touch()
    (tmp_path / "docs" / "page.md").write_text("# Page\n\nwithout its last line's end\fand a form feed")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "all")
    git(tmp_path, "tag", "v7")
    return tmp_path


def git(root, *args, **kwargs):
    return subprocess.run(["git", "-C", root, *args], check=True, capture_output=True, text=True, **kwargs).stdout


def test_patch_applies_and_is_complete(checkout):
    source = locate(checkout, RECIPE)
    patch = make(source, RECIPE)
    git(checkout, "apply", "--check", "-", input=mail(patch, RECIPE, source))
    git(checkout, "apply", "-", input=mail(patch, RECIPE, source))
    assert {file: (checkout / file).read_text() for file in patch.files} == patch.files
    assert (checkout / "docs/page.md").read_text().endswith("feed\n\n## Ours\n\nText.\n")
    assert {step.done for step in patch.steps} == {"changed", "added"}
    again = make(source, RECIPE)
    assert again.diff == "" and again.files == {} and {step.done for step in again.steps} == {"already there"}


def test_installed_package(checkout):
    for path in (checkout / "python", checkout / "python" / "engine"):
        source = locate(path, RECIPE)
        assert not source.checkout and source.root == (checkout / "python").resolve()
        patch = make(source, RECIPE)
        assert set(patch.files) == {"engine/m.py", "engine/our.py"}
        assert [step.file for step in patch.steps if step.done == "left out"] == ["tests/test_our.py", "docs/page.md"]


def test_missing_anchor_names_file_and_version(checkout):
    file = checkout / "python/engine/m.py"
    file.write_text(SOURCE.replace("def free", "def available"))
    with pytest.raises(LookupError, match=r"python/engine/m.py: anchor Cache.free: expected one .*, got 0 \(engine v7\)"):
        make(locate(checkout, RECIPE), RECIPE)
    file.unlink()
    with pytest.raises(LookupError, match=r"m.py: anchor Options.backend: no such file \(engine v7\)"):
        make(locate(checkout, RECIPE), RECIPE)


def test_an_edit_of_another_version(checkout):
    """Where a file is not there, the edit of the version that has none; without one, that it is not needed is told."""
    here = Edit("m.py", "KINDS", "kinds", entry("ours", "our.Pool"))
    moved = dataclasses.replace(here, file="kinds/m.py", anchor="Kinds", otherwise=here)
    gone = dataclasses.replace(here, file="gone.py", optional=True)
    recipe = dataclasses.replace(RECIPE, edits=(moved, gone), files={}, beside={}, sections=())
    patch = make(locate(checkout, recipe), recipe)
    assert set(patch.files) == {"python/engine/m.py"}
    assert [(step.file, step.done) for step in patch.steps] == [
        ("python/engine/m.py", "changed"), ("python/engine/gone.py", "not in this version")
    ]  # fmt: skip
    with pytest.raises(LookupError, match="kinds/m.py: anchor Kinds: no such file"):
        edits = (dataclasses.replace(moved, otherwise=None),)
        make(locate(checkout, recipe), dataclasses.replace(recipe, edits=edits))


def test_no_engine_there(tmp_path):
    with pytest.raises(ValueError, match="source: expected a checkout with setup.py and python/engine"):
        locate(tmp_path, RECIPE)


# ---- kernels that are copied -------------------------------------------------------------------------------------------

VENDORED = """
import sys
sys.modules["replayssm"] = None
import torch
from engine.kernels import GDN, Layout, ReplayState
state = ReplayState(Layout(GDN, H=2, G=1, V=16, K=16), layers=1, slots=2, backend="torch")
slots = torch.tensor([1])
x = {name: torch.randn(1, heads, 16).bfloat16() for name, heads in (("q", 1), ("k", 1), ("v", 2))}
plan = state.plan(slots)
o = state.step(0, plan, **x, b=torch.randn(1, 2), a=torch.randn(1, 2), A=-torch.ones(2), dt_bias=torch.zeros(2))
state.commit(plan)
assert o.isfinite().all() and int(state.cursors.count[1]) == 1
del sys.modules["replayssm"]
import replayssm
assert replayssm.Layout is not Layout and torch.ops.engine_kernels.step is not torch.ops.replayssm.step
"""


def test_vendored(tmp_path):
    """A package of its own, which computes without ours and beside it."""
    pytest.importorskip("ruff")
    texts = vendored("replayssm.state", "engine.kernels", columns=88)
    assert {"__init__.py", "state.py", "kernels/decode.py"} <= set(texts)
    assert not {"doctor.py", "reference.py", "cli/app.py"} & set(texts), "what no entry imports"
    assert "torch.ops.engine_kernels.plan(" in texts["state.py"] and "torch.ops.replayssm.plan(" not in texts["state.py"]
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    for file, text in texts.items():
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
        (tmp_path / "engine/kernels" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "engine/kernels" / file).write_text(text)
    done = subprocess.run([sys.executable, "-c", VENDORED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_vendored_entries_of_integrations():
    """Also where the package is installed in place, whose integrations lie in a folder of their own; never none of it."""
    pytest.importorskip("ruff")
    texts = vendored("replayssm.integrations.flashinfer.configuration", "engine.kernels", columns=88)
    assert "integrations/flashinfer/configuration.py" in texts
    with pytest.raises(ModuleNotFoundError, match="entry: expected a module .* got replayssm.integrations.no_engine"):
        vendored("replayssm.integrations.no_engine", "engine.kernels", columns=88)


def test_vendored_needs_ruff(monkeypatch):
    monkeypatch.setattr("replayssm.patches.vendor.find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="style vendor: expected ruff, .* got none; pip install ruff"):
        vendored("replayssm.state", "engine.kernels", columns=88)


# ---- the engines' pages ------------------------------------------------------------------------------------------------


def rows(recipe):
    """What a recipe touches, as the engine's page lists it."""
    yield from ("| file | change |", "|---|---|")
    told: dict[str, list[str]] = {}
    for edit in recipe.edits:
        told.setdefault(f"`{edit.file}`", []).append(edit.what)
        while edit.otherwise:
            told.setdefault(f"`{edit.otherwise.file}`, in its stead", []).append(edit.otherwise.what)
            edit = edit.otherwise
    yield from (f"| {file} | {'; '.join(dict.fromkeys(what))} |" for file, what in told.items())
    yield from (f"| `{file}` | new |" for file in (*recipe.files, *recipe.beside))
    yield from (f"| `{section.file}` | {section.what} |" for section in recipe.sections)


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_list_every_file(engine):
    recipe = importlib.import_module(f"replayssm.integrations.{engine}.upstream").recipe("depend")
    page = (DOCS / f"patch-{engine}.md").read_text()
    assert "\n".join(rows(recipe)) in page, "\n".join(rows(recipe))
