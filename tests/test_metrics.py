"""Counts of what a state did, against the same steps counted by hand, and their text."""

from dataclasses import asdict

import pytest
import torch

from replayssm.metrics import Counted, Meter, prometheus
from tests import harness
from tests.cases import FAMILY
from tests.harness import BACKENDS, DEVICE


class Requests(harness.Requests):
    kind = Counted

    def __init__(self, layout, slots, backend, **kwargs):
        super().__init__(layout, slots, backend, **kwargs)
        self.state.meter.totals.zero_()  # of what prepared it


class Speculation(harness.Speculation):
    kind = Counted


def counted(run: Requests, steps: list[tuple[list[int], list[int]]]) -> dict[str, int]:
    """Plain sums over steps of (slots, force), which are planned and committed here; what layers compute is not counted."""
    expected = dict.fromkeys(("steps", "flushes", "forced", "live", "folded"), 0)
    for slots, force in steps:
        before = run.state.cursors.count.tolist()
        plan = run.state.plan(run.tensor(slots), force=run.tensor(force))
        flush = plan.rows[:, 4].tolist()
        run.state.commit(plan)
        run.state.commit(plan)  # again changes nothing
        for slot, forced, folds in zip(slots, force, flush, strict=True):
            if slot >= 0:
                full = before[slot] + 1 > run.layout.W
                expected["steps"] += 1
                expected["flushes"] += folds
                expected["forced"] += forced and not full
                expected["folded" if folds else "live"] += before[slot]
    return expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts(backend):
    """Plain steps, some flushes forced, some due and forced, padding; states materialized, all or some records; a fold."""
    run = Requests(FAMILY["gdn"].layout(W=3, stagger=False), [0, 2], backend)
    force = [[0, 0, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    expected, meter = counted(run, [([0, -1, 2], one) for one in force]), run.state.meter
    assert expected["flushes"] > expected["forced"] > 0 and expected["live"] and expected["folded"]
    before = meter.read()
    assert asdict(before) == dict.fromkeys(asdict(before), 0) | expected | {"tokens": 20, "accepted": 20}
    counts = run.state.cursors.count.tolist()
    run.state.materialize(run.tensor([2, -1, 0]))
    half = torch.zeros(1, 1, *run.state.buffers.state.shape[2:], dtype=torch.float16, device=DEVICE)
    run.state.materialize(run.tensor([0]), run.tensor([1]), half, run.tensor([0]))
    run.state.fold(run.tensor([-1, 2]))
    size, found = half[0, 0].numel(), asdict(meter.read())
    expected |= {
        "flushes": expected["flushes"] + 1, "forced": expected["forced"] + 1, "folded": expected["folded"] + counts[2],
        "materializations": 3, "materialized": counts[0] + counts[2] + 1, "materialized_bytes": size * (4 + 4 + 2),
    }  # fmt: skip
    assert found == asdict(before) | expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_accepted_tokens(backend):
    run = Speculation(FAMILY["gdn"], backend, [0, 1], W=4, T=3)
    for t, kept in (([3, 2], [1, 2]), ([0, 3], [0, 0]), ([1, 1], [1, 0])):
        plan = run.state.plan(run.tensor([1, 0, -1]), t=run.tensor([*t, 2]))
        run.state.commit(plan, run.tensor([*kept, 0]))
    found = run.state.meter.read()
    assert (found.steps, found.tokens, found.accepted) == (5, 10, 4)


def test_bytes_are_those_of_whole_cycles():
    """Over whole flush cycles the counted bytes are the byte model's mean of a step, for every layer; states elsewhere."""
    layout = FAMILY["mamba2"].layout(W=4, stagger=False)
    run = Requests(layout, [0, 1], "torch")
    counted(run, [([0, 1], [0, 0])] * 5)  # the fifth flushes: from there on cycles are whole
    meter = run.state.meter = Meter(layout, 3, DEVICE)
    counted(run, [([0, 1], [0, 0])] * 12)
    model, found = layout.step_bytes().replay, meter.bytes(meter.read())
    assert (found.read, found.written) == pytest.approx((3 * 24 * model.read, 3 * 24 * model.written))
    run.state.materialize(run.tensor([1]), run.tensor([1]))
    elsewhere, after = layout.fold_traffic(1, "fp32"), meter.bytes(meter.read())
    assert (after.read - found.read, after.written - found.written) == (3 * elsewhere.read, 3 * elsewhere.written)


def test_states_that_share_a_meter():
    layout = FAMILY["gdn"].layout(W=3)
    first, second = (Requests(layout, [0], "torch") for _ in range(2))
    second.state.meter = first.state.meter
    for run in (first, second):
        counted(run, [([0], [0])] * 2)
    assert first.state.meter.read().steps == 4


def test_text():
    run = Requests(FAMILY["gdn"].layout(W=3, stagger=False), [0], "torch")
    counted(run, [([0], [0])] * 4)
    meter = run.state.meter
    text = prometheus({'gdn "a"': meter, "b": Meter(run.layout, 1, "cpu")})
    lines = text.splitlines()
    assert "# TYPE replayssm_flushes_total counter" in lines and text.endswith("\n")
    assert r'replayssm_flushes_total{state="gdn \"a\""} 1' in lines and 'replayssm_steps_total{state="b"} 0' in lines
    moved = meter.bytes(meter.read())
    assert rf'replayssm_bytes_total{{state="gdn \"a\"",direction="written"}} {moved.written:.0f}' in lines
    assert sum(line.startswith("# HELP") for line in lines) == 10


def test_nothing_is_read_back(monkeypatch):
    """Counting itself never waits for the device."""
    run = Requests(FAMILY["gdn"].layout(W=3), [0], "torch", debug=False)
    slots = run.tensor([0, -1])
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args: pytest.fail("read back"))
    run.state.commit(run.state.plan(slots))
    run.state.materialize(slots)
    run.state.fold(slots)
