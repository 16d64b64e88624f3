"""The states of a run: saving, restoring, and going back to one when the training diverges.

states = States(config, folder, here, parts, watch, progress)
step = states.restore()             # 0 if there is none
states.save(step)                   # raises Lost instead of saving weights that are no longer finite
states.finish()                     # waits for the state that is being written in the background
step = states.go_back(problem)      # to a good state, with a smaller learning rate; its step, or None
"""

import math
import secrets
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from wellcond.data.sources import same_kind
from wellcond.records import Event
from wellcond.train.checkpoint import (
    SavedState,
    aside_name,
    discard,
    make_aside,
    read,
    save,
    save_sharded,
    saved_steps,
    state_path,
    whole_states,
)
from wellcond.train.config import Config
from wellcond.train.divergence import Divergence, Lost, Watch
from wellcond.train.folder import RunFolder, fixed_settings
from wellcond.train.processes import Processes
from wellcond.train.progress import Progress
from wellcond.train.setup import Parts
from wellcond.train.shards import Shards, gathered

__all__ = ["States"]

ROLLBACKS = 3
SMALLER = 0.5  # factor on the learning rate, per rollback
PATIENCE = 120.0  # seconds to wait for a state in the background if the run has failed: other processes may be gone


class States:
    def __init__(
        self, config: Config, folder: RunFolder, here: Processes, parts: Parts, watch: Watch, progress: Progress
    ):
        self.config: Config = config
        self.folder: RunFolder = folder
        self.here: Processes = here
        self.parts: Parts = parts
        self.watch: Watch = watch
        self.progress: Progress = progress
        self.counters: dict[str, Any] = {"best": -math.inf, "rollbacks": 0, "lr_factor": 1.0}
        """What is saved besides weights and optimiser: the best metric, and what rollbacks have changed."""
        self.saved_step = self._writing = -1
        """The step of the last saved state, and of the one that is being written; -1 for none."""
        sharded = config.save_format == "sharded" or (config.save_format == "auto" and config.shard)
        self.shards: Shards | None = Shards(here) if sharded else None

    @property
    def best(self) -> int | None:
        """The step whose state is kept because its validation is the best; None for none."""
        step = self.counters.get("best_step")
        late = step is not None and step > self.config.keep_best_after * self.progress.total
        return step if self.config.keep_best and (late or not self.config.keep_best_after) else None

    def judge(self, step: int) -> None:
        """Raise Lost in all processes if the losses of any of them have diverged."""
        problem = self.watch.judge(self.here.mean, at_end=step == self.progress.total)
        for bad in self.watch.untold:
            self.folder.log(Event(step=bad, event="left out: its gradient was not finite"))
        self.watch.untold.clear()
        if self.here.any(problem is not None):
            raise Lost(problem or Divergence(step=step, why="another process saw it"))

    def save(self, step: int, *, must: bool = False) -> None:
        """Save the state after `step`, or raise Lost if it is not good. A full disk raises OSError only with `must`.

        A sharded state is written while training goes on; the next one waits for it, and so does a call with `must`.
        """
        self.finish(must=must and step == self._writing)
        if step == self.saved_step:
            return
        self.judge(step)
        counters = {**self.counters, "watch": self.watch.state_dict(), "worst": self.progress.worst}
        settings = fixed_settings(self.config.as_json())
        state = self.parts.saved(step, counters, settings, take=self.shards.copied if self.shards else gathered)
        broken = next((name for name, tensor in state.model.items() if not _is_finite(tensor)), None)
        if self.here.any(broken is not None):
            raise Lost(Divergence(step=step, why=f"the weights {broken or ''} are no longer finite"))
        again = self.config.on_divergence == "rollback"
        how: dict[str, Any] = {"keep": self._keep, "keep_old": again, "sound": self.watch.sound, "best": self.best}
        problem = None
        if self.shards is not None:
            problem = self._start(state, step in (self.progress.total, how["best"]), how)
        elif self.here.is_main:
            try:
                self.folder.flush(sync=True)  # the rows first: a state that exists has its rows
                save(self.folder.checkpoints, state, **how)
            except OSError as error:
                problem = str(error)
        self._written(step, problem, must=must)
        if must:
            self.finish(must=True)

    def _start(self, state: SavedState, whole: bool, how: dict[str, Any]) -> str | None:
        """Start writing the processes' parts of `state`, with `whole` also whole weights; return what fails."""
        shards, folder, weights, problem = self.shards, self.folder.checkpoints, None, None
        assert shards is not None
        if whole:
            weights = state
            if self.parts.sharded:
                model = {name: gathered(tensor) for name, tensor in self.parts.model.state_dict().items()}
                weights = SavedState(step=state.step, model=model, optimizer={}, metadata=state.metadata)
        token = f"{self.here.of_main(secrets.randbits(31)):08x}"
        aside = folder / aside_name(state.step, token)
        if self.here.is_main:
            try:
                self.folder.flush(sync=True)
                make_aside(folder, state.step, token)
            except OSError as error:
                problem = str(error)
        if not self.here.any(problem is not None):
            self._writing = state.step
            shards.start(lambda: save_sharded(folder, aside, state, shards, weights=weights, **how))
        return problem

    def finish(self, *, must: bool = False) -> None:
        """Wait for the state that is being written, if there is one."""
        if self.shards is not None and self._writing >= 0:
            step, problem = self._writing, self.shards.wait()
            self._writing = -1
            self._written(step, problem, must=must)

    def close(self) -> None:
        """Give a state that is being written time to complete. Called when the run ends, for whatever reason."""
        if self.shards is not None:
            self.shards.wait(PATIENCE)

    def _written(self, step: int, problem: str | None, *, must: bool) -> None:
        """Record that the state of `step` has been saved, unless it is still being written, or say why it was not."""
        if not self.here.any(problem is not None):
            self.saved_step: int = step if self._writing < 0 else self.saved_step
            return
        before = f". That of step {self.saved_step} is still there" if self.saved_step >= 0 else ""
        failed = f"the state of step {step} could not be saved: {problem}{before}"
        if must:
            raise OSError(
                f"{failed if problem else 'the main process could not save the state'}; make room, and start again"
            )
        if problem and self.here.is_main:
            warnings.warn(f"{failed}; training goes on", stacklevel=3)

    @property
    def _keep(self) -> int:
        """The number of states to keep. While steps are skipped, perhaps for bad weights, no earlier one is removed."""
        return self.config.keep + self.watch.in_a_row

    def restore(self) -> int:
        """Load the newest state of this run; return its step, or 0."""
        state, foreign = self._newest()
        step = 0 if state is None else state.step
        if state is None and foreign:
            path, why = foreign[-1]
            raise ValueError(
                f"{path} is not of this run: {why}. Put the run's own state there, or move it away to start again"
            )
        for path, why in foreign if self.here.is_main else ():
            kept = path.rename(path.with_name(f"other-{path.name}"))
            warnings.warn(
                f"{path} is not of this run: {why}; it is called {kept.name} now. Going back to the state before, of "
                f"step {step}",
                stacklevel=2,
            )
        if state is None:
            self._begin()
        else:
            self._load(state)
            self.folder.forget_after(step)
        self._tell(begins=state is None)
        # A state was saved before the divergence that led back to it, so it does not count that rollback.
        self._roll(self.here.of_main(max(self.counters["rollbacks"], len(self.folder.rollbacks()))))
        return step

    def _newest(self) -> tuple[SavedState | None, list[tuple[Path, str]]]:
        """Return the newest state of this run, and why newer ones that are intact are not of this run."""
        back = self.folder.rollbacks()[-1:]
        foreign: list[tuple[Path, str]] = []
        seen = hash(tuple(saved_steps(self.folder.checkpoints))) >> 1
        if self.here.any(seen != self.here.of_main(seen)):
            raise ValueError(
                f"the processes find different states in {self.folder.path}: they need to see the same folder, on a "
                "file system that all machines share"
            )
        part = (self.here.rank, self.here.world)
        for state in whole_states(self.folder.checkpoints, part=part, any_of=self.here.any):
            if back and state.step > back[0]["to"] and state.counters["rollbacks"] < back[0].get("number", 0):
                continue  # from before that rollback, which was killed before it could remove the state
            why = self._is_foreign(state)
            if why is None:
                return state, foreign
            foreign.append((state_path(self.folder.checkpoints, state.step), why))
        return None, foreign

    def _is_foreign(self, state: SavedState) -> str | None:
        mine = fixed_settings(self.config.as_json())
        differ = [name for name, value in state.config.items() if name in mine and mine[name] != value]
        if "data" in differ and same_kind(mine["data"], state.config["data"]):  # moved: the folder compares the content
            differ.remove("data")
        if differ:
            return ", ".join(f"{name} is {state.config[name]!r} there, {mine[name]!r} here" for name in differ)
        return self.parts.misfit(state)

    def go_back(self, problem: Divergence) -> int | None:
        """Go back to a good state, with half the previous learning rate; return its step.

        That is the newest one at first; if it led to the same trouble, an older one each time. Returns None if
        rollbacks are not configured or were tried often enough, or if there is no state.
        """
        self.finish()
        rolls = self.counters["rollbacks"] + 1
        if self.config.on_divergence != "rollback" or rolls > ROLLBACKS:
            return None
        step = self.here.of_main(self._good_step(problem) if self.here.is_main else -1)
        if step < 0:
            return None
        self._load(read(state_path(self.folder.checkpoints, step), fill=False))
        self._roll(rolls)
        factor = self.counters["lr_factor"]
        about = {"step": problem.step, "why": problem.why, "to": step, "lr_factor": factor, "number": rolls}
        try:  # before anything is removed: a run resumed after a kill must not repeat the mistake
            self.folder.rolled_back(about)
        except OSError as error:
            warnings.warn(f"rollback {rolls} could not be noted, and would not survive a kill: {error}", stacklevel=2)
        if self.here.is_main:
            later = [other for other in saved_steps(self.folder.checkpoints) if other > step]
            discard(self.folder.checkpoints, later)  # they led to the divergence
        self.folder.forget_after(step)
        what = f"back to step {step} with lr × {factor:g}, rollback {rolls} of {ROLLBACKS}"
        self.folder.log(Event(step=problem.step, event=what))
        if self.here.is_main:
            warnings.warn(f"diverged at step {problem.step} ({problem.why}); {what}", stacklevel=2)
        return step

    def _good_step(self, problem: Divergence) -> int:
        """Return the step of the newest good state, older than the last one gone back to if the trouble is the same.

        The first bad loss is that of the state before it, whose weights are therefore bad. If no state is good, returns
        the oldest; -1 without any state.
        """
        before = self.folder.rollbacks()[-1:]
        limit = problem.step if self.watch.bad_since is None else self.watch.bad_since - 1
        if before and problem.step - before[0]["step"] <= self.watch.patience:
            limit = min(limit, before[0]["to"])
        oldest = -1
        for state in whole_states(self.folder.checkpoints):
            oldest = state.step
            if state.step < limit and state.counters["watch"].get("sound", True):
                break
        return oldest

    def keep_lost(self, step: int) -> None:
        """Save the weights as they are now for inspection, in `diverged/`, from which no run resumes."""
        state = self.parts.saved(step, self.counters, fixed_settings(self.config.as_json()))
        if self.here.is_main:
            try:
                save(self.folder.path / "diverged", state, keep=1)
            except OSError as error:
                warnings.warn(f"the diverged weights could not be saved: {error}", stacklevel=2)

    def _begin(self) -> None:
        """Start without a state: set aside existing rows, from a run whose states are gone or that never saved one."""
        if self.config.checkpoint and not Path(self.config.checkpoint).exists():
            raise ValueError(f"there is no checkpoint {self.config.checkpoint} to start again from; put it back")
        kept = self.folder.put_aside()
        if kept:
            warnings.warn(
                f"{self.folder.checkpoints} has no saved state to go on from: the run starts again from step 0. What "
                f"it had written is kept in {' and '.join(path.name for path in kept)}",
                stacklevel=3,
            )

    def _tell(self, *, begins: bool) -> None:
        """Warn of what the user should know about the model, each time; log it in the run's rows only once."""
        for note in self.parts.notes if self.here.is_main else ():
            warnings.warn(note, RuntimeWarning, stacklevel=3)
            if begins:
                self.folder.log(Event(step=0, event=note))

    def _roll(self, rolls: int) -> None:
        self.counters |= {"rollbacks": rolls, "lr_factor": SMALLER**rolls}

    def _load(self, state: SavedState) -> None:
        self.parts.restore(state)
        counters = dict(state.counters)
        self.progress.worst = counters.pop("worst")
        self.watch.load_state_dict(counters.pop("watch"))
        self.counters.update(counters)
        self.saved_step = state.step
        self._forget_lost_best()

    def _forget_lost_best(self) -> None:
        """Look for a new best state if that of the best validation is gone: it was not kept before keep_best was set,
        or it gave way to a better one that a rollback has removed."""
        lost = self.best is not None and not state_path(self.folder.checkpoints, self.best).exists()
        if not self.here.any(lost):
            return
        if self.here.is_main:
            warnings.warn(
                f"the state of the best validation so far, of step {self.best}, is gone; keep_best keeps the best from "
                "here on",
                stacklevel=3,
            )
        self.counters["best"] = -math.inf
        self.counters.pop("best_step", None)


def _is_finite(tensor: Tensor) -> bool:
    mine: Any = getattr(tensor, "to_local", lambda: tensor)()
    return bool(mine.isfinite().all())
