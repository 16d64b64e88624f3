"""Time functions: the median of repeats after a warm-up, by CUDA events on a GPU.

device = chosen_device("cuda:1")
milliseconds = median_ms(lambda: model(images), device)
plain, grayed = sustained_ms([model, grayed_model], device)     # many calls in a row, taking turns
milliseconds = graphed_ms(lambda: model(images), device)        # as a CUDA graph, without the host
plain, grayed = interleaved_ms([step, grayed_step], device)     # taking turns, so that drift affects both
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = [
    "chosen_device", "graphed_ms", "interleaved_ms", "interleaved_times", "median_ms", "peak_mib", "sustained_ms",
]  # fmt: skip

SUSTAINED_MS = 20.0


def chosen_device(name: str | None) -> torch.device:
    """Return the device of that name, by default the GPU if there is one, and make it current: CUDA events need it."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def median_ms(function: Callable[[], object], device: torch.device, *, repeats: int = 20, warmup: int = 3) -> float:
    """Return the median time of one call in milliseconds."""
    return interleaved_ms([function], device, repeats=repeats, warmup=warmup)[0]


def sustained_ms(
    functions: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 10, warmup: int = 3
) -> list[float]:
    """Return median times of one call among many, as in training: the next is launched while one runs on the GPU.

    The functions take turns, each with enough calls to fill some milliseconds; on a CPU, with one call.
    """

    def many(function: Callable[[], object], calls: int) -> None:
        for _ in range(calls):
            function()

    calls = [
        max(1, min(20, int(SUSTAINED_MS / max(1e-3, median_ms(function, device, repeats=3, warmup=warmup)))))
        if device.type == "cuda"
        else 1
        for function in functions
    ]
    rows = [functools.partial(many, function, number) for function, number in zip(functions, calls, strict=True)]
    times = interleaved_ms(rows, device, repeats=repeats, warmup=0 if device.type == "cuda" else warmup)
    return [time / number for time, number in zip(times, calls, strict=True)]


def graphed_ms(function: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Return the time of a call on the GPU alone: captured as a CUDA graph, which takes one launch, and replayed."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return sustained_ms([graph.replay], device, repeats=repeats)[0]


def interleaved_ms(
    functions: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 20, warmup: int = 3
) -> list[float]:
    """Return the median times of several functions that take turns, in milliseconds."""
    return [statistics.median(times) for times in interleaved_times(functions, device, repeats=repeats, warmup=warmup)]


def interleaved_times(
    functions: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 20, warmup: int = 3
) -> list[list[float]]:
    """Return all times of several functions that take turns, in milliseconds."""
    for function in functions:
        for _ in range(warmup):
            function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, record in zip(functions, times, strict=True):
            record.append(_once(function, device))
    return times


def peak_mib(function: Callable[[], object], device: torch.device) -> float | None:
    """Return the most memory that one call takes on the GPU, beyond what was taken before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _once(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end)
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3
