"""The states of a run: saved, found again, and gone back to when the training is lost.

states = States(config, folder, here, parts, watch, progress)
step = states.restore()             # 0 where there is none
states.save(step)                   # raises Lost instead of saving what is no longer finite
step = states.go_back(problem)      # the last good state with a smaller step, or None
"""

import math
import warnings
from typing import Any

from wellcond.train.checkpoint import SavedState, latest, save
from wellcond.train.config import Config
from wellcond.train.divergence import Divergence, Lost, Watch
from wellcond.train.folder import RunFolder
from wellcond.train.processes import Processes
from wellcond.train.progress import Progress
from wellcond.train.setup import Parts

__all__ = ["States"]

ROLLBACKS = 3
SMALLER = 0.5  # the learning rate, with each of them


class States:
    def __init__(
        self, config: Config, folder: RunFolder, here: Processes, parts: Parts, watch: Watch, progress: Progress
    ):
        self.config, self.folder, self.here, self.parts = config, folder, here, parts
        self.watch, self.progress = watch, progress
        self.counters: dict[str, Any] = {"best": -math.inf, "rollbacks": 0, "lr_factor": 1.0}
        """What is saved beside weights and optimiser: the best metric, and what going back has changed."""
        self.saved_step = -1

    def judge(self, step: int) -> None:
        """Raises Lost, in all processes, where the losses of one of them say so."""
        problem = self.watch.judge()
        if self.here.any(problem is not None):
            raise Lost(problem or Divergence(step=step, why="another process saw it"))

    def save(self, step: int, *, must: bool = False) -> None:
        """Save the state after `step`, a good one; where there is no room training goes on, unless it `must`."""
        if step == self.saved_step:
            return
        self.judge(step)
        counters = {**self.counters, "watch": self.watch.state_dict(), "worst": self.progress.worst}
        state = self.parts.saved(step, counters)
        broken = next((name for name, tensor in state.model.items() if not tensor.isfinite().all()), None)
        if self.here.any(broken is not None):
            raise Lost(Divergence(step=step, why=f"the weights {broken or ''} are no longer finite"))
        failed = None
        if self.here.is_main:
            try:
                self.folder.flush()  # the rows first: a state that is there has its rows
                save(self.folder.checkpoints, state, keep=self.config.keep)
            except OSError as error:
                before = f". That of step {self.saved_step} is still there" if self.saved_step >= 0 else ""
                failed = f"the state of step {step} could not be saved: {error}{before}"
        if not self.here.any(failed is not None):
            self.saved_step = step
        elif must:
            raise OSError(f"{failed or 'the main process could not save the state'}; make room, and start again")
        elif failed:
            warnings.warn(f"{failed}; training goes on", stacklevel=2)

    def restore(self) -> int:
        """Load the newest state; its step, or 0."""
        state = latest(self.folder.checkpoints)
        step = 0 if state is None else state.step
        if self.here.any(step != self.here.of_main(step)):
            raise ValueError(
                f"the processes find different states in {self.folder.path}: they need to see the same folder, on a "
                "file system that all machines share"
            )
        if state is None:
            self._begin()
        else:
            self._load(state)
            self.folder.forget_after(step)
        self._tell(begins=state is None)
        # A state was saved before the training was lost that led back to it, and does not know of that.
        self._roll(self.here.of_main(max(self.counters["rollbacks"], len(self.folder.rollbacks()))))
        return step

    def go_back(self, problem: Divergence) -> int | None:
        """To the last good state, with half the learning rate of the time before; its step.

        None where that is not asked for, or was tried often enough.
        """
        rolls = self.counters["rollbacks"] + 1
        allowed = self.config.on_divergence == "rollback" and rolls <= ROLLBACKS
        good = latest(self.folder.checkpoints) if allowed else None
        if good is None:
            return None
        self._load(good)
        self._roll(rolls)
        factor = self.counters["lr_factor"]
        try:  # first of all: whoever goes on after a kill is not to make the same mistake again
            self.folder.rolled_back({"step": problem.step, "why": problem.why, "to": good.step, "lr_factor": factor})
        except OSError as error:
            warnings.warn(f"rollback {rolls} could not be noted, and would not survive a kill: {error}", stacklevel=2)
        self.folder.forget_after(good.step)
        what = f"back to step {good.step} with lr × {factor:g}, rollback {rolls} of {ROLLBACKS}"
        self.folder.log({"step": problem.step, "split": "event", "event": what})
        if self.here.is_main:
            warnings.warn(f"diverged at step {problem.step} ({problem.why}); {what}", stacklevel=2)
        return good.step

    def keep_lost(self, step: int) -> None:
        """The weights as they are now, for who wants to look, where no run goes on from them: `diverged/`."""
        state = self.parts.saved(step, self.counters)
        if self.here.is_main:
            try:
                save(self.folder.path / "diverged", state, keep=1)
            except OSError as error:
                warnings.warn(f"the diverged weights could not be saved: {error}", stacklevel=2)

    def _begin(self) -> None:
        """There is no state: rows that are there are of a run whose states are gone, or that never saved one."""
        kept = self.folder.put_aside()
        if kept:
            warnings.warn(
                f"{self.folder.checkpoints} has no saved state to go on from: the run starts again from step 0. What "
                f"it had written is kept in {' and '.join(path.name for path in kept)}",
                stacklevel=3,
            )

    def _tell(self, *, begins: bool) -> None:
        """What is to be known of the model: said each time, and in the run's rows once."""
        for note in self.parts.notes if self.here.is_main else ():
            warnings.warn(note, RuntimeWarning, stacklevel=3)
            if begins:
                self.folder.log({"step": 0, "split": "event", "event": note})

    def _roll(self, rolls: int) -> None:
        self.counters |= {"rollbacks": rolls, "lr_factor": SMALLER**rolls}

    def _load(self, state: SavedState) -> None:
        self.parts.restore(state)
        counters = dict(state.counters)
        self.progress.worst = counters.pop("worst")
        self.watch.load_state_dict(counters.pop("watch"))
        self.counters.update(counters)
        self.saved_step = state.step
