"""The engines' shims in every scenario that their engines have, on the torch backend; and migrations between their layouts."""

import pytest
import torch

from replayssm.parity import SCENARIOS, implementations, rows, within
from tests.cases import FAMILY
from tests.harness import DEVICE

SHIMS = [one for one in implementations() if one.name.endswith("shim")]
# Scenarios that an engine's own steps never are.
RAGGED = {"batching"}
FAMILIES = {
    "TensorRT-LLM shim": ("mamba2", "gdn", "kda", "kda_safe"),
}


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("shim", [one for one in SHIMS if one.name in FAMILIES], ids=str)
def test_every_scenario(shim, family):
    names = [name for name in SCENARIOS if name != "migration"]
    for one in rows([shim], [FAMILY[family].layout(W=4)], names, device=DEVICE):
        assert within(one), one
        runs = family in FAMILIES[shim.name] and one["scenario"] not in RAGGED
        assert ("absent" not in one) == runs, one


@pytest.mark.parametrize("family", ["mamba2", "kda"])
def test_migrations(family):
    """Half way in one engine's layout, on in another's."""
    ran = [one for one in SHIMS if family in FAMILIES.get(one.name, ())]
    core = [one for one in implementations() if one.name == "core torch"]
    found = list(rows([*core, *ran], [FAMILY[family].layout(W=4, act=torch.bfloat16)], ["migration"], device=DEVICE))
    assert len(found) == (1 + len(ran)) * len(ran)
    for one in found:
        assert within(one) and "absent" not in one and not one["tokens_differing"], one
