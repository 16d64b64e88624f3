"""`wellcond reproduce`: run one claim's experiment at a scale, as far as it is not done yet, and write its evidence.

    reproduce("asa-fig1c", scale="smoke", seeds=2)                       # exit code: 0 done, 130 interrupted
    reproduce("asa-fig1c", scale="lab", data_dirs=["cifar10=data/cifar10"], jobs=4)

Interrupted, the same call goes on: finished runs are skipped, those that were running go on from their last states.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wellcond.claims.catalogue import claim, experiment
from wellcond.claims.devices import check_device
from wellcond.claims.image_sets import parse_data
from wellcond.claims.options import Options
from wellcond.train.interrupt import Interrupted
from wellcond.train.recipes import SCALES

__all__ = ["reproduce"]


def reproduce(
    id_: str,
    *,
    scale: str = "smoke",
    seeds: int | None = None,
    data_dirs: Sequence[str] = (),
    output: Path = Path("runs"),
    evidence: Path = Path("evidence"),
    settings: Sequence[str] = (),
    grid_epochs: int | None = None,
    device: str | None = None,
    jobs: int = 1,
    console: Console | None = None,
) -> int:
    """Returns the exit code; ValueError for an unknown claim, scale or set, before anything is trained.

    Args:
        seeds: by default two at `smoke` scale, and three at the others.
        data_dirs: where the image sets lie, `NAME=PATH` each.
        settings: fields of every training, `key=value`, the same for all arms.
        jobs: how many runs are trained at once, each in a process of its own if more than one.
    """
    module = experiment(id_)
    if scale not in SCALES:
        raise ValueError(f"the scales are {', '.join(SCALES)}, not {scale!r}")
    if scale == "lab" and not data_dirs:
        raise ValueError(f"{id_} at lab scale is run on real images; say where: --data-dir cifar10=FOLDER")
    if jobs < 1:
        raise ValueError(f"jobs is how many runs are trained at once, 1 or more; got {jobs}")
    check_device(device)
    console = console or Console()
    options = Options(
        scale=scale,
        data=tuple(parse_data(["digits"] if scale == "smoke" else data_dirs)),
        seeds=seeds or (2 if scale == "smoke" else 3),
        output=output,
        evidence=evidence,
        settings=tuple(settings),
        grid_epochs=grid_epochs,
        device=device,
        jobs=jobs,
        console=console,
    )
    strangers = [data.set.name for data in options.data if scale == "lab" and data.set.name not in module.SETS]
    if strangers:
        raise ValueError(f"{id_} is not decided on {strangers[0]}; its sets are {', '.join(module.SETS)}")
    if scale == "paper":
        for line in module.plan_paper(options):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0
    console.print(f"{id_}: {claim(id_).claim}", highlight=False, markup=False, soft_wrap=True)
    try:
        lines = module.reproduce(options)
    except (Interrupted, KeyboardInterrupt) as stopped:
        said = str(stopped) or "interrupted"
        console.print(f"{said}. The same command goes on; what is finished is not run again.", soft_wrap=True)
        return 130
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
