"""Batches of images that are decoded on demand, for sets too large for the cache, with timm's transforms.

    batches = StreamBatches(data.train, batch_size=256, seed=0, augmentation=…, num_classes=1000, workers=8)
    for images, labels in batches.epoch(3, start=1000):     # as with TrainBatches, always bit-identical
    batches.skipped                                         # [("train/n01440764/a.JPEG", "image file is truncated")]

Each image's transform runs with generators seeded by (seed, epoch, row), in whichever worker. An image that cannot be
read is listed in `skipped`; in a training batch the next one takes its place, and an evaluation leaves it out. Signals
are handled by the main process alone. If a worker dies, the error names it and says what may help.
"""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wellcond.data.augment import CROP_RATIO, Augmentation
from wellcond.data.batches import Share, eval_cuts, finish_batches
from wellcond.data.draws import draw_order, make_key
from wellcond.data.files import ImageFiles, say_why, strict_decoding

__all__ = ["StreamBatches", "StreamEvalBatches"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAITS = hasattr(signal, "sigwaitinfo")  # Linux
TRIES = 100  # unreadable images in a row, at which that is an error
Sample = tuple[Tensor | None, int, list[tuple[str, str]]]


class StreamBatches:
    """`TrainBatches` for `ImageFiles`."""

    def __init__(
        self, images: ImageFiles, *, batch_size: int, seed: int, rank: int = 0, world: int = 1,
        device: torch.device | str = "cpu", augmentation: Augmentation, num_classes: int, drop_last: bool = True,
        workers: int = 4, interpolation: str = "random",
    ) -> None:  # fmt: skip
        augmentation.check_batches(batch_size, streamed=True)
        if augmentation.padding:
            raise ValueError(
                f"padding={augmentation.padding} is for cached sets of small images; streamed images are cropped by "
                "scale_min: set padding=0"
            )
        self.images: ImageFiles = images
        self.seed: int = seed
        self.augmentation: Augmentation = augmentation
        self.num_classes: int = num_classes
        self.device: torch.device = torch.device(device)
        self.workers: int = workers
        self.share: Share = Share(len(images), batch_size=batch_size, rank=rank, world=world, drop_last=drop_last)
        self.steps_per_epoch: int = self.share.steps
        self._skipped: dict[tuple[str, str], None] = {}
        self.transform: Any = _train_transform(images, augmentation, interpolation)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """The images that could not be read so far, each once, and why."""
        return list(self._skipped)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised float32 (b, c, h, w) and labels: int64 (b,), or float32 (b, num_classes) if soft."""
        self.share.check_start(start)
        order = draw_order(seed=self.seed, epoch=epoch, count=len(self.images)).tolist()
        spans = [self.share.at(step) for step in range(start, self.steps_per_epoch)]
        decoded = _Decoded(self.images, self.transform, seed=make_key(self.seed, epoch), replace=True)
        loader = _load(decoded, [order[low:high] for low, high in spans], self.workers, self.device)
        for step, (images, labels, skipped) in enumerate(loader, start):
            self._skipped |= dict.fromkeys(skipped)
            yield finish_batches(
                images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True), self.augmentation,
                [len(images)], num_classes=self.num_classes, seed=self.seed, epoch=epoch, step=step,
            )  # fmt: skip


class StreamEvalBatches:
    """`EvalBatches` for `ImageFiles`."""

    def __init__(
        self, images: ImageFiles, *, batch_size: int, rank: int = 0, world: int = 1,
        device: torch.device | str = "cpu", workers: int = 4, interpolation: str = "bicubic", crop_pct: float = 0.875,
    ) -> None:  # fmt: skip
        from timm.data.transforms_factory import create_transform

        self.images: ImageFiles = images
        self.device: torch.device = torch.device(device)
        self.workers: int = workers
        rows = list(range(rank, len(images), world))
        self._parts = [rows[cut] for cut in eval_cuts(len(images), batch_size=batch_size, world=world)]
        self._parts = [part for part in self._parts if part]
        self._skipped: dict[tuple[str, str], None] = {}
        self.transform: Any = create_transform(
            images.image_size, is_training=False, interpolation=interpolation, crop_pct=crop_pct, **_normalising(images)
        )

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """The images that could not be read so far, each once, and why."""
        return list(self._skipped)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        decoded = _Decoded(self.images, self.transform, seed=0, replace=False)
        for images, labels, skipped in _load(decoded, self._parts, self.workers, self.device):
            self._skipped |= dict.fromkeys(skipped)
            if len(labels):
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def _train_transform(images: ImageFiles, how: Augmentation, interpolation: str) -> Any:
    from timm.data.transforms_factory import create_transform

    settings: dict[str, Any] = {
        "is_training": True, "hflip": how.flip, "color_jitter": how.color_jitter or None,
        "auto_augment": how.auto_augment or None, "re_prob": how.erasing, "re_mode": "pixel",
        "interpolation": interpolation, **_normalising(images),
    }  # fmt: skip
    if how.scale_min < 1:
        settings |= {"scale": (how.scale_min, 1.0), "ratio": CROP_RATIO}
    else:  # resize the shorter side and keep the centre: no random crop unless asked for
        settings |= {"train_crop_mode": "rkrc", "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    return create_transform(images.image_size, **settings)


def _normalising(images: ImageFiles) -> dict[str, Any]:
    return {"mean": tuple(images.mean.tolist()), "std": tuple(images.std.tolist())}


class _Decoded(Dataset[Sample]):
    """Decoded and transformed images by row, each with its own random generators."""

    def __init__(self, images: ImageFiles, transform: Any, *, seed: int, replace: bool) -> None:
        self.images, self.transform, self.seed, self.replace = images, transform, seed, replace

    def __getitem__(self, row: int) -> Sample:
        skipped: list[tuple[str, str]] = []
        place = row
        while True:
            try:
                with strict_decoding():
                    image = self.images.read(place)
                break
            except MemoryError:
                raise
            except Exception as error:  # Pillow's decoders raise all sorts of things on damaged files
                skipped.append((self.images.name(place), say_why(error)))
            if not self.replace:
                return None, -1, skipped
            if len(skipped) >= TRIES:
                raise ValueError(f"{TRIES} images in a row cannot be read, such as {skipped[0][0]}: {skipped[0][1]}")
            place = (place + 1) % len(self.images)
        with _own_generators(make_key(self.seed, row)):
            return self.transform(image), int(self.images.labels[place]), skipped


@contextmanager
def _own_generators(key: int) -> Iterator[None]:
    """Seed the global generators, which transforms draw from, for one image, and restore them afterwards."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 (timm's transforms use it)
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
            torch.manual_seed(key >> 1)
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


# ---- workers


def _load(decoded: _Decoded, parts: list[list[int]], workers: int, device: torch.device) -> Iterator[Any]:
    loader = DataLoader(
        decoded, batch_sampler=parts, num_workers=workers, collate_fn=_collate, pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # DataLoader would draw its workers' seed from the global one
        prefetch_factor=4 if workers else None, worker_init_fn=_leave_signals,
    )  # fmt: skip
    others = set(active_children())
    with _starting_workers():
        batches = iter(loader)
    processes = set(active_children()) - others
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            raise ValueError(_say_who_died(processes, workers)) from error
        yield batch


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Start workers with those signals blocked that the main process handles for all.

    When a worker dies, DataLoader's SIGCHLD handler raises wherever the main process is, in the middle of saving, say.
    The handler is removed here, so that the death is noticed when the next batch is requested.
    """
    if not WAITS or threading.current_thread() is not threading.main_thread():
        yield
        return
    on_death = signal.getsignal(signal.SIGCHLD)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGCHLD))
    try:
        yield
    finally:
        if on_death is not None:  # None is a handler that Python cannot restore
            signal.signal(signal.SIGCHLD, on_death)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _leave_signals(_worker: int) -> None:
    """In a worker: leave Ctrl-C and SIGTERM, which reach all processes of a job, to the main process.

    The main process still ends its workers by SIGTERM; only a thread that waits for the signal can tell who sent it.
    """
    if not WAITS:
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _say_who_died(processes: set[Any], workers: int) -> str:
    dead = next((process for process in processes if process.exitcode), None)
    if dead is None:
        return "a decoding worker has ended without a word; workers=0 decodes in the main process, which says why"
    who = f"the decoding worker with pid {dead.pid}"
    if dead.exitcode > 0:
        return f"{who} ended with exit code {dead.exitcode}; workers=0 decodes in the main process, which says why"
    number = -dead.exitcode
    killed = f"{who} was killed by {signal.Signals(number).name}"
    if number == signal.SIGKILL:
        return (
            f"{killed}, as the system does where memory runs out: set fewer workers than {workers}, or a smaller "
            "batch_size; the same command then goes on"
        )
    if number == signal.SIGBUS:
        return f"{killed}: /dev/shm is too small for {workers} workers; enlarge it, or set fewer workers"
    return f"{killed}: a file that its decoder cannot bear, perhaps; workers=0 shows at which"


def _collate(samples: list[Sample]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    images = [image for image, _, _ in samples if image is not None]
    labels = torch.tensor([label for image, label, _ in samples if image is not None], dtype=torch.int64)
    return torch.stack(images) if images else torch.empty(0), labels, [item for _, _, s in samples for item in s]
