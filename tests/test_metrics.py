"""Counts of what a state did, against the same steps counted by hand, and their text."""

import pytest
import torch

from replayssm.metrics import Meter, prometheus
from tests.cases import FAMILY, inputs
from tests.harness import DEVICE, Requests, Speculation


def counted(run: Requests, steps: list[tuple[list[int], list[int]]]) -> tuple[Meter, dict[str, int]]:
    """A meter and plain sums over steps of (slots, force)."""
    meter = Meter(run.state)
    expected = dict.fromkeys(("steps", "flushes", "forced", "live", "folded"), 0)
    for slots, force in steps:
        before = run.state.cursors.count.tolist()
        plan = run.state.plan(run.tensor(slots), force=run.tensor(force))
        flush = plan.rows[:, 4].tolist()
        meter.step(plan)
        run.state.step(0, plan, **{n: x.to(DEVICE) for n, x in run.draw(slots).items()}, **run.step_weights)
        run.state.commit(plan)
        for slot, forced, folds in zip(slots, force, flush, strict=True):
            if slot >= 0:
                full = before[slot] + 1 > run.layout.W
                expected["steps"] += 1
                expected["flushes"] += folds
                expected["forced"] += forced and not full
                expected["folded" if folds else "live"] += before[slot]
    return meter, expected


def test_counts():
    """Plain steps, some flushes forced, some due and forced, padding; then states materialized, all or some records."""
    run = Requests(FAMILY["gdn"].layout(W=3, stagger=False), [0, 2], "torch")
    force = [[0, 0, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    meter, expected = counted(run, [([0, -1, 2], one) for one in force])
    assert expected["flushes"] > expected["forced"] > 0 and expected["live"] and expected["folded"]
    found = meter.read()
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.tokens == found.accepted == found.steps == 20
    assert (found.materializations, found.materialized) == (0, 0)
    counts = run.state.cursors.count.tolist()
    meter.materialize(run.tensor([2, -1, 0]))
    meter.materialize(run.tensor([0]), run.tensor([1]))
    found = meter.read()
    assert (found.materializations, found.materialized) == (3, counts[0] + counts[2] + 1)


def test_accepted_tokens():
    run = Speculation(FAMILY["gdn"], "torch", [0, 1], W=4, T=3)
    meter = Meter(run.state)
    for t, kept in (([3, 2], [1, 2]), ([0, 3], [0, 0]), ([1, 1], [1, 0])):
        x = {name: one.to(DEVICE) for name, one in inputs(run.layout, 9, run.generator).items()}
        plan = run.state.plan(run.tensor([1, 0, -1]), t=run.tensor([*t, 2]))
        run.state.step(0, plan, **x, **run.weights)
        meter.step(plan, run.tensor([*kept, 2]))
        run.state.commit(plan, run.tensor([*kept, 0]))
    found = meter.read()
    assert (found.steps, found.tokens, found.accepted) == (5, 10, 4)


def test_bytes_are_those_of_whole_cycles():
    """Over whole flush cycles the counted bytes are the byte model's mean of a step, for every layer."""
    layout = FAMILY["mamba2"].layout(W=4, stagger=False)
    run = Requests(layout, [0, 1], "torch")
    warm = [([0, 1], [0, 0])] * 5  # the fifth flushes: from there on cycles are whole
    counted(run, warm)
    meter, _ = counted(run, [([0, 1], [0, 0])] * 12)
    model, found = layout.step_bytes().replay, meter.bytes(meter.read())
    assert (found.read, found.written) == pytest.approx((24 * model.read, 24 * model.written))


def test_text():
    run = Requests(FAMILY["gdn"].layout(W=3, stagger=False), [0], "torch")
    meter, _ = counted(run, [([0], [0])] * 4)
    text = prometheus({'gdn "a"': meter, "b": Meter(run.state)})
    lines = text.splitlines()
    assert "# TYPE replayssm_flushes_total counter" in lines and text.endswith("\n")
    assert r'replayssm_flushes_total{state="gdn \"a\""} 1' in lines and 'replayssm_steps_total{state="b"} 0' in lines
    moved = meter.bytes(meter.read())
    assert rf'replayssm_bytes_total{{state="gdn \"a\"",direction="written"}} {moved.written:.0f}' in lines
    assert sum(line.startswith("# HELP") for line in lines) == 10


def test_nothing_is_read_back(monkeypatch):
    """Counting itself never waits for the device."""
    run = Requests(FAMILY["gdn"].layout(W=3), [0], "torch", debug=False)
    meter, plan = Meter(run.state), run.state.plan(run.tensor([0]))
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args: pytest.fail("read back"))
    meter.step(plan)
    meter.materialize(torch.tensor([0, -1]))
