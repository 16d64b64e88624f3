"""Every kernel compiles for a GPU, and fits into it, also where tests have only the interpreter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[3] / "src" / "wellcond" / "numerics" / "triton"
FILES = {
    "gaussian": ("gaussian", "landmark_sides"),
    "softmax": ("linear", "nystrom_inverse", "nystrom_means", "nystrom_sides", "softmax"),
    "numerics": ("gram", "gray_dct", "narrow_layer", "spectral_power", "spd_inverse", "split_linear"),
}
PATIENCE = 3600.0  # seconds; it takes a minute of a core of its own


def kernels_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (\w*_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("part", FILES)
def test_every_kernel_compiles_for_an_h100(part, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(HERE / "compiling.py"), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wanted = set().union(*(kernels_in(SOURCES / f"{name}.py") for name in FILES[part]))
    assert wanted
    assert wanted == {found["kernel"] for found in compiled if found["fits"]}


def test_no_kernel_is_forgotten():
    named = {name for names in FILES.values() for name in names}
    assert {path.stem for path in SOURCES.glob("*.py") if kernels_in(path)} == named
