import pytest
from tests.kernels.payloads import config_of


@pytest.fixture
def config():
    """The decoded backend_config of a small kernel, for a test to damage."""
    return config_of()[1]
