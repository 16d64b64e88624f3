"""`wellcond bench lra`: a training step of the Long Range Arena's models, in our loop, as one CUDA graph, and eagerly.

Each task has its published sizes and random tokens. It runs with softmax, kernelized, Nyström and Skyformer attention,
and with two of them in the published code's order of operations: softmax with float32 weights that are recomputed in
the backward pass (checkpointed), and Skyformer (`compat`). A step is forward, backward, gradient clipping by value and
AdamW. It is timed in three ways:

- `loop ms`: in `wellcond train`, end to end, data included, in the steady part between two synchronisations
- `graph ms`: on a GPU, the same step on one constant batch, captured by hand as a single CUDA graph: the floor.
  `share` is its ratio to the loop's time
- `eager ms`: the same by hand, neither compiled nor captured: how the published code runs

`times SDPA` is the loop's time with softmax by torch's SDPA divided by that of the row; `memory MiB` is the loop's peak
memory.
"""

import contextlib
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wellcond.attention import ATTENTIONS, register_attention
from wellcond.attention.compat import published_order
from wellcond.bench.tables import destination, show
from wellcond.bench.timing import chosen_device, graphed_ms
from wellcond.bench.training import steady_rate
from wellcond.data import Batch, DataSet, train_batches
from wellcond.data.sequences import SequenceSet
from wellcond.data.sources import SOURCES, Settings, register_source
from wellcond.models.sequence import TASKS, find_task
from wellcond.progress import steps
from wellcond.records import Run, write_record
from wellcond.train.computing import autocast, mend_read_back
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.recipes import bearable, recipe
from wellcond.train.stopping import Interrupted
from wellcond.train.tasks import make_task

__all__ = ["METHODS", "SDPA", "registered_attentions", "run"]

SEED = 0
SOURCE = "random_tokens"
SDPA, CHECKPOINTED = "softmax_by_sdpa", "checkpointed_softmax"
PIXELS = ("pathfinder", "image")  # tasks without padding
WARM, STEADY = 50, 300  # steps
QUICK = {"length": 64, "batch": 4}
COLUMNS = (
    "task", "attention", "batch", "tokens", "loop ms", "graph ms", "share", "eager ms", "memory MiB", "times SDPA",
)  # fmt: skip


class Method(NamedTuple):
    name: str
    attention: str
    settings: dict[str, Any]
    compiled: bool = True
    captured: bool = True
    """False for what saves and restores the state of a generator, as checkpointed dropout does."""


METHODS = (
    Method("softmax by SDPA", SDPA, {}),
    Method("softmax", "", {}),
    Method("softmax, as published", CHECKPOINTED, {}, compiled=False, captured=False),
    Method("kernelized", "kernelized", {}),
    Method("nystrom", "nystrom", {}),
    Method("skyformer", "skyformer", {}),
    Method("skyformer, as published", "skyformer", {"compat": True}, compiled=False),
)


def run(
    *, output: Path | None = None, device: str | None = None, quick: bool = False, tasks: Sequence[str] = ()
) -> Path:
    """Time steps of `tasks` (default: all) on `device`, write JSON to `output` after each row, and return its path."""
    names = [name.removeprefix("lra_") for name in tasks] or list(TASKS)
    for name in names:
        find_task(name)
    where = chosen_device(device)
    path = destination(output, f"lra-{where.type}.json")
    rows: list[dict[str, Any]] = []
    with (
        _registered(), published_order(), tempfile.TemporaryDirectory() as scratch,
        steps(len(names) * len(METHODS)) as begin,
    ):  # fmt: skip
        for name in names:
            first = math.nan
            for method in METHODS:
                begin(f"{name}, {method.name}")
                row = _Step(name, method, where, Path(scratch), quick).row()
                first = row["loop ms"] if method is METHODS[0] else first
                rows.append({**row, "times SDPA": first / row["loop ms"]})
                payload = {"benchmark": "lra", "on": where.type, "quick": quick, "warm": WARM, "steady": STEADY}
                write_record(path, {**payload, "rows": rows}, seed=SEED)
    show("a training step of the Long Range Arena", rows, COLUMNS)
    Console().print(f"wrote {path}", soft_wrap=True)
    for row in rows:
        if row["note"]:
            Console().print(f"{row['task']}, {row['attention']}: {row['note']}", soft_wrap=True, highlight=False)
    return path


class _Step:
    """One task with one attention."""

    def __init__(self, task: str, method: Method, where: torch.device, scratch: Path, quick: bool):
        self.task, self.method, self.where, self.scratch, self.quick = task, method, where, scratch, quick
        sizes = find_task(task)
        base = recipe(f"lra_{task}")
        self.batch = QUICK["batch"] if quick else base.batch_size
        self.length = QUICK["length"] if quick else sizes.length
        self.warm, steady = (2, 2) if quick else (WARM, STEADY)
        options = {
            "samples": (8 if quick else 40) * self.batch, "length": self.length, "vocab": sizes.vocab_size,
            "classes": sizes.num_classes, "pairs": sizes.documents == 2, "padded": task not in PIXELS, "mask": None,
        }  # fmt: skip
        changes: dict[str, Any] = {
            "data": SOURCE, "data_kwargs": options, "batch_size": self.batch, "steps": self.warm + steady,
            "warmup_steps": 1, "log_every": self.warm, "eval_steps": 10**9, "save_every": 10**9, "eval_batches": 1,
            "keep_best": False, "keep_best_after": 0.0,
        }  # fmt: skip
        if quick:
            changes["model_kwargs"] = {"dim": 8, "mlp_dim": 8}
        changes |= {"attention": method.attention, "attention_kwargs": method.settings}
        config = base.changed(changes, given=False)
        how = {"compile": method.compiled, "step_graph": method.captured}
        self.config: Config = bearable(config.changed(how, given=False), where.type)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "task": self.task, "attention": self.method.name, "batch": self.batch, "tokens": self.length,
            "loop ms": math.nan, "graph ms": None, "share": None, "eager ms": None, "memory MiB": None, "note": "",
        }  # fmt: skip
        measures: dict[str, Callable[[], Any]] = {"loop ms": self._loop, "eager ms": self._eager}
        if self.where.type == "cuda" and self.method.captured:
            measures["graph ms"] = self._graph
        for column, measure in measures.items():
            self._clear()
            try:
                row[column] = measure()
            except Interrupted as stopped:  # a signal ends the benchmark, not just this cell
                raise KeyboardInterrupt from stopped
            except Exception as error:  # one that fails leaves the others intact
                reason = str(error).strip().partition("\n")[0]
                row["note"] += f"{column} failed: {type(error).__name__}: {reason} "
            if column == "loop ms" and self.where.type == "cuda":
                row["memory MiB"] = torch.cuda.max_memory_allocated(self.where) / 2**20
        if row["graph ms"]:
            row["share"] = row["graph ms"] / row["loop ms"]
        return row

    def _clear(self) -> None:
        torch.compiler.reset()
        if self.where.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.where)

    def _loop(self) -> float:
        folder = self.scratch / f"{self.task}-{METHODS.index(self.method)}"
        train(self.config, folder, device=str(self.where), quiet=True)
        rate = steady_rate(Run.open(folder).train, batch=self.batch, first=self.warm, last=self.config.steps)
        return 1e3 * self.batch / rate

    def _graph(self) -> float:
        return graphed_ms(self._by_hand(compiled=self.config.compile, capturable=True), self.where)

    def _eager(self) -> float:
        """Return the mean time of several steps in a row (median of repeats): the CPU launches ahead of the GPU."""
        step, count = self._by_hand(compiled=False), 1 if self.quick else 20
        for _ in range(3):
            step()
        times = []
        for _ in range(1 if self.quick else 5):
            self._wait()
            begun = time.perf_counter()
            for _ in range(count):
                step()
            self._wait()
            times.append(1e3 * (time.perf_counter() - begun) / count)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)

    def _by_hand(self, *, compiled: bool, capturable: bool = False) -> Callable[[], None]:
        """Build a training step on one batch."""
        config = self.config
        data = _random_tokens("", cast(Settings, None), **config.data_kwargs)
        task = make_task(config, data)
        model = task.build().to(self.where).train()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            parameters, lr=config.lr, eps=config.opt_eps or 1e-8, weight_decay=0.0, fused=self.where.type == "cuda",
            capturable=capturable,
        )  # fmt: skip
        called = model
        if compiled:
            mend_read_back()
            called = cast(nn.Module, torch.compile(model))
        batches = train_batches(data.train, batch_size=self.batch, seed=SEED, device=self.where)
        batch: Batch = next(iter(batches.epoch(0)))

        def step() -> None:
            optimizer.zero_grad()
            with autocast(config, self.where):
                loss = task.loss(called, batch)
            loss.backward()
            nn.utils.clip_grad_value_(parameters, config.clip_value or 1.0)
            optimizer.step()

        return step


# ---- the data source and attentions that are registered while the benchmark runs


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    try:
        register_source(SOURCE, takes="")(_random_tokens)
        with registered_attentions():
            yield
    finally:
        SOURCES.pop(SOURCE, None)


@contextlib.contextmanager
def registered_attentions() -> Iterator[None]:
    """Register softmax by torch's SDPA, never our kernels, as SDPA, and as published, as CHECKPOINTED."""
    try:
        register_attention(SDPA)(softmax_by_sdpa)
        register_attention(CHECKPOINTED)(checkpointed_softmax)
        yield
    finally:
        for name in (SDPA, CHECKPOINTED):
            ATTENTIONS.pop(name, None)


def _random_tokens(
    _rest: str, _settings: Settings, *, samples: int, length: int, vocab: int, classes: int, pairs: bool, padded: bool,
) -> DataSet:  # fmt: skip
    """Make sequences of random tokens: from half of `length` to all of it if `padded`, otherwise all of it."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (samples, 2) if pairs else (samples,)
    tokens = torch.randint(1, min(vocab, 256), (*shape, length), dtype=torch.uint8, generator=generator)
    least = length // 2 if padded else length
    lengths = torch.randint(least, length + 1, shape, dtype=torch.int32, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    part = SequenceSet(tokens, lengths, labels, vocab=vocab, mask="fixed")
    return DataSet(name=SOURCE, classes=list(map(str, range(classes))), train=part, val=part, skipped=[])


def softmax_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention, by whichever of its backends it chooses."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def checkpointed_softmax(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention as the published code runs it: n × n weights in float32, recomputed in the backward pass."""
    assert not is_causal
    width = query.shape[-1] ** -0.5 if scale is None else scale

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            logits = q.float() @ k.float().mT * width
            if attn_mask is not None:
                logits = logits - 1e6 * (1 - attn_mask.float())
            return F.dropout(logits.softmax(-1), dropout_p) @ v.float()

    if not torch.is_grad_enabled():
        return attend(query, key, value).to(query.dtype)
    return cast(Tensor, checkpoint(attend, query, key, value, use_reentrant=False)).to(query.dtype)
