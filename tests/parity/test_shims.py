"""The engines' shims in every scenario that their engines have; and migrations between their layouts."""

import os
from importlib.util import find_spec

import pytest
import torch

from replayssm.parity import SCENARIOS, implementations, rows, within
from tests.cases import FAMILY
from tests.harness import DEVICE, GPU

FOLDERS = {"SGLang shim": "sglang", "FlashInfer shim": "flashinfer", "TensorRT-LLM shim": "trtllm"}
SHIMS = [
    one
    for one in implementations()
    if one.name in FOLDERS
    and find_spec(f"replayssm.integrations.{FOLDERS[one.name]}")
    and find_spec(f"replayssm.integrations.{FOLDERS[one.name]}.parity")
]
ENGINES = ("mamba2", "gdn", "kda", "kda_safe")
KERNELS = GPU or os.environ.get("TRITON_INTERPRET") == "1"


def missing(shim: str, family: str) -> set[str]:
    """Scenarios that the engine's own steps or calls never are."""
    if family not in ENGINES:
        return set(SCENARIOS)
    if shim != "FlashInfer shim":
        return {"batching"}
    if family == "mamba2":
        return set() if KERNELS else {"snapshot"}
    return {"batching", "snapshot"}


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("shim", SHIMS, ids=str)
def test_every_scenario(shim, family):
    names = [name for name in SCENARIOS if name != "migration"]
    for one in rows([shim], [FAMILY[family].layout(W=4)], names, device=DEVICE):
        assert within(one), one
        assert ("absent" in one) == (one["scenario"] in missing(shim.name, family)), one


@pytest.mark.parametrize("family", ENGINES)
def test_migrations(family):
    """Half way in one engine's layout, on in another's."""
    core = [one for one in implementations() if one.name == "core torch"]
    found = list(rows([*core, *SHIMS], [FAMILY[family].layout(W=4, act=torch.bfloat16)], ["migration"], device=DEVICE))
    assert len(found) == (1 + len(SHIMS)) * len(SHIMS)
    for one in found:
        assert within(one) and "absent" not in one and not one["tokens_differing"], one
