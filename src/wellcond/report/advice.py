"""Advice about a block: small rules, each a function from what was measured to one sentence, or None.

    state = BlockState.of(readings, step, position=3)
    advise(state)                  # sentences, most urgent first; empty if nothing is wrong
    advise_run(readings, step, events=run.events, config=run.config)     # about the whole run, said only once

The thresholds are rules of thumb, named and explained below. A paper's claim is presented as its claim, with our own
verdict if there is one. Nothing here has been tried on the reader's model, so the sentences say "may".
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from wellcond.records import Event
from wellcond.words import BRANCH_SITES

from .markup import format_number
from .readings import HALF, Cell, Readings, badness, bounded
from .reference import verdict_on

__all__ = [
    "DIVERGED",
    "BlockState",
    "Failure",
    "HIGH",
    "LARGE_LOGIT",
    "LOW_ENTROPY",
    "SAME",
    "SKIP_GAIN",
    "advise",
    "advise_run",
    "first_failure",
]

HIGH = 10.0
"""A log κ worth acting on: κ = 22,000, which leaves the weakest direction less than three of float32's seven digits.
In trained vision transformers we saw about 6 after the adds, and about 12 at `sa`, where the skip makes up for it."""

SKIP_GAIN = 1.0
"""A working skip lowers log κ by several units; one that lowers it by less than this does nothing, or is missing."""

SAME = 0.01
"""Differences up to this count as none. Without its skip the stream is the branch, and both give the same number."""

LARGE_LOGIT = 50.0
"""exp(−50) = 2e-22 vanishes beside 1 even in float64: a logit this far below the largest gets no gradient."""

LOW_ENTROPY = 0.3
"""In nats: exp(0.3) = 1.35, so the average query attends to little more than one token."""

DIVERGED = "diverged"
"""How the event of a divergence begins."""

ADDS = {site: f"+{site}" for site in BRANCH_SITES}


class Failure(NamedTuple):
    """Where the first non-finite number of a run was seen."""

    step: int
    block: str
    site: str
    before: int | None = None
    """The step that was measured before it, if there is one."""
    at_once: bool = False
    """Whether it was at the first site measured: then nothing shows that it began in that block."""

    @property
    def when(self) -> str:
        return f"at step {self.step:,}" if self.before is None else f"between steps {self.before:,} and {self.step:,}"

    @property
    def where(self) -> str:
        return f"{self.site} of {self.block}" if self.block else self.site


@dataclass(frozen=True, kw_only=True)
class BlockState:
    """What was measured in one block at one step, as far as the rules need it."""

    block: str
    cells: Mapping[str, Cell]
    """log κ by site, for the measured sites."""
    capped: Mapping[str, float]
    entering: float
    """log κ of the block's input: its `in`, else `+mlp` of the previous block (`embed` for the first), else NaN."""
    entropy: float
    logit: float
    began: Failure | None = None
    """Where the first non-finite number of the run was seen."""

    @classmethod
    def of(cls, readings: Readings, step: int, position: int, began: Failure | None = None) -> "BlockState":
        """Return the state of the block at `position` in model order; `began` is the result of `first_failure`."""
        block = readings.blocks[position].name
        cells = {site: cell for site in readings.sites if (cell := readings.log_kappa(step, block, site))}
        capped = {site: number for site in cells if (number := readings.value("capped", step, block, site)) > 0}
        entering = cells["in"].value if "in" in cells else math.nan
        if math.isnan(entering) and position:
            entering = readings.value("log_kappa", step, readings.blocks[position - 1].name, "+mlp")
        elif math.isnan(entering):
            entering = readings.value("log_kappa", step, "", "embed")
        return cls(
            block=block,
            cells=cells,
            capped=capped,
            entering=entering,
            entropy=readings.value("attention_entropy", step, block, "sa"),
            logit=readings.value("largest_logit", step, block, "sa"),
            began=began,
        )

    def value(self, site: str) -> float:
        """Return log κ at a site; NaN, which no rule takes for large, if there is none."""
        return self.cells[site].value if site in self.cells else math.nan

    def lower_bound(self, site: str) -> bool:
        """Whether log κ at a site is only a lower bound, because some samples are at the ceiling."""
        return bool(self.capped.get(site)) or (site in self.cells and self.cells[site].status == "ceiling")

    @property
    def after_attention(self) -> float:
        """log κ after attention's add; a parallel block has a single add for both branches."""
        return self.value("+sa") if "+sa" in self.cells else self.value("+mlp")

    @property
    def worst_site(self) -> str:
        """The site with the largest log κ, as `badness` ranks them: a non-finite one is worst."""
        return max(self.cells, key=lambda site: badness(self.cells[site], self.capped.get(site, 0)), default="")

    @property
    def worst(self) -> float:
        return self.value(self.worst_site)

    @property
    def rank(self) -> tuple[bool, float]:
        """The `badness` of the worst site; less than that of any number without a site."""
        site = self.worst_site
        return badness(self.cells[site], self.capped.get(site, 0)) if site else (False, -math.inf)


def advise(state: BlockState) -> list[str]:
    """Return a sentence per rule that applies, most urgent first. With NaN only that one: the rest is unreliable."""
    broken = non_finite(state)
    return [broken] if broken else [sentence for rule in RULES if (sentence := rule(state))]


def non_finite(state: BlockState) -> str | None:
    if not any(cell.status == "non_finite" or math.isinf(cell.value) for cell in state.cells.values()):
        return None
    if not state.began:
        return "Some values are NaN or infinite: find where they come from before reading anything else here."
    began = state.began
    if began.at_once:
        return f"Some values are NaN or infinite, from {began.where} on: look at the weights and the input first."
    if began.block == state.block:
        return f"NaN or infinity was first seen here {began.when}, at {began.site}: look at the steps just before it."
    return f"Some values are NaN or infinite, first seen at {began.where}: look there first."


def all_zero(state: BlockState) -> str | None:
    sites = [site for site, cell in state.cells.items() if cell.status == "zero"]
    if not sites:
        return None
    return (
        f"The tokens at {' and '.join(sites)} are all zero: the branch is dead. Check its LayerScale and the "
        "weights of its last layer, especially if a skip was removed."
    )


def skip_does_not_help(state: BlockState) -> str | None:
    for site, add in ADDS.items():
        before, after = state.value(site), state.value(add)
        unseen = state.lower_bound(site), state.lower_bound(add)
        if unseen == (True, False):  # κ came back below the ceiling, by an unknown amount
            continue
        alike = abs(after - before) <= SAME
        if before >= HIGH and after >= HIGH and after > before - SKIP_GAIN and (alike or not state.entering >= HIGH):
            name = "attention" if site == "sa" else "MLP"
            if all(unseen):
                what = f"κ is beyond the ceiling both before and after the {name}'s add"
            else:
                what = f"κ hardly drops, or even rises, at the {name}'s add"
            return (
                f"{what}: if the skip was removed, restore it (wellcond.restore_skip; {verdict_on('restore_skip')}); "
                "otherwise the branch outweighs it."
            )
    return None


def tokens_come_in_badly(state: BlockState) -> str | None:
    if not (state.entering >= HIGH and (state.after_attention >= HIGH or math.isnan(state.after_attention))):
        return None
    return (
        "The block's input is already ill-conditioned: look at the blocks before it. Graying the tokens "
        f"(wellcond.gray) may help too, as Always Skip Attention reports for trained ViTs ({verdict_on('gray')})."
    )


def attention_makes_it_worse(state: BlockState) -> str | None:
    before, after = state.value("sa"), state.after_attention
    if before >= HIGH and HIGH <= after <= before - SKIP_GAIN and not state.entering >= HIGH:
        add = "+sa" if "+sa" in state.cells else "+mlp"
        left = bounded(after, state.lower_bound(add))
        return (
            f"Attention's output has log κ {bounded(before, state.lower_bound('sa'))}, and {left} remains after the "
            "add: another attention (wellcond.replace_attention) may help. Skyformer claims this for its kernel "
            f"({verdict_on('replace_attention')})."
        )
    return None


def logits_are_large(state: BlockState) -> str | None:
    if not state.logit >= LARGE_LOGIT:
        return None
    return (
        f"The largest attention logit is {format_number(state.logit)}: at this size, softmax tends to put all its "
        "weight on one token. QK-norm bounds the logits (timm: qk_norm=True, for a new training run)."
    )


def attention_has_collapsed(state: BlockState) -> str | None:
    if not state.entropy <= LOW_ENTROPY or state.logit >= LARGE_LOGIT:  # with large logits, that rule has said it
        return None
    return (
        f"Attention entropy is {state.entropy:.2f} nats: the average query attends to little more than one token. If "
        "that is not intended, QK-norm or a lower learning rate may help."
    )


def beyond_the_ceiling(state: BlockState) -> str | None:
    """Checked only after an add: a branch's output at the ceiling is common, and the skip makes up for it."""
    sites = [site for site in ADDS.values() if state.lower_bound(site)]
    if not sites:
        return None
    site = max(sites, key=lambda name: state.capped.get(name, 0))
    cell = state.cells[site]
    share = f"{state.capped[site]:,.0f} of {cell.samples:,} samples" if state.capped.get(site) else "some samples"
    more = "" if cell.dtype == "float64" else " Measuring in float64 would show more."
    return f"At {site}, κ of {share} is beyond what {cell.dtype} can resolve: the number is a lower bound.{more}"


RULES: tuple[Callable[[BlockState], str | None], ...] = (
    all_zero,
    skip_does_not_help,
    tokens_come_in_badly,
    attention_makes_it_worse,
    logits_are_large,
    attention_has_collapsed,
    beyond_the_ceiling,
)


def advise_run(
    readings: Readings | None, step: int = 0, *, events: Iterable[Event] = (), config: Mapping[str, Any] | None = None
) -> list[str]:
    """Return sentences about the whole run: divergence, where NaN began, low precision, ill-conditioned raw tokens.

    Args:
        readings: what was measured; None if the run had no probe.
        events: what happened in training.
        config: its settings; empty if they are not known.
    """
    config = config or {}
    said = [text] if (text := diverged(events, config)) else []
    if readings is None:
        return said
    failure = first_failure(readings)
    if failure and failure.at_once:
        said.append(
            f"NaN or infinity first appeared {failure.when}, at the first site measured, {failure.where}. It may have "
            "come from before that site: look at the weights and the input rather than at that block."
        )
    elif failure:
        said.append(
            f"NaN or infinity first appeared {failure.when}, at {failure.where}. Whatever comes later, in the model or "
            "in training, may just be a consequence."
        )
    cells = [cell for place in readings.places if (cell := readings.log_kappa(step, *place))]
    low = [cell for cell in cells if cell.status == "low_precision" or cell.dtype in HALF]
    if low:
        many = "All" if len(low) == len(cells) else "Some"
        # Of the computation, not of the tensor: under autocast a sum of both precisions is float32.
        computed = sorted({cell.dtype for cell in low if cell.dtype in HALF})
        computed = computed or [text for text in [config.get("amp_dtype")] if text in HALF]
        named = f" ({', '.join(computed)})" if computed else ""
        said.append(
            f"{many} numbers come from a forward pass in low precision{named}, which can hide a large κ or produce a "
            "false one. Probe(model), without exact=False, measures in a separate float32 pass, as does wellcond "
            "train without probe_exact=no."
        )
    tokens = readings.value("log_kappa", step, "", "tokens")
    if tokens >= HIGH:
        bound = readings.lower_bound(step, "", "tokens")
        said.append(
            f"The raw tokens have log κ {bounded(tokens, bound)}. Graying (wellcond.gray) lowers it, SVD graying with "
            f"ε = 0.95 to {bounded(0.95 * tokens, bound)}. Whether that helps training, only a trial can tell "
            f"({verdict_on('gray')})."
        )
    return said


def diverged(events: Iterable[Event], config: Mapping[str, Any]) -> str | None:
    """A smaller lr comes first: most runs that diverge are too hot, whatever κ became on the way."""
    steps = [event.step for event in events if event.event.startswith(DIVERGED)]
    if not steps:
        return None
    lr = config.get("lr")
    smaller = f"a smaller lr than {lr:g}" if isinstance(lr, int | float) else "a smaller learning rate"
    clipped = config.get("clip_grad") or config.get("clip_value")
    times = f" {len(steps)} times" if len(steps) > 1 else ""
    return f"Training diverged{times}: {smaller}{'' if clipped else ', or clip_grad=1,'} may help."


def first_failure(readings: Readings) -> Failure | None:
    """Return the first non-finite measurement: first in time, then in forward order."""
    for position, step in enumerate(readings.steps):
        cells = [(place, cell) for place in readings.places if (cell := readings.log_kappa(step, *place))]
        for number, ((block, site), cell) in enumerate(cells):
            if cell.status == "non_finite":
                before = readings.steps[position - 1] if position else None
                return Failure(step, block, site, before, at_once=number == 0)
    return None
