"""Common setup of all tests: a fixed seed, no network, few threads, and kernels that run without a GPU."""

import contextlib
import gc
import importlib.util
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Set before importing the libraries that read them: no test may depend on what can be downloaded today.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On a busy machine, NumPy waits for OpenBLAS's threads a hundred times longer than it computes on small problems.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU, kernels run in Triton's interpreter, which has to be known when they are decorated.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadlines, since a busy machine makes any test slow. In CI the examples are fixed, so that failures repeat.
settings.register_profile("default", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    # On small matrices a second thread only costs waiting: minutes, on a busy machine. Processes that tests start, too.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        for name, function in (("bounds.py", "watch"), ("hasten.py", "hasten")):
            runpy.run_path(str(Path(__file__).with_name(name)))[function]()  # tests are not a package


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # imported objects stay alive: otherwise every collection walks through all of them again


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_waiting() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with no_waiting():` raises RuntimeError if the CPU synchronises with the GPU."""

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        try:
            with warnings.catch_warnings(action="ignore"):  # torch: the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return inside


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested: on the GPU, or in Triton's interpreter if there is none."""
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


# ---- separate processes: forked from one that has imported everything, which saves minutes of imports

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WELLCOND_COMMIT": "test", "COLUMNS": "1000"}
PATIENCE = 300.0  # seconds; long enough for a busy machine, so that only a process that hangs reaches it


class Started:
    """A process, or several that train together."""

    def __init__(self, launcher: "Launcher", pids: list[int], log: Path):
        self.launcher, self.pids, self.log = launcher, pids, log
        self.codes: dict[int, int] = {}

    def alive(self) -> bool:
        for pid in self.pids:
            if pid not in self.codes:
                code = self.launcher.ask({"poll": pid})["code"]
                if code is not None:
                    self.codes[pid] = code
        return len(self.codes) < len(self.pids)

    def until(self, seen: Callable[[], Any]) -> Any:
        """Wait until `seen` returns something true; its last answer if the processes end before."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = seen()
            if found:
                return found
            if not self.alive():
                return seen()
            time.sleep(0.002)
        raise TimeoutError(f"nothing happened: {self.output()}")

    def send(self, number: int) -> None:
        for pid in self.pids:
            if pid not in self.codes:  # not reaped yet, so the pid is still this process's
                os.kill(pid, number)

    def kill(self) -> list[int]:
        self.alive()
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> list[int]:
        """Wait for all processes and return their exit codes."""
        self.until(lambda: False)
        return [self.codes[pid] for pid in self.pids]

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def torchruns_variables(world: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each of `world` processes; none for a single one."""
    if world == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    ranks = [together | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    return [{name: str(value) for name, value in one.items()} for one in ranks]


class Launcher:
    def __init__(self) -> None:
        program = [sys.executable, str(Path(__file__).with_name("launcher.py"))]
        environment = {**os.environ, **ENVIRONMENT}
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.asking = threading.Lock()
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the launcher has ended"
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        with self.asking:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return self._answer()

    def start(
        self, arguments: list[str], *, log: Path, world: int = 1, elastic: int = 0, slow_disk: float = 0.0,
        file_limit: int = 0, spoilt: tuple[int, int] | None = None, again: bool = False,
    ) -> Started:  # fmt: skip
        """Start a command; with `world`, as many processes with the variables that torchrun would set.

        With `elastic`, torchrun's own agent starts so many, and restarts them once if one dies. With `slow_disk`, each
        fsync takes so many seconds longer; a file of more than `file_limit` bytes fails as on a full disk. `spoilt` is
        a rank and a step at which its loss is NaN. With `again`, the newest state is saved again once it is loaded.
        """
        pids = []
        for rank, env in enumerate(torchruns_variables(world)):
            request = {"start": arguments, "env": env, "log": str(log)}
            request |= {"elastic": elastic, "slow_disk": slow_disk, "file_limit": file_limit}
            request |= {"spoilt": spoilt[1] if spoilt and spoilt[0] == rank else 0, "again": again}
            pids.append(self.ask(request)["pid"])
        return Started(self, pids, log)

    def program(
        self, text: str, *arguments: Any, log: Path, standard_input: Path | None = None, world: int = 1,
        env: dict[str, str] | None = None,
    ) -> Started:  # fmt: skip
        """Do what `python -c text arguments` would do, with everything imported already."""
        request = {"program": text, "arguments": [str(one) for one in arguments], "log": str(log)}
        if standard_input is not None:
            request["input"] = str(standard_input)
        asked = [request | {"env": (env or {}) | variables} for variables in torchruns_variables(world)]
        return Started(self, [self.ask(one)["pid"] for one in asked], log)

    def ranks(self, text: str, folder: Path, *, number: int = 2) -> None:
        """Run a program in `number` processes, with rank and folder as arguments, and assert that all exit with 0."""
        started = [self.program(text, rank, folder, log=folder / f"{rank}.log") for rank in range(number)]
        try:
            codes = [code for process in started for code in process.wait()]
        finally:  # a rank would wait for one that has failed
            for process in started:
                if process.alive():
                    process.kill()
        assert codes == [0] * number, [process.output() for process in started]

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE)  # closes its input, which ends it


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    here = Launcher()
    yield here
    here.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests: a process can start Playwright only once."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()
