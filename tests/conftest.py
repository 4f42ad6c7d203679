"""What all tests share."""

import os

import pytest

from replayssm import launch, records
from tests.harness import GPU


@pytest.fixture(autouse=True, scope="session")
def one_program_a_head():
    """The interpreter runs programs one after another: a small batch's heads are not split there. test_split_heads does it."""
    if not GPU:
        launch._split = lambda tiles, B: 1


@pytest.fixture(autouse=True, scope="session")
def launches_by_rule(tmp_path_factory):
    """Not by records of whoever runs the tests."""
    os.environ[records.VARIABLE] = str(tmp_path_factory.mktemp("launches") / "none.json")
