"""A probe for other libraries' training loops: attached for one forward pass of each measured step, then detached.

    probe = StepProbe(model, every=100)            # or "auto"
    for step, batch in enumerate(batches):
        probe.begin(step)               # attaches, at steps 0, 100, 200, …
        …                               # the first forward pass is measured, then the hooks are removed
        if probe.end():                 # True if something was measured
            log(summary(probe.rows()))  # {"probe/sa/mean_log_kappa": 8.4, "probe/sa/worst_log_kappa": …}

So validation passes are not measured, nor are the later micro-batches of an optimiser step, and an exception leaves no
hooks behind, even in a loop without a callback for it. Only the rows of the last measurement are kept: in a long
training all of them would fill the memory, and they are in the file.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from wellcond.probe.probe import Pace, Probe
from wellcond.records import finite_or_inf

__all__ = ["StepProbe", "check_settings", "summary"]


class StepProbe(Probe):
    """A `Probe` whose steps a training loop begins and ends."""

    _awaited = False  # whether the pass of this step was to be measured

    def begin(self, step: int) -> None:
        """Begin the optimiser step `step`, or its next micro-batch."""
        if step != self._measured_step and self._attached is None and self.due(step):
            self.step = step
            self.attach()
            self._awaited = True

    def end(self) -> bool:
        """End the step or micro-batch; return True if its forward pass was measured.

        Raises RuntimeError if the model was not called at all in the first step that was to be measured.
        """
        awaited, self._awaited = self._awaited, False
        unseen = self._attached is not None
        self.detach()
        if unseen and self._passes == 0:
            raise RuntimeError(
                f"step {self.step} was to be measured, but {type(self.model).__name__} was not called in it: training "
                "calls another module, a wrapper around this one or a part of it"
            )
        if unseen:
            self._note(f"{type(self.model).__name__} was not called in step {self.step}", warn=True)
        return awaited and self._findings.keep(self.step)

    def detach(self) -> None:
        """Remove the hooks, without a warning: `end` reports if no forward pass was seen."""
        self._let_go()

    def _after(self, finished: bool) -> None:
        try:
            super()._after(finished)
        finally:
            if not self._busy:  # else it was the probe's own pass, and the model's is still to come
                self.detach()


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return for each site, for a logger, the mean log κ over the blocks, that of the worst block, and its index.

    The sites `+sa` and `+mlp` are written `plus_sa` and `plus_mlp`: some trackers refuse a plus sign in a name.
    """
    by_site: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["name"] == "log_kappa":
            by_site[row["site"]].append(row)
    found: dict[str, float] = {}
    for site, here in by_site.items():
        here = [row for row in here if row["status"] != "single"]
        if not here:
            continue
        # A block without a finite sample has no κ to average, but it is the worst of all.
        finite = [row["value"] for row in here if math.isfinite(row["value"])]
        worst = max(here, key=lambda row: finite_or_inf(row["value"]))
        name = f"probe/{site.replace('+', 'plus_')}"
        found[f"{name}/mean_log_kappa"] = sum(finite) / len(finite) if finite else math.nan
        found[f"{name}/worst_log_kappa"] = worst["value"]
        found[f"{name}/worst_block"] = worst["index"]
    return found


def check_settings(settings: Mapping[str, Any], every: int | Literal["auto"] = 1) -> None:
    """Reject settings unknown to `Probe` when the callback is created, rather than when training starts."""
    Pace(every)
    known = [name for name in inspect.signature(Probe).parameters if name not in ("model", "every")]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(f"a probe has no setting {', '.join(unknown)}; its settings are {', '.join(known)}")
