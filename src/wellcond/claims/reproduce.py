"""`wellcond reproduce`: run claims at a scale, skipping what is done, and write their evidence.

    reproduce("asa-fig1c", scale="smoke", seeds=2)                       # exit code: 0 done, 1 not all, 130 interrupted
    reproduce(["asa-fig1c", "asa-fig1b"], scale="lab", data_dirs=["cifar10=data/cifar10"], jobs=4)
    reproduce(whole_queue=True, scale="lab", data_dirs=[…], time_limit="9m")
    reproduce("asa-table2", scale="lab", training=False)                 # evidence from existing results only

One process runs the claims one after the other; runs that several claims share are trained once, and runs of one form
are compiled once. With several jobs, trainings of the next claims use the processes that the first claim leaves idle
while it compiles or waits for a learning rate; measurements without training, such as timings, have the device to
themselves. After an interruption or a time limit, the same call resumes: it skips finished runs, also those finished on
another machine whose results are with the evidence, and what was running resumes from its last state.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from wellcond.claims import imagenet
from wellcond.claims.arms import TrainedArms
from wellcond.claims.catalogue import CLAIMS, QUEUE, claim
from wellcond.claims.claim import Claim, Measured, Options, Statement, TableRow
from wellcond.claims.jobs import RunFailed
from wellcond.claims.runs import RESULT, Runs
from wellcond.claims.sets import GivenData, parse_data, smoke_data, unplaced, with_generated
from wellcond.records import check_writable, read_json
from wellcond.train.config import as_seconds
from wellcond.train.processes import check_device
from wellcond.train.recipes import SCALES
from wellcond.train.stopping import Interrupted, OutOfTime
from wellcond.usage import wrong_usage
from wellcond.words import meant

__all__ = ["reproduce"]

SMOKE_SEEDS, SEEDS = 2, 3


def reproduce(
    ids: str | Sequence[str] = (),
    *,
    whole_queue: bool = False,
    scale: str = "smoke",
    seeds: int | None = None,
    data_dirs: Sequence[str] = (),
    output: Path = Path("runs"),
    evidence: Path = Path("evidence"),
    settings: Sequence[str] = (),
    grid_epochs: int | None = None,
    device: str | None = None,
    jobs: int = 1,
    arms: Sequence[str] = (),
    time_limit: str | None = None,
    training: bool = True,
    console: Console | None = None,
) -> int:
    """Reproduce claims and return the exit code: 1 if some of several could not be run.

    Invalid arguments raise WrongUsage before anything is trained.

    Args:
        whole_queue: run all claims that are built, the most valuable first, instead of `ids`.
        seeds: by default two at `smoke` scale, otherwise three, and at `lab` two more for sets that are left undecided.
        data_dirs: the sets to run and where they are, `NAME=PATH` each. Generated sets need no path; they run if no set
            of their claim is named.
        settings: settings of every training, `key=value`, the same for all arms.
        jobs: how many runs to train at once, each in a process of its own if more than one.
        arms: train only these of the arms that the claims compare; of the others, finished runs are read.
        time_limit: how long this process may take from its start, such as 9m or 1h30m. What is not done then is named.
        training: False to write the evidence anew from existing results, which needs no data.
    """
    with wrong_usage():
        chosen = _chosen([ids] if isinstance(ids, str) else ids, whole_queue=whole_queue, settings=settings)
        if scale not in SCALES:
            raise ValueError(f"the scales are {', '.join(SCALES)}, not {scale!r}{meant(scale, SCALES)}")
        if data_dirs and scale != "lab":
            raise ValueError(f"--data-dir is for --scale lab: at {scale} scale nothing is trained on it; leave it out")
        if jobs < 1:
            raise ValueError(f"jobs is how many runs are trained at once, 1 or more; got {jobs}")
        if time_limit:
            _check_limit(time_limit)
        _check_arms(arms, chosen)
        check_device(device)
        check_writable(*(folder / "file" for folder in ([evidence, output] if training else [evidence])))
        if not training:
            _check_readable([] if whole_queue else chosen, scale, [evidence / "runs" / scale, output / scale])
        given = _given(data_dirs, chosen, whole_queue=whole_queue, training=training) if scale == "lab" else []
    options = Options(
        scale=scale,
        seeds=seeds or (SMOKE_SEEDS if scale == "smoke" else SEEDS),
        second_look=seeds is None and scale == "lab",
        output=output,
        evidence=evidence,
        settings=tuple(settings),
        grid_epochs=grid_epochs,
        device=device,
        console=console or Console(),
    )
    plan = _queue(options, given) if whole_queue else [(one, _data_of(one, given, scale)) for one in chosen]
    plan = sorted((step for step in plan if training or _of_runs(step[0])), key=_reads_other_runs)
    if scale == "paper":
        for one, _ in plan:
            for line in imagenet.plan(one.id, options) or one.plan_paper(options):
                options.say(line)
        return 0
    kept = None if scale == "smoke" else evidence / "runs" / scale
    runs = Runs(
        output / scale, console=options.console, device=device, jobs=jobs if training else 1, kept=kept,
        time_limit=time_limit or "", training=training, arms=arms, seeds=seeds,
    )  # fmt: skip
    return _run(plan, options, runs)


def _chosen(ids: Sequence[str], *, whole_queue: bool, settings: Sequence[str]) -> list[Claim]:
    """Return the claims with these ids, or all that can be run."""
    ids = list(dict.fromkeys(ids))
    if bool(ids) == whole_queue:
        raise ValueError("name claims, or take all that there are with --all; wellcond ledger lists them")
    built = [one for one in CLAIMS.values() if one.built]
    if whole_queue:
        return built
    for unknown in [id_ for id_ in ids[1:] if id_ not in CLAIMS] if settings else ():
        raise ValueError(f"a setting is written name=value, got {unknown!r}, which is no claim's id either")
    chosen = [claim(id_) for id_ in ids]
    for one in chosen:
        if not one.built:
            ready = ", ".join(other.id for other in built if not isinstance(other, Statement))
            raise ValueError(f"{one.id} cannot be run yet; those that can are {ready}, and the statements of theory")
    return chosen


def _given(data_dirs: Sequence[str], chosen: Sequence[Claim], *, whole_queue: bool, training: bool) -> list[GivenData]:
    """Return the sets that are named, plus the generated sets of claims none of whose sets is named, or of the whole
    queue. If nothing is trained and no set is named, return all sets of the claims."""
    wanted = [name for one in chosen for name in one.sets]
    if not training and not data_dirs:
        return unplaced(wanted)
    given = parse_data(data_dirs)
    for one in given:
        if one.set.name not in wanted:
            decided = ", ".join(dict.fromkeys(wanted)) or "none"
            raise ValueError(
                f"--data-dir {one.set.name}: nothing that was asked for is decided on it (but on {decided})"
            )
    if whole_queue:
        if training and not data_dirs:
            raise ValueError(f"the queue at lab scale is run on real data; say where: --data-dir {wanted[0]}=FOLDER")
        return with_generated(given, wanted)
    names = {one.set.name for one in given}
    given = with_generated(given, [name for one in chosen if not names & {*one.sets} for name in one.sets])
    for one in chosen:
        if one.sets and not _data_of(one, given, "lab"):
            on = f"is not decided on {given[0].set.name}" if given else "at lab scale is run on real data"
            raise ValueError(f"{one.id} {on}; its sets are {', '.join(one.sets)}: --data-dir {one.sets[0]}=FOLDER")
    return given


def _run(plan: Sequence[tuple[Claim, tuple[GivenData, ...]]], options: Options, runs: Runs) -> int:
    unfinished, failed = list[str](), dict[str, str]()

    def reproduce_one(one: Claim, data: tuple[GivenData, ...]) -> None:
        on = f" on {', '.join(given.set.title for given in data)}" if data else ""
        options.say(f"{one.id}{on}: {one.claim}")
        try:
            lines = one.reproduce(replace(options, data=data), runs)
        except OutOfTime:
            unfinished.append(f"{one.id}{on}")
            lines = []  # the next claim may be shorter, or already done
            if runs.left or not runs.training:
                return
        except (ValueError, RuntimeError) as error:  # RuntimeError: a compiler's, or no memory
            if len(plan) == 1 or isinstance(error, RunFailed):
                raise
            if isinstance(error, RuntimeError):
                options.say(traceback.format_exc())
            failed[f"{one.id}{on}"] = str(error).partition("\n")[0]
            options.say(f"{one.id}{on}: {error}")
            return  # the next claim may not need what this one lacks
        for table, rows in groupby(lines, key=lambda line: line.table if isinstance(line, TableRow) else ""):
            said = map(str, rows)
            options.say("\n  ".join([f"{table}:", *said]) if table else "\n".join(said))
        if not isinstance(one, Statement):  # a statement prints its own
            options.say(f"{one.id}: {_verdict(one, options)}")

    def group(numbered: tuple[int, tuple[Claim, Any]]) -> int:
        number, step = numbered
        together = runs.side_by_side and isinstance(step[0], TrainedArms) and not _reads_other_runs(step)
        return -1 if together else number

    try:
        for number, steps in groupby(enumerate(plan), key=group):
            calls = [partial(reproduce_one, *step) for _, step in steps]
            if number < 0:
                runs.together(calls, in_order=True)
            else:
                calls[0]()
    except (Interrupted, KeyboardInterrupt) as stopped:
        said = str(stopped) or "interrupted"
        options.say(f"{said}. The same command goes on; what is finished is not run again.")
        return 130
    if failed:
        options.say(f"Not run: {'; '.join(f'{name} ({why})' for name, why in failed.items())}")
    if unfinished:
        claims, left = "; ".join(unfinished), "Left of their runs, as far as they are known"
        if not runs.training:
            options.say(f"Nothing was trained. Not complete: {claims}.")
        elif runs.left:
            again = "The same command goes on; what is finished is not run again."
            options.say(f"The time is over. Not finished: {claims}. {left}: {_by_arm(runs.left)}. {again}")
        else:
            only = " and ".join(filter(None, ["--arm" if runs.arms else "", "--seeds" if runs.seeds else ""]))
            done = f"What {only} asked for is done" if only else "What can be run is done"
            options.say(f"{done}. Not complete: {claims}. {left}: {_by_arm(runs.left_out)}.")
    claims = list(dict.fromkeys(one.id for one, _ in plan))
    if len(claims) > 1 and options.scale != "smoke":
        width = max(map(len, claims))
        for one in map(claim, claims):
            options.say(f"{one.id:{width}}  {_verdict(one, options)}")
    return 1 if failed else 0


def _verdict(one: Claim, options: Options) -> str:
    """Return the verdict on all evidence that exists by now, including that of other sets."""
    if options.scale == "smoke":
        return "nothing is decided at smoke scale, which tests the machinery"
    where = options.evidence / ("theory" if isinstance(one, Statement) else one.id)
    files = sorted(where.glob(f"{one.id}.json" if isinstance(one, Statement) else f"{options.scale}*.json"))
    if not files:
        return "no evidence yet"
    try:
        return one.verdict([read_json(path) for path in files]).verdict
    except ValueError as error:  # a damaged file is no reason to stop the queue
        return f"no verdict, {error}"


def _by_arm(names: Iterable[str]) -> str:
    """Summarise runs by their number per arm, cifar10/vit_tiny: both 3, no-sa 3; name anything that is not a run."""
    arms, others = dict[str, Counter[str]](), list[str]()
    for name in dict.fromkeys(names):
        if "/" in name:
            where, arm, _ = name.rsplit("/", 2)
            arms.setdefault(where, Counter())[arm] += 1
        else:
            others.append(name)
    said = [f"{where}: {', '.join(f'{arm} {n}' for arm, n in counts.items())}" for where, counts in arms.items()]
    return "; ".join([*said, *others])


def _queue(options: Options, given: Sequence[GivenData]) -> list[tuple[Claim, tuple[GivenData, ...]]]:
    """Return the steps of the queue that can be run, in order, and print what cannot."""
    steps: list[tuple[Claim, tuple[GivenData, ...]]] = []
    missing, without = dict[str, None](), dict[str, None]()
    for ids, sets in QUEUE:
        for one in map(claim, ids):
            wanted = [name for name in one.sets if not sets or name in sets]
            if not one.built:
                missing[one.id] = None
                continue
            if options.scale != "lab":  # a stand-in for all its sets, or a plan: once
                if one not in [step[0] for step in steps]:
                    steps.append((one, _data_of(one, given, options.scale)))
                continue
            data = tuple(there for there in given if there.set.name in wanted)
            without |= dict.fromkeys(name for name in wanted if name not in [there.set.name for there in data])
            if data or not one.sets:
                steps.append((one, data))
    if missing:
        options.say(f"Skipped, not built yet: {', '.join(missing)}.")
    if without:
        options.say(f"Skipped, no --data-dir says where they are: {', '.join(without)}.")
    return steps


def _data_of(one: Claim, given: Sequence[GivenData], scale: str) -> tuple[GivenData, ...]:
    return smoke_data(one.sets) if scale == "smoke" else tuple(there for there in given if there.set.name in one.sets)


def _check_readable(chosen: Sequence[Claim], scale: str, folders: Sequence[Path]) -> None:
    if scale != "lab":
        raise ValueError(f"--no-training reads results of lab runs, which are kept; at {scale} scale there are none")
    for one in chosen:
        if not _of_runs(one):
            raise ValueError(f"{one.id} compares no trainings: there are no results to read. Leave out --no-training")
    if not any(next(folder.rglob(RESULT), None) for folder in folders):
        places = " or ".join(map(str, folders))
        raise ValueError(f"there is no result in {places}: go to a folder that has some, or name it with --evidence")


def _of_runs(one: Claim) -> bool:
    """Whether a claim can be decided from existing results of runs."""
    return isinstance(one, TrainedArms) or (isinstance(one, Measured) and one.of_runs)


def _reads_other_runs(step: tuple[Claim, Any]) -> bool:
    """Whether a claim also shows runs that only others train; it comes last, so that it finds all of them."""
    return isinstance(step[0], TrainedArms) and bool(step[0].trains)


def _check_arms(arms: Sequence[str], claims: Iterable[Claim]) -> None:
    there = [name for one in claims if isinstance(one, TrainedArms) for name in (*one.starts, *one.arms)]
    for arm in arms:
        if arm not in there:
            named = f"they are {', '.join(dict.fromkeys(there))}" if there else "nothing is trained for this"
            raise ValueError(f"--arm {arm}: there is no such arm{meant(arm, there)} ({named})")


def _check_limit(text: str) -> None:
    try:
        as_seconds(text)
    except ValueError as error:
        raise ValueError(f"--time-limit {error}") from None
