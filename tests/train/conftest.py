"""Fixtures of several tests."""

import pytest

from tests.helpers import train_setup


@pytest.fixture(scope="module")
def nano():
    return train_setup.load_target()
