"""Tests on weights that others trained, which are not ours to give away: opt-in, by WELLCOND_TRAINED=FOLDER."""

import os
from pathlib import Path

import pytest

from wellcond.measure.trained_models import FILES


@pytest.fixture(scope="session")
def folder() -> Path:
    given = os.environ.get("WELLCOND_TRAINED", "")
    missing = [name for name in FILES if not given or not (Path(given) / name).is_file()]
    if missing:
        wanted = "; ".join(f"{name} ({FILES[name]})" for name in missing)
        pytest.skip(f"set WELLCOND_TRAINED to a folder that holds {wanted}")
    return Path(given)
