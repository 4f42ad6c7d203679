"""The real package: signatures, and names that resolve to our calls and back."""

import ast
import importlib.util
import inspect
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp())  # it writes there when imported
flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
fi = pytest.importorskip("replayssm.integrations.flashinfer")

from replayssm.integrations.flashinfer import kda, patch
from tests.harness import relative_worst
from tests.integrations.flashinfer.harness import Mamba


def parameters(call) -> list[tuple]:
    """Names, kinds and defaults."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(call).parameters.values()]


def original(module: str, name: str):
    """FlashInfer's function; of a module that this machine cannot import, one of the same signature from its source."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        spec = importlib.util.find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text())
    found = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name)
    found.decorator_list, found.body, found.returns = [], [ast.Pass()], None
    for one in ast.walk(found.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    scope: dict = {}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), spec.origin, "exec"), scope)
    return scope[name]


@pytest.mark.parametrize("op, module, ours", [(op, *one) for op, several in fi.OPS.items() for one in several])
def test_signatures(op, module, ours):
    """Names, order, kinds and defaults of arguments are this FlashInfer's; ours may go on where an older one ends."""
    mine, theirs = parameters(ours), parameters(original(module, ours.__name__))
    if module == "flashinfer.kda_decode":  # the decode part of the other facade, which leaves its backend open
        mine = [one for one in mine if one[0] not in (*kda._PREFILL, "checkpoint_every_n_tokens")]
        mine, theirs = [[one if one[0] != "backend" else one[:2] for one in side] for side in (mine, theirs)]
    if op == "gated_delta_rule_mtp_ucache_flush":
        assert len(theirs) in (29, 33)
        mine = mine[: len(theirs)]
    assert mine == theirs


def bindings(name: str) -> dict[str, object]:
    """Every name of FlashInfer's loaded modules that resolves to a function of this name."""
    return {
        f"{module}.{attribute}": value
        for module in list(sys.modules)
        if module.partition(".")[0] == "flashinfer" and sys.modules[module] is not None
        for attribute, value in vars(sys.modules[module]).items()
        if inspect.isfunction(value) and value.__name__ == name
    }


def test_names_resolve_to_ours_and_back():
    """Both the package's and the module's name, again and again; what else a module holds stays."""
    import flashinfer.mamba

    module = sys.modules["flashinfer.mamba.checkpointing_ssu"]
    runner, names = module.CheckpointingSSURunner, ("checkpointing_ssu", "selective_state_update", "recurrent_kda")
    before = {name: bindings(name) for name in names}
    assert {"flashinfer.mamba.checkpointing_ssu", "flashinfer.mamba.checkpointing_ssu.checkpointing_ssu"} <= set(
        before["checkpointing_ssu"]
    )
    with fi.install(["checkpointing_ssu", "recurrent_kda"]) as installed:
        assert installed.ops == ("checkpointing_ssu", "recurrent_kda") and not installed.absent
        fi.install(["checkpointing_ssu"])
        assert flashinfer.mamba.checkpointing_ssu is module.checkpointing_ssu is fi.checkpointing_ssu
        assert module.allocate_checkpointing_ssu_scratch is fi.allocate_checkpointing_ssu_scratch
        assert module.CheckpointingSSURunner is runner
        assert bindings("selective_state_update") == before["selective_state_update"]
        for name in ("checkpointing_ssu", "recurrent_kda"):
            now = bindings(name)
            assert set(now) == set(before[name]) and not set(now.values()) & set(before[name].values())
    assert {name: bindings(name) for name in names} == before
    fi.uninstall()
    installed = fi.install()
    try:
        assert set(installed.ops) | set(installed.absent) == set(fi.OPS) and "selective_state_update" in installed.ops
        assert all(op.startswith("gated_delta_rule_mtp") for op in installed.absent), installed.absent
        assert flashinfer.mamba.selective_state_update is fi.selective_state_update
    finally:
        fi.uninstall()
    assert {name: bindings(name) for name in names} == before


def test_modules_loaded_later_are_bound_again(monkeypatch):
    """A second install finds names that were bound to the original meanwhile; a foreign patch is kept and told."""
    import flashinfer.mamba

    original = flashinfer.mamba.selective_state_update
    with fi.install(["selective_state_update"]):
        monkeypatch.setattr(flashinfer, "late", original, raising=False)
        fi.install(["selective_state_update"])
        assert flashinfer.late is fi.selective_state_update
    assert flashinfer.late is original
    fi.install(["selective_state_update"])
    monkeypatch.setattr(flashinfer.mamba, "selective_state_update", foreign := lambda: None)
    with pytest.raises(RuntimeError, match="something else replaced flashinfer.mamba.selective_state_update"):
        fi.uninstall()
    assert flashinfer.mamba.selective_state_update is foreign and flashinfer.late is original


def test_a_caller_of_flashinfer_gets_our_result():
    """Through the package's name, with no GPU: the same bits as our own call."""
    results = []
    for call in ("ours", "theirs"):
        run = Mamba(2, 4, [0], H=2, G=1, V=16, K=16)
        x = run.inputs(1, 2)
        with fi.install(["checkpointing_ssu"]):
            import flashinfer.mamba

            function = fi.checkpointing_ssu if call == "ours" else flashinfer.mamba.checkpointing_ssu
            results.append(
                function(
                    **run.pool, ring_start=run.start, prev_num_accepted_tokens=run.prev, **run.as_given(x),
                    out=torch.empty_like(x["x"]), dt_softplus=True,
                )
            )  # fmt: skip
    assert torch.equal(*results) and relative_worst(results[0][0], run.oracle(0, x, 0, 2)[0]) < 1e-4


def test_prefill_stays_flashinfers(monkeypatch):
    """A call of recurrent_kda that is no decode goes to the original, with its arguments."""
    seen = []
    monkeypatch.setattr(sys.modules["flashinfer.kda"], "recurrent_kda", original := lambda *a, **kw: seen.append((a, kw)))
    monkeypatch.setattr(flashinfer, "recurrent_kda", original)
    q = torch.zeros(1, 5, 1, 16)
    with fi.install(["recurrent_kda"]):
        flashinfer.recurrent_kda(q, q, q, g=q, beta=q[..., 0])
        flashinfer.recurrent_kda(q[:, :1], q, q, q, q, checkpoint_every_n_tokens=64)
        assert len(seen) == 2 and set(seen[0][1]) == {"g", "beta"}
        one = q[:, :1]
        assert flashinfer.recurrent_kda(one, one, one, one, one[..., 0])[0].shape == one.shape and len(seen) == 2


@pytest.mark.parametrize(
    "value, message",
    [
        ("", "got ''"),
        ("checkpointing_ssu,", "got ''"),
        ("all", "expected some of .* got 'all'"),
        ("checkpointing_ssu, recurrent_kda", "got ' recurrent_kda'"),
        ("recurrent_kda,recurrent_kda", "expected each once"),
    ],
)
def test_environment_is_parsed_strictly(value, message, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_FLASHINFER", value)
    with pytest.raises(ValueError, match=f"REPLAYSSM_FLASHINFER='{value}': .*{message}"):
        fi.install_from_environment()
    assert not patch._installed


def test_environment_installs(monkeypatch):
    monkeypatch.delenv("REPLAYSSM_FLASHINFER", raising=False)
    assert fi.install_from_environment() is None
    monkeypatch.setenv("REPLAYSSM_FLASHINFER", "selective_state_update,checkpointing_ssu")
    with fi.install_from_environment() as installed:
        assert installed.ops == ("selective_state_update", "checkpointing_ssu")


@pytest.mark.parametrize("version, ok", [("0.7.1", False), ("0.7.2.post1", True), ("0.7.4+cu130", True), ("0.7.5.dev1", False)])
def test_version_gate(version, ok, monkeypatch):
    monkeypatch.setattr(flashinfer, "__version__", version)
    if ok:
        fi.install(["checkpointing_ssu"])
        fi.uninstall(["checkpointing_ssu"])
    else:
        with pytest.raises(NotImplementedError, match=r"flashinfer: supported are 0\.7\.2 to 0\.7\.4, got"):
            fi.install(["checkpointing_ssu"])


def test_an_op_that_cannot_be_imported_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(patch.OPS, "recurrent_kda", (("flashinfer.no_such_module", kda.recurrent_kda),))
    with pytest.raises(ImportError, match="recurrent_kda: FlashInfer's flashinfer.no_such_module cannot be imported"):
        fi.install(["checkpointing_ssu", "recurrent_kda"])
    assert not patch._installed
