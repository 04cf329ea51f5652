"""Models of the situations."""

import pytest

from tests.field.models import llama, make_pair
from tests.helpers import tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The folders of a target and of a random draft model."""
    root = tmp_path_factory.mktemp("field")
    return tiny.save(root / "target", llama()), tiny.save(root / "draft", llama(num_hidden_layers=1), seed=1)


@pytest.fixture(scope="session")
def native_pair(folders):
    return make_pair(*folders)


@pytest.fixture(scope="session")
def pair(request, folders):
    """A target on the kernels that the marker `BOTH` names."""
    return make_pair(*folders, kernels=request.param)
