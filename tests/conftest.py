"""What all tests share."""

import pytest

from replayssm import launch
from tests.harness import GPU


@pytest.fixture(autouse=True, scope="session")
def one_program_a_head():
    """The interpreter runs programs one after another: a small batch's heads are not split there. test_split_heads does it."""
    if not GPU:
        launch._split = lambda tiles, B: 1
