"""What every test starts from: a fixed seed, no network, few threads, and kernels that run without a GPU."""

import importlib.util
import os
import runpy
from pathlib import Path

# Set before the libraries that read them are imported: no test may depend on what can be downloaded today.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# NumPy's small problems wait for OpenBLAS's threads: a hundred times longer than they compute, on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU Triton's interpreter runs the kernels, and a kernel has to know that when it is decorated.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is not a slow test, so no deadlines. Under CI the examples are the same each time, to repeat a red run.
settings.register_profile("default", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    # Under xdist each worker would take every core, and they would get in each other's way.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        runpy.run_path(str(Path(__file__).with_name("bounds.py")))["watch"]()  # tests are no package


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """On small matrices a second thread is only waited for, on a busy machine for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested: on the GPU, or without one in Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def photographs() -> torch.Tensor:
    """Two real photographs, whole and a crop of each at full resolution, normalised, (4, 3, 224, 224) float32."""
    from sklearn.datasets import load_sample_images

    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    images = []
    for pixels in load_sample_images().images:  # 427 × 640
        whole = (torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255 - mean) / std
        small = torch.nn.functional.interpolate(whole[None], size=(224, 336), mode="bicubic", antialias=True)[0]
        images += [small[:, :, 56:280], whole[:, 100:324, 200:424]]
    return torch.stack(images)
