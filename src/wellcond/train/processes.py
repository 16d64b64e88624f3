"""One process or many, as set in the environment by torchrun (under SLURM, too) or `accelerate launch`.

here = join()                   # rank 0 of 1 if none of these started it
here.is_main, here.device       # True, device(type='cuda', index=0)
here.any(flag)                  # whether it is true in any process; all must call it at the same point
check_device("cuda:1")          # raises ValueError if there is no such device
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

__all__ = ["Processes", "check_device", "join"]


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process, and collective calls that it makes together with the others."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, which also replaces `values`."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.world

    def any(self, flag: bool) -> bool:
        return bool(self.largest(int(flag)))

    def largest(self, number: int) -> int:
        if self.world == 1:
            return number
        told = torch.tensor(number, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return int(told)

    def of_main(self, number: int) -> int:
        """Return the main process's number, in all processes."""
        if self.world == 1:
            return number
        told = torch.tensor(number, device=self.device)
        dist.broadcast(told, 0)
        return int(told)

    def leave(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def check_device(device: str | None) -> None:
    """Raise ValueError for a device that torch does not know, or that does not exist here."""
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device {device!r} is none that torch knows; write cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count() if wanted.type == "cuda" else 1
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        there = f"there are {count}, from cuda:0 on" if count else "there is no GPU that torch can use"
        raise ValueError(f"--device {device}: {there}; leave --device out, or write cpu")


def join(device: str | None = None) -> Processes:
    """Join the other processes, if the environment names any, and choose this one's device."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check_device(device)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        of_this_machine = int(os.environ.get("LOCAL_RANK", "0"))
        mine = of_this_machine % torch.cuda.device_count() if where.index is None else where.index
        torch.cuda.set_device(mine)
        where = torch.device("cuda", mine)
    if world > 1 and not dist.is_initialized():
        backend, patience = "nccl" if where.type == "cuda" else "gloo", timedelta(minutes=10)
        store, rank, world = next(rendezvous("env://", rank, world, timeout=patience))
        # torchrun's store outlives a restart with the addresses of dead processes, so each attempt has its own prefix.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        fresh = PrefixStore(f"attempt-{attempt}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=world, timeout=patience)
    return Processes(rank=rank, world=world, device=where)
