"""Both backends of the calls; tensors on the GPU where there is one."""

import pytest
import torch

from replayssm.integrations.flashinfer import translate
from tests.harness import BACKENDS, DEVICE


@pytest.fixture(autouse=True)
def device():
    """Where tensors are made unless told."""
    with torch.device(DEVICE):
        yield


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The backend that the calls of a test take."""
    monkeypatch.setattr(translate, "backend_of", lambda x: request.param)
    return request.param
