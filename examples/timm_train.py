"""Run timm's own training script with a probe inside.

python examples/timm_train.py --every 100 path/to/train.py --model vit_tiny_patch16_224 --data-dir path/to/images …

`train.py` is the script in timm's repository; everything behind its path are its own options, `--torchcompile`,
`--amp`, `--grad-accum-steps` and `torchrun` in front of it all included. Its code is not changed: the function that
trains one epoch is wrapped, so that validation and the EMA model are not measured.
"""

import argparse
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import wellcond
from wellcond.probe.table import table


def main(script: Path, every: int, arguments: list[str]) -> None:
    train = load(script)
    train_one_epoch = train.train_one_epoch
    probes: list[wellcond.Probe] = []

    def measured(epoch: int, model: Any, loader: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not probes:  # here the model is what training calls: compiled, distributed
            folder = kwargs.get("output_dir") or "."  # train.py's own, beside its summary.csv
            probes.append(wellcond.Probe(model, every=every).to(Path(folder) / "probe.jsonl"))
        (probe,) = probes
        options = next(value for value in (*args, *kwargs.values()) if hasattr(value, "grad_accum_steps"))
        probe.step = epoch * math.ceil(len(loader) / options.grad_accum_steps)  # right after --resume, too
        counting = optimizer.register_step_post_hook(lambda *_: setattr(probe, "step", probe.step + 1))
        try:
            with probe:
                return train_one_epoch(epoch, model, loader, optimizer, *args, **kwargs)
        finally:
            counting.remove()

    train.train_one_epoch = measured
    sys.argv = [str(script), *arguments]
    train.main()
    rows = probes[0].rows()
    first = min(row["step"] for row in rows)
    print(f"\nat the first step\n{table(row for row in rows if row['step'] == first)}\n")
    print(f"at the last measured step\n{probes[0].table()}\n")


def load(script: Path) -> ModuleType:
    """The script as a module, so that its functions can be wrapped before its `main` runs."""
    spec = importlib.util.spec_from_file_location("timm_train_script", script)
    if spec is None or spec.loader is None or not script.is_file():
        sys.exit(f"{script} is not a Python file; it should be train.py of timm's repository")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100, help="measure every so many steps of the optimiser")
    parser.add_argument("script", type=Path, help="train.py of timm's repository")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what train.py is to get")
    main(**vars(parser.parse_args()))
