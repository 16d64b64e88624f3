"""What is measured of the Long Range Arena's trained models before their runs end, under these names:

test_accuracy          on the test set, looked at once: of the state that was best in development, and of the last state
attention_spectrum     singular values of the last layer's attention output, on one batch of the test set (Figure 2)
approximations         five approximations of softmax on the queries, keys and values of trained and fresh weights

And for the separate steps that sky-time runs: `training_memory`, and `published_steps`, which measures time and memory
of steps as the paper's code computes them.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wellcond.attention.compat import published_order
from wellcond.bench.lra import checkpointed_softmax
from wellcond.claims.approximations import APPROXIMATIONS, approximation_errors, exact_output, norm_of
from wellcond.claims.claim import rounded
from wellcond.claims.measurements import register_measurement
from wellcond.data import DataSet, train_batches
from wellcond.models.families.forwards import split_qkv
from wellcond.models.sequence import SequenceAttention, SequenceClassifier
from wellcond.numerics.singular import singular_values
from wellcond.train.checkpoint import final_state, read
from wellcond.train.computing import autocast
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.setup import data_of
from wellcond.train.tasks import Task, Validation, make_task

__all__ = [
    "SIZES",
    "approximations",
    "attention_spectrum",
    "open_task",
    "measure_accuracy",
    "published_steps",
    "spectrum",
    "training_memory",
]

SIZES, BUDGETS = (512, 1024, 2048, 4096), (16, 32, 64, 128, 256)  # tokens and landmarks of the paper's Figure 1
SEQUENCES, DRAWS = 2, 3
TOGETHER = 4  # sequences whose n × n attention weights are in memory in float64 at once
WARM_UP, TIMED = 3, 10  # steps


class _Opened(NamedTuple):
    data: DataSet
    task: Task
    model: SequenceClassifier
    """At its random start."""
    device: torch.device


def open_task(config: Config, folder: Path) -> DataSet:
    """Return the data of a run, opened as its training did."""
    return data_of(config, cache=folder / "cache")


def _open(config: Config, folder: Path, device: str | None) -> _Opened:
    return _with_model(config, open_task(config, folder), device)


def _with_model(config: Config, data: DataSet, device: str | None) -> _Opened:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    task = make_task(config, data)
    model = task.build().to(where).eval()
    assert isinstance(model, SequenceClassifier)
    return _Opened(data=data, task=task, model=model, device=where)


def _load(opened: _Opened, folder: Path, which: str) -> int:
    """Load the weights of the `best` or the `last` state of a run and return its step. ValueError if there is none."""
    best = folder / "checkpoints" / "best"
    state = read(best) if which == "best" and best.exists() else final_state(folder)
    opened.model.load_state_dict(state.weights)
    return state.step


@register_measurement("test_accuracy")
def measure_accuracy(config: Config, folder: Path, device: str | None = None) -> dict[str, Any]:
    """Return {"best": {"loss": …, "top1": …, "step": …}, "last": …, "samples": …}, in the training's precision."""
    opened = _open(config, folder, device)
    here = Processes(rank=0, world=1, device=opened.device)
    whole = config.changed({"eval_batches": 0})
    validation = Validation(whole, opened.task, opened.data.test or opened.data.val, here)
    found = {}
    for which in ("best", "last"):
        step = _load(opened, folder, which)
        found[which] = {**validation.of(opened.model), "step": step}
    return {"samples": len(opened.data.test or opened.data.val), **found}


def training_memory(config: Config, data: DataSet, device: str | None = None) -> float | None:
    """Return the peak MiB of some steps with the run's own batch and precision, not compiled, beyond data and model;
    None on a CPU."""
    opened = _with_model(config, data, device)
    return _time_steps(opened, config)["memory_mib"] if opened.device.type == "cuda" else None


# ---- the spectrum of attention's output


@register_measurement("attention_spectrum")
def attention_spectrum(config: Config, folder: Path, device: str | None = None) -> dict[str, Any]:
    """Return each singular value of attention's output, averaged over one batch, largest first; padding left out."""
    opened = _open(config, folder, device)
    _load(opened, folder, "best")
    part = opened.data.test or opened.data.val
    rows = torch.linspace(0, len(part) - 1, min(config.batch_size, len(part))).round().long()
    batch = part.part(rows).batch(torch.arange(len(rows)), len(rows), opened.device)
    few = zip(*(tensor.split(TOGETHER) for tensor in batch.inputs), strict=True)
    values = torch.cat([spectrum(opened.model.double(), inputs) for inputs in few])
    return {"samples": len(rows), "values": [rounded(value, 5) for value in values.mean(0).tolist()]}


@torch.no_grad()
def spectrum(model: SequenceClassifier, inputs: Sequence[Tensor | None]) -> Tensor:
    """Return singular values of the last attention's output, (sequences, d). Small ones need a model in float64."""
    with _seen(model.blocks[-1].get_submodule("attn")) as outputs:
        model(*inputs)
    masks = [mask for mask in inputs[1::2] if mask is not None]
    output = outputs[0].double()
    if masks:
        output = output * torch.stack(masks, 1).flatten(0, 1)[..., None]
    return singular_values(output, method="svd")  # small ones too, unlike a Gram matrix


@contextlib.contextmanager
def _seen(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of a module in a list, call by call."""
    found: list[Tensor] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append(output)

    hook = module.register_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()


# ---- approximations of softmax


@register_measurement("approximations")
@torch.no_grad()
def approximations(config: Config, folder: Path, device: str | None = None) -> dict[str, Any]:
    """Return {"trained": {"1024": {"norm": ‖exact‖, "skyformer": [by budget], …}}, "initial": …, "budgets": […]}.

    Errors are medians over layers, heads, sequences and draws; a draw without a value counts as infinite. The sequences
    are tokens of the test set, one sample after the other, without padding. On a CPU, only one draw and one length.
    """
    opened = _open(config, folder, device)
    length = opened.model.embedding.positions.shape[0]
    quick = opened.device.type == "cpu"
    sizes = [size for size in SIZES if size <= length][: 1 if quick else None] or [length]
    budgets = [budget for budget in BUDGETS if 2 * budget <= sizes[0]]
    tokens, draws = _full_sequences(opened, length), 1 if quick else DRAWS
    found: dict[str, Any] = {"budgets": budgets, "sequences": len(tokens), "draws": draws}
    for weights in ("initial", "trained"):
        if weights == "trained":
            _load(opened, folder, "best")
        found[weights] = {str(size): _errors(opened.model, tokens[:, :size], budgets, draws) for size in sizes}
    return found


def _full_sequences(opened: _Opened, length: int) -> Tensor:
    """Return sequences without padding, (sequences, length), joined from samples of the test set."""
    part, tokens = opened.data.test or opened.data.val, []
    for row in torch.randperm(len(part), generator=torch.Generator().manual_seed(0)):
        inputs = part.inputs(row[None])
        masks = inputs[1::2] or (None,)  # sequences without padding have no masks
        for some, mask in zip(inputs[::2], masks, strict=True):
            tokens.append(some.flatten() if mask is None else some[mask])
        if sum(map(len, tokens)) >= SEQUENCES * length:
            break
    flat = torch.cat(tokens)[: SEQUENCES * length]
    return flat[: len(flat) // length * length].view(-1, length).to(opened.device)


def _errors(model: SequenceClassifier, tokens: Tensor, budgets: Sequence[int], draws: int) -> dict[str, Any]:
    layers = [_softmax_of(block) for block in model.blocks]
    with contextlib.ExitStack() as stack:
        seen = [stack.enter_context(_seen(layer.get_submodule("qkv"))) for layer in layers]
        model.pooled(tokens)
    parts = [split_qkv(outputs[0], layer.num_heads) for outputs, layer in zip(seen, layers, strict=True)]
    query, key, value = (torch.cat([part[which] for part in parts]).double() for which in range(3))
    generator = torch.Generator(tokens.device).manual_seed(0)
    errors = approximation_errors(query, key, value, budgets=budgets, draws=draws, generator=generator)
    norm = norm_of(exact_output(query, key, value)).median()
    by_name = {name: [_median(errors[name, budget]) for budget in budgets] for name in APPROXIMATIONS}
    return {"norm": rounded(norm, 5), **by_name}


def _softmax_of(block: nn.Module) -> SequenceAttention:
    attn = block.get_submodule("attn")
    assert isinstance(attn, SequenceAttention)
    return attn


def _median(errors: Tensor) -> float | None:
    """Return the median error; None if half of them have no value."""
    value = float(errors.nan_to_num(nan=math.inf, posinf=math.inf).flatten().median())
    return rounded(value, 5) if math.isfinite(value) else None


# ---- a step as published


def published_steps(config: Config, folder: Path, device: str | None = None) -> dict[str, Any]:
    """Return ms and peak memory of a training step in the published order of operations, without CUDA graphs.

    Of softmax, with all weights in memory and checkpointed (computed again in the backward pass), and of Skyformer as
    its authors run it. Projections are in the training's precision, attention in float32.
    """
    found = {}
    config = config.changed({"data_kwargs": {**config.data_kwargs, "mask": "published"}})
    data = open_task(config, folder)
    for name, settings in (("softmax", {}), ("skyformer", {"attention_kwargs": {"compat": True}})):
        attention = {"attention": name} if name != "softmax" else {}
        changed = config.changed({**attention, **settings})
        opened = _with_model(changed, data, device)
        if name == "softmax":
            for block in opened.model.blocks:
                attn = _softmax_of(block)
                attn.forward = _checkpointed(attn)
        with published_order():
            found[name] = _time_steps(opened, changed)
    return found


def _checkpointed(attn: SequenceAttention) -> Callable[..., Tensor]:
    def forward(x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        dropout = attn.attn_drop.p if attn.training else 0.0
        q, k, v = split_qkv(attn.qkv(x), attn.num_heads)
        y = checkpointed_softmax(q, k, v, attn_mask, dropout)
        return attn.proj_drop(attn.proj(y.transpose(1, 2).flatten(2)))

    return forward


def _time_steps(opened: _Opened, config: Config) -> dict[str, float | None]:
    model, device, cuda = opened.model.train(), opened.device, opened.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    batches = train_batches(opened.data.train, batch_size=config.batch_size, seed=0, device=device).epoch(0)
    batch = next(iter(batches))
    if cuda:  # cuBLAS allocates memory at a process's first product, and keeps it
        torch.mm(*(torch.ones(16, 16, device=device) for _ in range(2)))
    before = torch.cuda.memory_allocated(device) if cuda else 0  # the data and the model
    warm, timed = (WARM_UP, TIMED) if cuda else (0, 1)
    start = 0.0
    for step in range(warm + timed):
        if step == warm:
            if cuda:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with autocast(config, device):
            loss = opened.task.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
    if cuda:
        torch.cuda.synchronize(device)
    milliseconds = 1e3 * (time.perf_counter() - start) / timed
    memory = round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1) if cuda else None
    return {"ms": round(milliseconds, 3), "memory_mib": memory}
