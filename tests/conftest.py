"""What every test starts from: a fixed seed, no network, few threads, and kernels that run without a GPU."""

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
    # Under xdist each worker would take every core, and so would the processes that it starts: they would get in each
    # other's way.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        share = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(share)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        for name, function in (("bounds.py", "watch"), ("hasten.py", "hasten")):
            runpy.run_path(str(Path(__file__).with_name(name)))[function]()  # tests are no package


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported stays: otherwise every collection walks through all of it again


def pytest_unconfigure() -> None:
    gc.unfreeze()


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


@pytest.fixture
def no_waiting() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with no_waiting():` a RuntimeError where the CPU waits for the GPU."""

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


# ---- processes of their own: in the place of minutes of imports, a fork of one that has imported everything

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WELLCOND_COMMIT": "test", "COLUMNS": "1000"}
PATIENCE = 300.0  # seconds; a busy machine is slow, and only a process that hangs takes so long


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
        """Wait for something; None if the processes ended before."""
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
            if pid not in self.codes:  # not waited for yet, so that the number is still this process's
                os.kill(pid, number)

    def kill(self) -> list[int]:
        self.alive()
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> list[int]:
        """The exit codes."""
        self.until(lambda: False)
        return [self.codes[pid] for pid in self.pids]

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def torchruns_variables(world: int) -> list[dict[str, str]]:
    """What torchrun sets for each of so many processes; nothing for one."""
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
        """A command; with `world`, as many of it with the variables that torchrun would set.

        `elastic` is how many torchrun's own agent starts, and starts once more if one dies. With `slow_disk` it takes
        so many seconds until a file is on the disk; a file longer than `file_limit` bytes fails as on a full one. Of
        `spoilt`, a rank and a step, the loss is NaN. With `again` the newest state is loaded and saved, and no more.
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
        """What `python -c text arguments` would do, with everything imported before."""
        request = {"program": text, "arguments": [str(one) for one in arguments], "log": str(log)}
        if standard_input is not None:
            request["input"] = str(standard_input)
        asked = [request | {"env": (env or {}) | variables} for variables in torchruns_variables(world)]
        return Started(self, [self.ask(one)["pid"] for one in asked], log)

    def ranks(self, text: str, folder: Path, *, number: int = 2) -> None:
        """So many processes of a program at once, each with its rank and the folder for arguments; all end well."""
        started = [self.program(text, rank, folder, log=folder / f"{rank}.log") for rank in range(number)]
        try:
            codes = [code for process in started for code in process.wait()]
        finally:  # a rank whose mate has failed would wait for it
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
    """One for all tests: a process can start Playwright once."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()
