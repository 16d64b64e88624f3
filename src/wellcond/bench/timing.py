"""How long a function takes: the median of repeats after a warm-up, with the device's clock where it has one.

device = chosen_device("cuda:1")
milliseconds = median_ms(lambda: model(images), device)
plain, grayed = sustained_ms([model, grayed_model], device)     # one of many calls in a row, the functions in turns
milliseconds = graphed_ms(lambda: model(images), device)        # on the GPU alone, without the host
plain, grayed = interleaved_ms([step, grayed_step], device)     # in turns: drift hits both alike
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["chosen_device", "graphed_ms", "interleaved_ms", "interleaved_times", "median_ms", "sustained_ms"]

SUSTAINED_MS = 20.0


def chosen_device(name: str | None) -> torch.device:
    """The device of that name, or the GPU where there is one. It becomes the current one, whose clock is asked."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def median_ms(function: Callable[[], object], device: torch.device, *, repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call in milliseconds."""
    return interleaved_ms([function], device, repeats=repeats, warmup=warmup)[0]


def sustained_ms(
    functions: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 10, warmup: int = 3
) -> list[float]:
    """Median times of a call among others, as in training: the next is on its way to a GPU while one runs there.

    The functions take turns, each with as many calls as fill some milliseconds.
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
    """Time of a call's work on the GPU alone: captured as a CUDA graph, which the host starts as one, and replayed."""
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
    """Median times of several functions, called in turns."""
    return [statistics.median(times) for times in interleaved_times(functions, device, repeats=repeats, warmup=warmup)]


def interleaved_times(
    functions: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 20, warmup: int = 3
) -> list[list[float]]:
    """The times of each of several functions, called in turns, in milliseconds."""
    for function in functions:
        for _ in range(warmup):
            function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, record in zip(functions, times, strict=True):
            record.append(_once(function, device))
    return times


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
