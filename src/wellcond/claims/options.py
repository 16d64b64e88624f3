"""What `wellcond reproduce` was asked for, in one object that every experiment takes."""

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from wellcond.claims.image_sets import GivenData

__all__ = ["Options", "evidence_path", "kept_results"]


@dataclass(frozen=True, kw_only=True)
class Options:
    scale: str
    data: tuple[GivenData, ...]
    seeds: int = 3
    output: Path = Path("runs")
    """For the run folders, which are large; another call with the same goes on."""
    evidence: Path = Path("evidence")
    """For what is kept: small files of numbers, and figures."""
    settings: tuple[str, ...] = ()
    """Fields of every training, `key=value`, the same for all arms."""
    grid_epochs: int | None = None
    """Epochs of the trainings that choose a learning rate; by default what the experiment says."""
    device: str | None = None
    jobs: int = 1
    """How many runs are trained at once."""
    console: Console = field(default_factory=Console)


def evidence_path(options: Options, claim: str, data: str) -> Path:
    """evidence/asa-fig1c/lab-cifar10.json: one file for each scale and set, so that sets may be run on their own."""
    return options.evidence / claim / f"{options.scale}-{data}.json"


def kept_results(options: Options, claim: str = "asa-fig1c") -> Path | None:
    """evidence/runs/asa-fig1c/lab: the results of single runs, so that another machine goes on where one stopped."""
    return None if options.scale == "smoke" else options.evidence / "runs" / claim / options.scale
