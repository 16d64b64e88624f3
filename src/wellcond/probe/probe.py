"""Attach a probe to a model, in training or not, to measure the conditioning of its tokens at every block and site.

    with wellcond.Probe(model) as probe:          # once, in float32
        model(images)
    print(probe.table())

    probe = wellcond.Probe(model, every=100).to("probe.jsonl")
    with probe:                                   # in training: every 100th forward pass; rows are written as they come
        train(model)

The probe runs a forward pass of its own to measure, on the uncompiled model and in float32, whatever the training
computes in: see passes.py. In training that pass reads the same samples each time, so that a curve shows the model and
not the batch. The probe changes no output bit, no gradient and no random number, and always removes its hooks, even
after an exception.
"""

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from wellcond import records
from wellcond.models.families import unwrap
from wellcond.models.sites import Which
from wellcond.numerics.layer_map import near_unit_shares
from wellcond.probe.attention import AttentionListener
from wellcond.probe.capture import Capture, Padding, Pass
from wellcond.probe.passes import (
    argument,
    batch_size,
    first_samples,
    is_compiled,
    is_sharded,
    needs_separate_pass,
    own_pass,
    run_apart,
    watching,
    whose_pass,
)
from wellcond.probe.places import Place, block_ends, choose, form_of
from wellcond.probe.statistics import Findings, Sums
from wellcond.probe.table import table
from wellcond.words import ENDS

__all__ = ["SHARE", "Pace", "Probe"]

SHARE = 0.01  # of the training time, with every="auto"
# What `exact` asks for, and what is tried next: models that cast inside may run in no other precision than their own.
PRECISIONS: dict[bool | str, tuple[bool | str, ...]] = {
    False: (False,),
    True: (True, "stored"),
    "float64": ("float64", True, "stored"),
}
# In torch's messages about tensors of several dtypes, or of one that an operation does not have.
DTYPES_DIFFER: re.Pattern[str] = re.compile(r"dtype|scalar type|type .*should be the same|not implemented for '")


class Probe:
    """Measure a model's blocks at their sites, in every `every`-th forward pass while the probe is attached.

    Args:
        model: the object that you call: the model itself, or its wrapper from torch.compile, DistributedDataParallel or
            accelerate.
        sites: names or fnmatch patterns among `in`, `sa`, `+sa`, `mlp`, `+mlp`, `tokens` (raw patches, grayed if the
            model grays them) and `embed` (the first block's input); by default those of `sa`, `+sa`, `mlp`, `+mlp` that
            the model has.
        blocks: names or fnmatch patterns (`blocks.3`, `blocks.1?`), or indices (−1 is the last); by default all.
        every: measure at steps 0, every, 2·every, … A step is a forward pass, or what you set `probe.step` to. "auto"
            measures as often as 1 % of the training time allows.
        last: also measure at this step, the last one of a training, whatever `every` says.
        max_samples: how many samples are measured, which bounds the memory.
        exact: measure in a separate pass with autocast and TF32 off, in float32 (True) or "float64"; or in the model's
            own pass, in whatever precision it has (False): bfloat16 shows little but its own ceiling.
        samples: the input of the exact pass: a tensor, a tuple of arguments or a dict of them by name. By default the
            current batch, and in training the first one, kept to the end, so that the samples are always the same.
        rank_samples: for how many of the samples to compute what costs more: the effective rank and the spectrum, which
            need all singular values, and the attention's entropy and largest logit.
        spectrum: also measure the decay of the singular values, as rows `sigma.0`, `sigma.6`, …
        attention: also measure the attention's entropy and largest logit, where they can be intercepted.
        near_unit: also measure the share of eigenvalues near the unit circle of each block's linear map
            (numerics/layer_map.py), at the cost of an eigenvalue decomposition on the CPU for each block.
        run: the name of the run, written to the rows.
        reduce: merge the measurements of all torch.distributed processes, each of which must have a probe attached; by
            default if there is more than one.

    Raises ValueError for a model without known blocks, and if sites or blocks match nothing, listing what there is.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Iterable[str] | None = None,
        blocks: Which = None,
        *,
        every: int | Literal["auto"] = 1,
        last: int | None = None,
        max_samples: int = 64,
        exact: bool | Literal["float64"] = True,
        samples: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
        rank_samples: int = 4,
        spectrum: bool = False,
        attention: bool = True,
        near_unit: bool = False,
        run: str = "",
        reduce: bool | None = None,
    ):
        self._pace = Pace(every, last=last, agree=self._agree)
        for name, value in (("max_samples", max_samples), ("rank_samples", rank_samples)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        if exact not in (True, False, "float64"):
            raise ValueError(f'exact is True (float32), "float64", or False (the pass that happens), got {exact!r}')
        if samples is not None and not exact:
            raise ValueError("exact=False looks at the pass that happens: samples= would be ignored; leave one of them")
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"a probe measures an nn.Module, got {type(model).__name__}; give it the model that you call"
            )
        self.model = model
        self.every = every
        self.max_samples: int = max_samples
        self.rank_samples: int = rank_samples
        self.exact = exact
        self.spectrum: bool = spectrum
        self.attention: bool = attention
        self.reduce: bool | None = reduce
        self.near_unit = near_unit
        self.notes: list[str] = []
        """What a reader of the numbers should know, such as that a site was not reached or a separate pass was run."""
        self.shape: tuple[int, int] | None = None
        """(tokens, width) of the matrices inside blocks, as last measured; None if they differ."""
        self._asked = (sites, blocks)
        self._given = samples is not None
        self._samples = None if samples is None else first_samples(*_as_call(samples), max_samples)
        self._choose()
        self._findings = Findings(run)
        self._attached: contextlib.ExitStack | None = None
        self._step = 0
        self._counts_passes = True
        self._measured_step: int | None = None
        self._passes = self._passes_before = 0
        self._during = contextlib.ExitStack()  # contexts open while the model's own pass runs
        self._pass: Pass | None = None

    def _choose(self) -> None:
        """Find the requested places in the model as it is now."""
        self._wanted = choose(self.model, *self._asked)
        self._attending = {
            want.place.block: want.attention for want in self._wanted if self.attention and want.attention is not None
        }
        self._form = form_of(self._wanted)

    # Attaching

    def attach(self) -> Self:
        """Start watching the model, until `detach`; a `with` block does both."""
        if self._attached is not None:
            raise ValueError("this probe is attached already; detach it first, or make another")
        with contextlib.ExitStack() as stack:
            stack.enter_context(watching(self.model, self._before, self._after))
            stack.callback(lambda: self._during.close())  # after a KeyboardInterrupt it is still open
            self._attached = stack.pop_all()
        self._passes_before = self._passes
        return self

    def detach(self) -> None:
        """Remove every hook, and warn if no forward pass was seen; at the end of a `with` block that is an error."""
        if self._let_go():
            warnings.warn(self._saw_nothing(), stacklevel=2)

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._let_go() and kind is None:
            raise RuntimeError(self._saw_nothing())

    def _let_go(self) -> bool:
        """Detach; return True if no forward pass was seen since the probe was attached."""
        if self._attached is None:
            return False
        stack, self._attached = self._attached, None
        stack.close()
        return self._passes == self._passes_before

    def _saw_nothing(self) -> str:
        return (
            f"the probe saw no forward pass of {type(self.model).__name__}: either it was not called at all, or "
            "not by calling this very object (model(x)). Give Probe the outermost object that you call: the "
            "compiled model, the DDP wrapper; model.forward_features(x) is not a call of the model"
        )

    def measure(self, step: int | None = None) -> None:
        """Measure now, in a separate pass on `samples`, without attaching: for your own training loops.

        `step` is the step to write to the rows, by default `probe.step`. `every` is ignored; `if probe.due(step)`
        follows it. If there are several processes, all must call this. ValueError if there are no samples.
        """
        if not self.exact or self._samples is None:
            raise ValueError("give the probe what to measure on: Probe(model, samples=batch), with exact not False")
        if step is not None:
            self.step = step
        args, kwargs = self._kept_samples()
        done = Pass(exact=True, samples=min(batch_size(args, kwargs), self.max_samples))
        with self._pace.timed(self._device):
            try:
                self._begin(done, args, kwargs)
            except Exception as error:
                done.error = error
            self._finish(done, self._step)
        self._measured_step = self._step
        self._pace.measured(self._step)

    def due(self, step: int) -> bool:
        """Whether a measurement is due at this step, by `every` or because it is the `last`."""
        return self._pace.due(step)

    # Results

    @property
    def step(self) -> int:
        """The step of the next forward pass. Once you set it, it no longer counts passes by itself."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step, self._counts_passes = int(value), False

    @property
    def run(self) -> str:
        """The name of the run, in every row."""
        return self._findings.run

    def rows(self) -> list[records.Row]:
        """Return everything measured so far, as plain dicts, oldest first."""
        return list(self._findings.rows())

    def table(self, name: str = "log_kappa") -> str:
        """Return the last measurement as text: blocks × sites."""
        return table(self._findings.rows(), name, notes=self.notes)

    def to(self, path: str | Path) -> Self:
        """Write the rows to this JSON Lines file: those measured so far, and from now on each as it is measured.

        ValueError if the file cannot be written.
        """
        self._findings.write_to(Path(path), write=self._writes())
        return self

    def clear(self) -> None:
        """Forget the rows measured so far; the file keeps them."""
        self._findings.clear()

    def __repr__(self) -> str:
        places = len(self._wanted)
        return f"Probe({type(unwrap(self.model)).__name__}, {places} places, every={self.every}, step={self.step})"

    # One pass

    @property
    def _busy(self) -> bool:
        """Whether to ignore this pass: some probe's own, or one that gradient checkpointing repeats in backward."""
        return whose_pass() is not None or torch._C._current_graph_task_id() != -1

    @property
    def _in_training(self) -> bool:
        return unwrap(self.model).training

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._busy:
            return
        self._during.close()  # left open by a KeyboardInterrupt, on which hooks do not run
        self._passes += 1
        self._pass = None
        if not self._pace.due(self._step) or self._measured_step == self._step or batch_size(args, kwargs) == 0:
            return
        self._pass = Pass(exact=bool(self.exact), samples=min(batch_size(args, kwargs), self.max_samples))
        try:
            # Outside the user's dispatch modes, such as selective checkpointing's, which would replay a pass of ours.
            with _disable_current_modes(), self._pace.timed(self._device):
                if self.exact:
                    args, kwargs = self._read_by_own_pass(args, kwargs)
                    self._pass.samples = min(batch_size(args, kwargs), self.max_samples)
                self._begin(self._pass, args, kwargs)
        except Exception as error:
            self._pass.error = error  # the model's own pass may fail in the same way, with a better message

    def _read_by_own_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the exact pass's (args, kwargs): the given samples, else the first batch in training, else these."""
        if self._samples is None and self._in_training:
            self._samples = first_samples(args, kwargs, self.max_samples)
        return self._kept_samples() if self._given or self._in_training else (args, kwargs)

    def _kept_samples(self) -> Any:
        where = self._device
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(where), self._samples)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _begin(self, into: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start listening to the pass that is about to run, or measure a separate one before it."""
        batch = batch_size(args, kwargs)
        if form_of(self._wanted) != self._form:  # skips or attention have changed since
            self._choose()
        into.padding = self._padding(args, kwargs)
        why = needs_separate_pass(self.model)
        if not into.exact and why is None:
            self._during.enter_context(self._listening(into, into.samples / max(1, batch)))
            return
        if why is not None and (not into.exact or is_compiled(self.model)):
            self._note(why)
        # It runs first, since the model's own pass might change its inputs in place.
        failed: RuntimeError | None = None
        for precision in PRECISIONS[self.exact]:
            mine, named = first_samples(args, kwargs, self.max_samples)
            share = into.samples / max(1, batch_size(mine, named))  # below 1 if they could not be cut
            into.padding = self._padding(args, kwargs)
            try:
                with own_pass(self), self._listening(into, share):
                    run_apart(self.model, mine, named, exact=precision)
            except RuntimeError as error:
                if not DTYPES_DIFFER.search(str(error)):
                    raise
                failed = failed or error
                continue
            if failed is not None:
                asked = "float64" if self.exact == "float64" else "float32"
                how = "float32" if precision is True else "the precision of its weights"
                why = str(failed).strip().partition("\n")[0]
                self._note(f"the model does not run in {asked} and was measured in {how}: {why}", warn=True)
            return
        assert failed is not None
        raise failed

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padding:
        return Padding(self._valid_tokens(args, kwargs), samples=self.max_samples)

    def _after(self, finished: bool) -> None:
        if self._busy:
            return
        step = self._step
        if self._counts_passes:
            self._step += 1
        self._during.close()
        done, self._pass = self._pass, None
        if done is not None and finished:
            with _disable_current_modes(), self._pace.timed(self._device):
                self._finish(done, step)
            self._measured_step = step
            self._pace.measured(step)

    @contextlib.contextmanager
    def _listening(self, into: Pass, share: float) -> Iterator[None]:
        heard = min(into.samples, self.rank_samples)
        listener = AttentionListener(
            self._attending,
            share=share * heard / max(1, into.samples),
            samples=heard,
            valid=into.padding.of,
            blocks={want.place.block: want.block for want in self._wanted if want.attention is not None},
        )
        ends = block_ends(self.model, self._asked[1]) if self.near_unit else []
        capture = Capture([*self._wanted, *ends], max_samples=self.max_samples)
        # The hooks exist for this pass only; at other times the model runs as if there were no probe.
        with contextlib.ExitStack() as stack:
            stack.enter_context(capture.hooks())
            stack.enter_context(capture.listening(into.padding))
            if self._attending:
                stack.enter_context(listener.hooks())
            yield
        into.ends = {want.place: capture.tensors.pop(want.place) for want in ends if want.place in capture.tensors}
        into.tensors, into.heard = capture.take(), listener.found
        into.errors, into.low_precision = capture.errors, capture.low_precision
        into.unheard = listener.failed

    def _finish(self, done: Pass, step: int) -> None:
        sums, error = None, done.error
        if done.errors and (not self._in_training or not done.tensors):  # otherwise, some places are better than none
            error = error or next(iter(done.errors.values()))
        if error is None:
            try:
                sums = self._measure(done)
            except Exception as raised:
                error = raised
        if self._reduces():
            # A process that failed contributes empty sums; otherwise the others would wait for it.
            sums = (sums or Sums.measure(self._places, {}, {})).over_ranks()
        if error is not None:
            if not self._in_training:
                raise error
            warnings.warn(f"the probe could not measure step {step}, training goes on: {error!r}", stacklevel=2)
        if sums is None:
            return
        self._tell(done, sums, failed=error is not None)
        try:
            self._findings.add(sums, step, write=self._writes())
        except OSError as problem:
            if not self._in_training:
                raise
            warnings.warn(f"the probe's rows could not be written, training goes on: {problem}", stacklevel=2)

    def _tell(self, done: Pass, sums: Sums, *, failed: bool) -> None:
        """Note what the reader must know about this pass; RuntimeError if it reached no place at all."""
        missed = [want.place for want, seen in zip(self._wanted, sums.seen(), strict=True) if not seen]
        if len(missed) == len(self._wanted) and not failed and not done.errors and not self._findings:
            raise RuntimeError(
                f"none of the {len(missed)} places of the probe was reached in a forward pass of "
                f"{type(self.model).__name__}, e.g. {missed[0].site} of {missed[0].block}: the blocks were not called "
                "as modules, or they belong to another model than the one that runs"
            )
        for remark in done.remarks(missed, failed=failed):
            self._note(remark, warn=True)

    def _measure(self, done: Pass) -> Sums:
        if any(tensor.is_meta for tensor in done.tensors.values()):
            raise ValueError("the model is on the meta device, where tensors hold no numbers; load its weights first")
        shapes = {(tensor.shape[1], tensor.shape[2]) for place, tensor in done.tensors.items() if place.index >= 0}
        self.shape = shapes.pop() if len(shapes) == 1 else None
        return Sums.measure(
            self._places,
            done.tensors,
            done.heard,
            valid=done.padding.of,
            rank_samples=self.rank_samples,
            spectrum=self.spectrum,
            low_precision=done.low_precision,
            near_unit=self._near_unit_shares(done),
        )

    def _near_unit_shares(self, done: Pass) -> dict[str, tuple[float, int]]:
        """Return block → (share, number of samples). A block that changes the shape has no such map."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for place, x in done.ends.items():
            y = done.ends.get(place._replace(site=ENDS[1])) if place.site == ENDS[0] else None
            if y is None or x.shape != y.shape:
                continue
            valid = done.padding.of(place.block)
            if valid is not None and valid.shape[1] == x.shape[1] and len(valid) in (1, len(x)):
                kept = valid.expand(len(x), -1).to(x.device)
                x, y = x[kept], y[kept]
            found[place.block] = x, y
        shares = near_unit_shares(list(found.values()))
        return {block: (share, done.samples) for block, share in zip(found, shares, strict=True)}

    @property
    def _places(self) -> list[Place]:
        return [want.place for want in self._wanted]

    def _agree(self, answer: bool) -> bool:
        """Return the first process's answer on all; needed for sharded weights too, which all gather together."""
        if not self._reduces() and not is_sharded(self.model):
            return answer
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        told = torch.tensor([int(answer)], device=device)
        dist.broadcast(told, src=0)
        return bool(told.item())

    def _reduces(self) -> bool:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return together if self.reduce is None else self.reduce and together

    def _writes(self) -> bool:
        """Whether this process writes the file."""
        return not (self._reduces() and dist.get_rank() > 0)

    def _valid_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        mask = argument(unwrap(self.model), "attention_mask", args, kwargs)
        if isinstance(mask, Tensor) and mask.ndim == 2:  # Hugging Face's: 1 for a token that counts
            return mask[: self.max_samples].bool()
        if isinstance(mask, Tensor):
            shape = tuple(mask.shape)
            self._note(f"an attention mask of shape {shape} does not tell padding apart: every token was measured")
        return None

    def _note(self, text: str, *, warn: bool = False) -> None:
        if text not in self.notes:
            self.notes.append(text)
            if warn:
                warnings.warn(f"probe: {text}", stacklevel=2)


def _as_call(samples: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `samples` as (args, kwargs); ValueError if there is nothing to measure in them."""
    call = (), {}
    if isinstance(samples, Mapping):
        call = (), dict(samples)
    elif isinstance(samples, tuple | list | Tensor):
        call = (samples,) if isinstance(samples, Tensor) else tuple(samples), {}
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(call)) or batch_size(*call) == 0:
        raise ValueError(
            "samples= is what the model is called with: a tensor, a tuple of arguments or a dict of them by name, "
            f"with at least one sample, got {type(samples).__name__}"
        )
    return call


class Pace:
    """Decide when to measure: every so many steps, or as often as 1 % of the time allows ("auto"), and at the `last`.

        if pace.due(step):
            with pace.timed(device):
                …                           # the measurement
            pace.measured(step)

    For "auto" the time since the last measurement is checked only 1, 2, 4, 8, … steps after it: all processes must give
    the same answer, and so they rarely need to communicate. The first measurement costs more than the others (kernels
    are compiled) and so does not count: the second is due when training has taken as long as the first did.

    `agree` turns a process's answer into the one that all processes give. ValueError for an invalid `every`.
    """

    def __init__(self, every: int | Literal["auto"], *, last: int | None = None, agree: Callable[[bool], bool] = bool):
        if every != "auto" and (not isinstance(every, int) or every < 1):
            raise ValueError(f'every must be a whole number from 1 on, or "auto", got {every!r}')
        self.every = every
        self.last: int | None = last
        self.agree: Callable[[bool], bool] = agree
        self.cost: float = 0.0
        """Seconds taken by the last measurement."""
        self._timing, self._measurements = 0.0, 0
        self._step, self._ended, self._look = 0, 0.0, 1
        self._answer: tuple[int, bool] | None = None  # one answer per step, however often it is asked

    def due(self, step: int) -> bool:
        if step == self.last:
            return True
        if isinstance(self.every, int):
            return step % self.every == 0
        if self._answer is None or self._answer[0] != step:
            self._answer = step, self._is_due(step)
        return self._answer[1]

    def _is_due(self, step: int) -> bool:
        since = step - self._step
        if self._measurements == 0 or since < 0:  # since < 0: training went back to an earlier state
            return True
        if since < self._look:
            return False
        while self._look <= since:
            self._look *= 2
        rest = 1.0 if self._measurements == 1 else 1 / SHARE - 1
        return self.agree(time.perf_counter() - self._ended >= rest * self.cost)

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the time spent inside this context as that of a measurement, or of a part of one."""
        if self.every != "auto":
            yield
        elif device.type == "cuda":  # events, so that work queued before does not count
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                yield
            finally:  # a failed measurement takes time, too
                end.record()
                end.synchronize()
                self._timing += start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            try:
                yield
            finally:
                self._timing += time.perf_counter() - began

    def measured(self, step: int) -> None:
        self.cost, self._timing = self._timing, 0.0
        self._step, self._ended, self._look = step, time.perf_counter(), 1
        self._measurements += 1
