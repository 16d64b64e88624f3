"""A callback for Hugging Face's Trainer that measures the model while it trains.

    from wellcond.probe.transformers import ProbeCallback
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(ProbeCallback(every=100, trainer=trainer))
    trainer.train()                     # probe.jsonl in args.output_dir, log κ in the Trainer's logs

A step is an optimiser step (`state.global_step`); with gradient accumulation the first of its batches is measured.
`trainer=` is optional. Without it the numbers go into `state.log_history` and the file but not to trackers, which a
callback cannot reach, and torch.compile and DataParallel are refused, since callbacks only see the model inside.
"""

import os
from pathlib import Path
from typing import Any, Literal

from torch import nn

from wellcond.probe.steps import StepProbe, check_settings, summary
from wellcond.records import PROBE

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError:
    raise ImportError(
        "wellcond.probe.transformers needs transformers and accelerate: pip install 'wellcond[hf]'"
    ) from None

__all__ = ["ProbeCallback"]


class ProbeCallback(TrainerCallback):
    """Measure every `every`-th optimiser step of `trainer.train`; evaluation passes are left alone.

    Args:
        every: measure at steps 0, every, 2·every, … and at the last one; "auto" measures as often as 1 % of the
            training time allows.
        path: the JSON Lines file for the rows; by default `probe.jsonl` in `args.output_dir`.
        trainer: the Trainer that the callback is added to: needed with `torch_compile` and DataParallel, and to reach
            its trackers.
        settings: further arguments of `wellcond.Probe`: sites, blocks, max_samples, exact, samples, spectrum, …

    `callback.probe` holds the last measurement (`callback.probe.table()`); `callback.path` is the file of all rows.
    """

    def __init__(
        self,
        every: int | Literal["auto"] = 100,
        path: str | Path | None = None,
        *,
        trainer: Trainer | None = None,
        **settings: Any,
    ):
        check_settings(settings, every)
        self.every: int | Literal["auto"] = every
        self.trainer: Trainer | None = trainer
        self.settings: dict[str, Any] = settings
        self.path = None if path is None else Path(path)
        self.probe: StepProbe | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self._detach()  # an earlier training may have failed
        if self.trainer is None and (what := _wrapped_in(args)):
            raise ValueError(
                f"the Trainer puts the model into {what} and shows callbacks the inner one, which is never called. "
                "Give the probe the Trainer: trainer.add_callback(ProbeCallback(…, trainer=trainer))"
            )
        called = model if self.trainer is None else self.trainer.model_wrapped
        assert called is not None
        if self.path is None:
            self.path = Path(args.output_dir or ".") / PROBE
        last = state.max_steps - 1 if state.max_steps > 0 else None
        self.probe = StepProbe(called, every=self.every, **{"last": last, **self.settings})
        if state.is_world_process_zero:
            self.probe.to(self.path)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.probe is not None
        self.probe.begin(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.probe is not None
        try:
            measured = self.probe.end()
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}. ProbeCallback(…, trainer=trainer) takes the Trainer's outermost one"
            ) from None
        if not measured:
            return
        found = summary(self.probe.rows())
        if self.trainer is not None:
            self.trainer.log(found)
        else:
            epoch = {} if state.epoch is None else {"epoch": state.epoch}
            state.log_history.append({**found, **epoch, "step": state.global_step})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.probe is not None:
            self.probe.detach()


def _wrapped_in(args: TrainingArguments) -> str | None:
    """Return what hides the model that is called, as far as the settings tell; FSDP and DDP do call the one inside."""
    launched = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in ("", "no")
    if args.torch_compile or launched:
        return "torch.compile"
    return "DataParallel" if args.n_gpu > 1 else None
