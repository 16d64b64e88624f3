"""In Triton's interpreter kernels are NumPy, which warns where hardware makes an infinity or a NaN and goes on."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _as_hardware():
    with np.errstate(all="ignore"):
        yield
