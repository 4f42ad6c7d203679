"""SGLang's own metrics tell what ReplaySSM did: counted in its steps, shown beside its values, read as its server does."""

from __future__ import annotations

import os
from collections import Counter

import pytest

pytest.importorskip("sglang")
pytest.importorskip("prometheus_client")

from tests.integrations.sglang.alone import alone

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}


def several_processes(folder):
    """What prometheus_client is where SGLang's engine has named this folder before; the fork server has imported it already."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from prometheus_client import values

    values.ValueClass = values.get_value_class()


def shown():
    """Our totals, by name and direction, as an HTTP server of SGLang's collects them from all its processes."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    samples = [one for metric in MultiProcessCollector(CollectorRegistry()).collect() for one in metric.samples]
    assert any(name == "sglang:num_running_reqs" for name, *_ in samples)
    totals = {}
    for name, labels, value, *_ in samples:
        if name.startswith("replayssm_"):
            assert labels.items() >= {key: str(of) for key, of in LABELS.items()}.items()
            totals[name.removeprefix("replayssm_").removesuffix("_total") + labels.get("direction", "")] = value
    return totals


def counts(folder):
    """Decode steps, a snapshot, drafts of which some stay, a ring folded for the prefix cache; padding all along."""
    several_processes(folder)
    import torch
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, SchedulerStats

    from tests.integrations.sglang.units import Unit

    unit = Unit("gdn", drafts=3, options=("--enable-metrics",))
    unit.begin()
    replay, expected = unit.pool.mamba_pool.replay, Counter()
    collector = SchedulerMetricsCollector(LABELS, unit.args)
    for _ in range(6):
        unit.decode([2, 0, 1], unit.tokens(3))
        expected.update(steps=2, tokens=2, accepted=2)
    collector.log_stats(SchedulerStats())
    before = shown()
    mask, track = torch.tensor([True, False, False]), torch.tensor([3, 4, 6])
    records = int(replay.state.cursors.count[unit.slots([2])]) + 1
    assert records <= replay.layout.W, "the snapshot's step does not fold"
    unit.decode([2, 0, 1], unit.tokens(3), mamba_track_mask=mask, mamba_track_indices=track)
    expected.update(steps=2, tokens=2, accepted=2, materializations=1, materialized=records)
    unit.verify([2, 0], 3, unit.tokens(6))
    unit.accept([2, 0], 3, [[0, 1], [0, 1, 2]], {2: 100, 0: 0})
    expected.update(steps=1, tokens=3, accepted=2)
    folded = replay.meter.read()
    replay.settle(unit.slots([1, 0, 1])[:2])
    expected.update(flushes=int(replay.state.cursors.flushes.sum()), forced=1)
    assert replay.meter.read().flushes == folded.flushes + 1
    collector.log_stats(SchedulerStats())
    after = shown()
    assert {name: after[name] for name in expected} == expected
    moved = replay.meter.bytes(replay.meter.read())
    assert (after["bytesread"], after["byteswritten"]) == (moved.read, moved.written)
    assert before["tokens"] == 12 and before["materializations"] == 0 and 0 < before["bytesread"] < after["bytesread"]


def test_counts(tmp_path):
    alone(counts, str(tmp_path), plugins="replayssm")


def off(folder):
    several_processes(folder)
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, SchedulerStats

    from replayssm import ReplayState
    from tests.integrations.sglang.units import Unit

    unit = Unit("gdn")
    assert type(unit.state) is ReplayState and unit.pool.mamba_pool.replay.meter is None
    SchedulerMetricsCollector(LABELS, unit.args).log_stats(SchedulerStats())
    assert shown() == {}


def test_nothing_is_counted_without_metrics(tmp_path):
    alone(off, str(tmp_path), plugins="replayssm")


def served(model):
    """A whole server's decode steps, at its own logging interval."""
    from replayssm.bench.sglang.requests import Request
    from replayssm.bench.sglang.serving import Server
    from tests.integrations.sglang.cpu_options import OPTIONS

    ours = ("--linear-attn-decode-backend", "replayssm", "--enable-metrics", "--decode-log-interval", "2")
    server = Server(model, [*OPTIONS, "--max-running-requests", "2", "--disable-radix-cache", *ours])
    server.run([Request(range(30, 42), 20), Request(range(60, 65), 9)])
    from prometheus_client import REGISTRY

    labels = {name: str(value) for name, value in server.scheduler.metrics_collector.labels.items()}
    return REGISTRY.get_sample_value("replayssm_steps_total", labels), server.pool.replay.meter.read()


@pytest.mark.slow
def test_a_server_shows_them(models):
    steps, counts = alone(served, models["qwen3-next"], plugins="replayssm")
    assert 20 <= steps <= counts.steps <= 19 + 8 + 2
