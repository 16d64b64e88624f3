"""On which device each of several runs is trained: dealt over the GPUs there are, or sharing the one, or the cores.

check_device("cuda:1")                  # ValueError where there is no such device
deal(4)                                 # for four jobs: what is different in the environment of each
"""

import os

import torch

from wellcond.train.processes import check_device

__all__ = ["check_device", "deal"]


def deal(jobs: int, device: str | None = None, *, gpus: int | None = None) -> list[dict[str, str]]:
    """For each job the variables to set for its process.

    Over all visible GPUs (`gpus` of them) in turn, unless `device` names one. On a CPU each gets its share of the
    cores, unless OMP_NUM_THREADS is set: more threads than cores wait for each other.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or not gpus:
        share = {} if os.environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(max(1, _cores() // jobs))}
        return [dict(share) for _ in range(jobs)]
    wanted = torch.device(device or "cuda")
    if wanted.type != "cuda" or gpus == 1:
        return [{} for _ in range(jobs)]
    names = _visible(gpus)
    if wanted.index is not None:  # the only one that its processes see: nothing of theirs lands on another
        names = [names[wanted.index]]
    return [{"CUDA_VISIBLE_DEVICES": names[job % len(names)]} for job in range(jobs)]


def _visible(count: int) -> list[str]:
    """The GPUs' names as CUDA_VISIBLE_DEVICES has them: numbers or identifiers, possibly not the first ones."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
