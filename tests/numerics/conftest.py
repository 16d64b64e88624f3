"""The numerics are tested on small matrices."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass
