"""timm's train.py, run as its users run it, and the images per second that it says.

rate, note = timm_rate(sys.executable, Path("train.py"), {"model": "vit_tiny_patch16_224", "epochs": 2, …}, batch=256)
"""

import math
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_rate", "timm_rate"]

LINE = re.compile(r"Train: (\d+) \[ *(\d+)/\d+ .*\(([\d.]+)s, +([\d.]+)/s\)")
TIMEOUT = 120.0


def timm_rate(python: str, script: Path, options: Mapping[str, Any], *, batch: int) -> tuple[float, str]:
    """Images per second of the steady part of its last epoch, and a note; NaN and why, where it fails."""
    command = [python, str(script.resolve())]
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        command += [f"--{name}", *map(str, values)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return math.nan, f"stopped after {TIMEOUT:g} s"
    said = done.stdout + done.stderr
    if done.returncode:
        return math.nan, f"failed: {(said.strip().splitlines() or ['it said nothing'])[-1][:200]}"
    return read_rate(said, batch=batch), ""


def read_rate(said: str, *, batch: int) -> float:
    """From the first line of the last epoch to its last one. What stands in brackets are means over the epoch so far,
    so the time of a line is the number of its steps times the mean."""
    lines = [(int(epoch), int(step), float(rate)) for epoch, step, _, rate in LINE.findall(said)]
    times = [((step + 1) * batch, (step + 1) * batch / rate) for epoch, step, rate in lines if epoch == lines[-1][0]]
    if len(times) < 2:
        raise ValueError("timm's train.py has said too few lines of progress; a lower --log-interval gives more")
    (first, begin), (last, end) = times[0], times[-1]
    return (last - first) / (end - begin)
