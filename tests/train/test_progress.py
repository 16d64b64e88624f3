"""The progress tells loss, rate and the worst block, in lines where there is no terminal."""

from collections.abc import Callable

import pytest

from wellcond.train.config import Config
from wellcond.train.progress import Progress


def row(block: str, value: float, status: str = "ok", name: str = "log_kappa") -> dict[str, object]:
    return {"block": block, "site": "+sa", "name": name, "value": value, "status": status}


def test_the_worst_block_is_the_one_with_the_largest_kappa(make_config: Callable[..., Config]) -> None:
    progress = Progress(make_config(), 10, show=False)
    progress.measured([row("blocks.0", 3.0), row("blocks.1", 12.04, "ceiling"), row("blocks.2", 99.0, name="rank")])
    assert progress.worst == "blocks.1 +sa, log κ ≥ 12.0"
    progress.measured([row("blocks.0", float("nan"), "non_finite"), row("blocks.2", 4.0)])
    assert progress.worst == "blocks.2 +sa, log κ 4.0"
    progress.measured([row("blocks.0", float("nan"), "non_finite")])  # nothing better is known
    assert progress.worst == "blocks.2 +sa, log κ 4.0"


def test_lines_without_a_terminal(make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(make_config(), 10, show=True)
    with progress.running(0):
        progress.measured([row("blocks.0", 3.0)])
        progress.step(1, images=256)
        progress.logged(1.25)
        progress.evaluated({"top1": 0.5})
    told = capsys.readouterr().err
    assert "loss 1.25" in told
    assert "worst: blocks.0 +sa, log κ 3.0" in told
    assert "validation: top1 0.5" in told
    assert progress.rate > 0
    quiet = Progress(make_config(), 10, show=False)
    quiet.logged(1.0)
    quiet.evaluated({"top1": 0.5})
    assert capsys.readouterr().err == ""
