"""4,000 steps of decode next to the conventional fp32 recurrence: the error of the state must not accumulate faster."""

from __future__ import annotations

import pytest

from tests.cases import FAMILY
from tests.harness import DEVICE, GPU
from tests.u_precision import PRECISIONS, STEPS, drift, ready


@pytest.mark.parametrize("strong", [False, True], ids=["ordinary", "strong"])
@pytest.mark.parametrize("u", PRECISIONS)
@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda", "gla"])
def test_state_error_does_not_accumulate(name, u, strong, capsys):
    """At most 1.5 times the state error of the conventional fp32 in-place recurrence, whatever the precision of u."""
    if u != "fp32" and not FAMILY[name].recurrence.delta:
        pytest.skip("u is a helper of the delta rule")
    steps = STEPS if GPU or u == "bf16" or name == "mamba2" else 600
    error = drift(ready(FAMILY[name]) if strong else FAMILY[name], PRECISIONS[u], strong, steps, device=DEVICE)
    with capsys.disabled():
        print(f"\n{name:8s} u={u:5s} {'strong' if strong else 'ordinary':9s}", {k: f"{v:.2e}" for k, v in error.items()})
    assert error["state"] <= 1.5 * error["state_conventional"]
    assert error["output"] < {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1e-2}[u]
