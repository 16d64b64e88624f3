"""Forward and backward passes: run plainly, or captured once as a CUDA graph and then replayed.

    passes = Passes(config, task, parts, here)           # what the loop calls: passes(batch) → loss
    passes(batch, hooked=True)                           # a plain pass, in which hooks are called
    passes = Replayed(one_pass, parameters, device)      # one_pass(batch) → loss, with gradients left in .grad
    loss = passes(batch)                                 # the first calls are plain, then one is captured

A small model's pass is some hundred kernels, and launching them one by one takes the CPU longer than they run. A replay
is a single launch. It computes what the plain pass computes, with random numbers from the generator's current seed. But
whatever Python decided during the capture is fixed, so a pass that waits for the GPU in order to look at a number
cannot be captured. The last of the plain passes is watched for that; if it waits, or if CUDA refuses the capture for
another reason, passes stay plain, with a warning.

The graph keeps the memory of a pass to itself: a plain pass beside it, such as a measured one, needs as much again.
"""

import contextlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.data import Batch
from wellcond.numerics.trust import trusted_input
from wellcond.train.computing import autocast
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.setup import Parts
from wellcond.train.tasks import Task

__all__ = ["WARM", "Passes", "Replayed", "can_replay"]

WAITED = "called a synchronizing CUDA operation"  # torch's wording, here and below
PROTOTYPE = "Synchronization debug mode is a prototype"
WARM = 3  # plain passes before the capture, during which everything is compiled, tuned and created on first use


class Passes:
    """The passes of a training: plain ones, or on one GPU replayed ones.

    Holds no reference to the training loop, so that both are freed when it ends.
    """

    def __init__(self, config: Config, task: Task, parts: Parts, here: Processes):
        self._plain = _make_pass(config, task, parts, here.device)
        self._usual = self._plain
        if can_replay(config, here.device, world=here.world):
            self._usual = Replayed(self._plain, parts.parameters, here.device)

    def __call__(self, batch: Batch, *, hooked: bool = False) -> Tensor:
        """Run a pass; return the micro-batch's share of the loss."""
        return (self._plain if hooked else self._usual)(batch)


def _make_pass(config: Config, task: Task, parts: Parts, device: torch.device) -> Callable[[Batch], Tensor]:
    def one_pass(batch: Batch) -> Tensor:
        with autocast(config, device), trusted_input():  # data are finite
            loss = task.loss(parts.called, batch)
        loss = loss if config.accumulate == 1 else loss / config.accumulate
        parts.scaler.scale(loss).backward()
        return loss.detach()

    return one_pass


def can_replay(config: Config, device: torch.device, *, world: int) -> bool:
    """Whether the passes of this training may be captured.

    Not if processes communicate during a pass, if gradients are accumulated over several passes, or if a resumed
    training has to repeat the same bits: its first passes are plain, and in a capture a library may choose another
    algorithm for matrix products.
    """
    alone = world == 1 and config.accumulate == 1 and not config.shard
    return config.step_graph and device.type == "cuda" and alone and not config.deterministic


class Replayed:
    """`one_pass`, captured for the shapes of its first calls; for other shapes it is called plainly."""

    def __init__(self, one_pass: Callable[[Batch], Tensor], parameters: Sequence[nn.Parameter], device: torch.device):
        self.one_pass: Callable[[Batch], Tensor] = one_pass
        self.parameters: Sequence[nn.Parameter] = parameters
        self.refused: str = ""
        """Why nothing is captured; empty unless capturing was refused."""
        self._stream = torch.cuda.Stream(device)  # for plain passes too: autograd's state is tied to its stream
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kind: Any = None
        self._given: Batch = None  # pyright: ignore[reportAttributeAccessIssue]
        self._loss: Tensor = None  # pyright: ignore[reportAttributeAccessIssue]
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, batch: Batch) -> Tensor:
        """Return the loss, a tensor of its own; gradients are in `.grad` until the next call."""
        kind = tuple((t.shape, t.dtype, t.stride()) for t in batch.tensors)
        if self.refused or (self._graph is not None and kind != self._kind):
            return self.plain(batch)
        if self._graph is None:
            self._calls = self._calls + 1 if kind == self._kind else 1
            self._kind = kind
            if self._calls < WARM:
                return self.plain(batch)
            if self._calls == WARM:
                return self._watched(batch)
            if not self._captured(batch):
                return self.plain(batch)
        assert self._graph is not None
        for kept, now in zip(self._given.tensors, batch.tensors, strict=True):
            kept.copy_(now)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._graph.replay()
        return self._loss.clone()  # the next replay overwrites it

    def plain(self, batch: Batch) -> Tensor:
        """Run the pass without a graph."""
        self._forget()
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            loss = self.one_pass(batch)
        outside.wait_stream(self._stream)
        return loss

    def _watched(self, batch: Batch) -> Tensor:
        """Run a plain pass, and refuse to capture it if it makes the CPU wait for the GPU."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = self.plain(batch)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [one for one in caught if WAITED in str(one.message)]
        for one in caught:
            if one not in waits and PROTOTYPE not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if waits:
            self._refuse(f"{Path(waits[0].filename).name}:{waits[0].lineno} waits for the GPU")
        return loss

    def _captured(self, batch: Batch) -> bool:
        """Capture a pass, which computes nothing yet; return whether that worked."""
        self._forget()
        self._given = batch.holding([tensor.clone() for tensor in batch.tensors])
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        outside = torch.cuda.current_stream(self._stream.device)
        generator = torch.cuda.default_generators[self._stream.device_index]
        seed = generator.initial_seed()
        try:
            # Other threads may carry on, such as the one that copies the next images into pinned memory.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self.one_pass(self._given)
        except RuntimeError as error:
            self._forget()
            torch.cuda.set_stream(outside)
            _end(pool, generator)
            generator.manual_seed(seed)
            cause = error.__context__ or error  # the context is the error raised inside the pass
            for one in (error, cause):
                traceback.clear_frames(one.__traceback__)  # frames hold the pass, whose gradients belong to our stream
            self._refuse(str(cause).strip().partition("\n")[0] or type(cause).__name__)
            return False
        self._gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]
        self._graph = graph
        return True

    def _refuse(self, why: str) -> None:
        self.refused = why
        warnings.warn(
            f"a step of this training cannot be replayed as a CUDA graph ({why}); its steps run one by one, which is "
            "right and slower",
            RuntimeWarning,
            stacklevel=2,
        )

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _end(pool: Any, generator: torch.Generator) -> None:
    """Clean up after a failed capture, as torch 2.11 does not: memory stays allocated, and the generator unusable."""
    torchs: Any = torch._C
    with contextlib.suppress(RuntimeError, AttributeError):
        torchs._cuda_endAllocateToPool(generator.device.index, pool)
        torchs._cuda_releasePool(generator.device.index, pool)
    with contextlib.suppress(RuntimeError, AttributeError):
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
