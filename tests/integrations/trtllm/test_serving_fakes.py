"""The shim over fakes generated from the contract, not over TensorRT-LLM: every output beside the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from replayssm.integrations.trtllm.recurrent import Recurrent
from tests.integrations.trtllm.serving import MANAGERS, Serving

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EVERY = [(form, family) for form in MANAGERS for family in ("mamba2", "gdn", "kda")]


def walk(run: Serving, turns: int = 24) -> dict[str, int]:
    """Chunked prompts, mixed batches, random acceptance, padding, moves, suspensions and reused slots.

    Every output and, after each step, every running request's materialized state is compared. Returns how often what happened.
    """
    running: list[int] = []
    suspended: list[int] = []
    done = dict.fromkeys(("moved", "suspended", "finished", "paddings"), 0)
    chance = run.random.random
    for turn in range(turns):
        if suspended and chance() < 0.6:
            running.append(suspended.pop(0))
            run.manager.fake_resume(running[-1])
        prompts = {}
        if len(running) + len(suspended) < 3:
            prompts[run.admit()] = run.random.randint(1, 4)
        if running and chance() < 0.4:
            run.manager.fake_relocate(run.random.choice(running))
            done["moved"] += 1
        paddings = run.random.randint(0, 2)
        done["paddings"] += paddings
        run.step(prompts, running, paddings)
        if prompts and turn % 2:  # more of the prompt before it decodes
            run.step({rid: 2 for rid in prompts}, running)
        running += prompts
        if len(running) > 1 and chance() < 0.3:
            run.finish(running.pop())
            done["finished"] += 1
        if len(running) > 1 and chance() < 0.3:
            suspended.append(running.pop(0))
            run.suspend(suspended[-1])
            done["suspended"] += 1
        for rid in running:
            if rid in run.manager._request_id_to_state_index:
                assert run.states_of(rid) < 1e-4
    return done


def addresses(run: Serving) -> list[int]:
    """Of everything that a captured CUDA graph would hold."""
    state, rows = run.recurrent.state, run.recurrent.state.plan(torch.tensor([-1], device=run.device)).rows
    tensors = (*state.cursors, *state.buffers, run.recurrent.dummy, rows, run.manager.cuda_state_indices)
    return [x.data_ptr() for x in tensors if x is not None]


@pytest.mark.parametrize("form, family", EVERY)
@pytest.mark.parametrize("drafts", [0, 3])
def test_fakes_serving(form, family, drafts, monkeypatch):
    run = Serving(form, family, drafts, monkeypatch, window=5)
    fixed = addresses(run)
    done = walk(run)
    assert all(done.values()), done
    assert fixed == addresses(run)
    assert int(run.recurrent.state.cursors.flushes.sum()) > 0


@pytest.mark.parametrize("form, family", [("state", "gdn"), ("current", "mamba2"), ("strategy", "kda")])
def test_fakes_of_a_patched_engine(form, family, monkeypatch):
    """As `replayssm patch trtllm` builds it in: a model and a manager's class as its hooks return them."""
    run = Serving(form, family, 2, monkeypatch, window=5, built_in=True)
    walk(run, turns=8)
    assert not run.registered and int(run.recurrent.state.cursors.flushes.sum()) > 0


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("form, family", EVERY)
@pytest.mark.parametrize("drafts", [0, 3])
def test_fakes_serving_on_a_gpu(form, family, drafts, monkeypatch):
    """The kernels over the engine's layouts: its pool's strides, its token-major history, its convolution windows."""
    run = Serving(form, family, drafts, monkeypatch, window=5, device="cuda", debug=False)
    walk(run, turns=12)
    assert run.recurrent.state.backend == "triton"


@pytest.mark.parametrize("form, family, drafts, options", [
    ("state", "kda_safe", 2, {}), ("state", "gdn", 0, {"stagger": False, "window": 1}),
    ("current", "mamba2", 2, {"backend": "triton", "window": 4}),
])  # fmt: skip
def test_fakes_serving_with_other_settings(form, family, drafts, options, monkeypatch):
    run = Serving(form, family, drafts, monkeypatch, seed=1, **{"window": 5} | options)
    walk(run, turns=3 if "backend" in options else 8)
    assert run.recurrent.state.backend == options.get("backend", "torch")


@pytest.mark.parametrize("form, family", [("current", "mamba2"), ("state", "gdn"), ("strategy", "kda")])
def test_fakes_serving_with_a_read_copy(form, family, monkeypatch):
    """The copy is made anew wherever the engine wrote a state; states stay exact, outputs have the copy's rounding."""
    run = Serving(form, family, 2, monkeypatch, window=5, read="int8")
    monkeypatch.setattr(Serving, "bound", 0.2)
    walk(run)
    assert run.worst > 1e-4


def test_fakes_speculation_that_pauses(monkeypatch):
    """A batch without drafts is kept at once, and its later acceptance changes nothing."""
    run = Serving("state", "gdn", 3, monkeypatch, window=6)
    rids = [run.admit(), run.admit()]
    run.step(dict.fromkeys(rids, 3), [])
    for turn in range(9):
        run.step({}, rids, verify=turn % 3 > 0)
        assert all(run.states_of(rid) < 1e-4 for rid in rids)


def test_fakes_a_dropped_step(monkeypatch):
    """A step whose acceptance never comes is as if it had not run."""
    run = Serving("current", "mamba2", 3, monkeypatch, window=6, debug=False)
    rid = run.admit()
    run.step({rid: 3}, [])
    run.step({}, [rid])
    slot = run.manager.cuda_state_indices[:1]
    run.recurrent.state.plan(slot, 4)  # as a forward begins that the engine then drops
    run.step({}, [rid])
    assert run.states_of(rid) < 1e-4


def test_fakes_accept_after_a_graph_of_another_batch_size(monkeypatch):
    """A replayed graph plans without the shim's Python: acceptance finds the plan by its rows, not the one made last."""
    run = Serving("current", "gdn", 2, monkeypatch, window=6)
    recurrent, state = run.recurrent, run.recurrent.state
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    recurrent.restart(slots.tolist(), brought=False)
    for rows in (3, 1):  # captured
        recurrent._plans[rows] = state.plan(slots[:rows], 3)
        recurrent.accept(torch.ones(rows))
    recurrent.plan = None
    state.plan(slots, 3)  # replayed
    recurrent.accept(torch.tensor([3, 1, 2]))
    assert state.cursors.count[:3].tolist() == [5, 2, 3]


BROKEN = {
    "rings stay where requests leave": (Recurrent, "relocate", lambda self, old, new: None),
    "requests sleep with full rings": (Recurrent, "settle", lambda self, slots: None),
    "paddings count": (Recurrent, "dummies", lambda self, is_dummy: None),
    "slots keep their former request's ring": (Recurrent, "restart", lambda self, slots, brought: None),
    "all drafts stay": (Recurrent, "accept", lambda self, n: self.state.commit(self._plans[n.shape[0]])),
}


@pytest.mark.parametrize("what", BROKEN)
def test_fakes_find_a_broken_shim(what, monkeypatch):
    run = Serving("current", "mamba2", 3, monkeypatch, window=5)
    owner, name, broken = BROKEN[what]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, ValueError)):
        walk(run)


def test_fakes_find_a_prefill_over_full_rings(monkeypatch):
    """Gated DeltaNet's mixed batches read plain rows' states from the pool: rings are folded before."""
    run = Serving("current", "gdn", 0, monkeypatch, window=5)
    monkeypatch.setattr(type(run.recurrent.state), "fold", lambda self, slots: None)
    with pytest.raises(AssertionError):
        walk(run)
