"""SGLang's own metrics (``--enable-metrics``) tell what ReplaySSM did."""

from __future__ import annotations

from typing import Any

from ...metrics import HELP, Meter


class Counters:
    """A pool's totals as counters of prometheus_client, with the labels of SGLang's own.

    Args:
        meter: of the pool.
        collector: SGLang's SchedulerMetricsCollector.
    """

    def __init__(self, meter: Meter, collector: Any) -> None:
        from prometheus_client import Counter  # not before SGLang chose its multiprocess mode

        make = collector._counter_cls or Counter
        self.meter, self.labels = meter, dict(collector.labels)
        self.counters = {
            name: make(f"replayssm_{name}", about, [*self.labels, *(["direction"] if name == "bytes" else [])])
            for name, about in HELP.items()
        }
        self._shown: dict[str, float] = {}

    def update(self) -> None:
        """Raise the counters to the totals: one copy of a few bytes from the device."""
        for name, labels, value in self.meter.samples():
            of = "/".join((name, *labels.values()))
            self.counters[name].labels(**self.labels, **labels).inc(value - self._shown.get(of, 0.0))
            self._shown[of] = value
