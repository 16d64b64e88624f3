"""Many small decompositions on a CPU, one core each.

    on_cores(torch.linalg.eigvals, maps)            # [eigvals(map) for map in maps], side by side

LAPACK and products of a few hundred rows gain little from more cores for one matrix, and where other programs take
cores as well, threads that share a matrix wait for each other. What is called sees no gradients and no autocast, which
belong to the calling thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["on_cores"]

S = TypeVar("S")
T = TypeVar("T")


def on_cores(function: Callable[[S], T], parts: Sequence[S]) -> list[T]:
    """Return the results of `function` in order, computed by as many threads as torch has, each on a single core."""
    threads = torch.get_num_threads()
    workers = min(len(parts), threads)
    if workers < 2:
        return [function(part) for part in parts]

    @torch.no_grad()
    def call(part: S) -> T:
        return function(part)

    try:
        with ThreadPoolExecutor(max_workers=workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(call, parts))
    finally:
        torch.set_num_threads(threads)  # for threads to come: existing ones keep their own number
