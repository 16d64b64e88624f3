"""Small, briefly trained ViTs whose whole Jacobians can be computed, for asa-assume1 and asa-assume2.

    rows = measure_models(options, data, ["plain", "svd-0.7"])      # trains and measures what is not done yet
    rows[0]["model"], rows[0]["seed"], rows[0]["states"][0]         # a state: step, halves, network

With 16 tokens, width 24 and four blocks, each Jacobian is 384 × 384, or 384 by the number of parameters. Every training
is measured at its random start, after a quarter and at the end of 256 steps, on one image of the test set. Each run has
its own folder with its measurements, so that an interrupted call can resume and both claims share the runs.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wellcond.claims.claim import Options, rounded
from wellcond.claims.jacobians import KINDS, MAX_ENTRIES, Half, halves, image_for, small_vit
from wellcond.claims.sets import GivenData, ImageSet
from wellcond.numerics.jacobian import jacobian_spectrum
from wellcond.records import read_json, write_json
from wellcond.train.checkpoint import read, state_path
from wellcond.train.config import Config
from wellcond.train.loop import Diverged, train
from wellcond.train.recipes import recipe
from wellcond.train.setup import data_of
from wellcond.train.tasks import make_task

__all__ = ["MODELS", "SKIPLESS", "measure_models", "measure_state"]

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "svd-0.9": {"gray": "svd", "epsilon": 0.9},
    "svd-0.7": {"gray": "svd", "epsilon": 0.7},
    "svd-0.5": {"gray": "svd", "epsilon": 0.5},
    "linear": {"attention": "linear"},
    "kernelized": {"attention": "kernelized"},
    "shallow": {"depth": 2},
    "deep": {"depth": 6},
    "no-mlp": {"remove_skips": ["mlp"]},
    "no-sa": {"remove_skips": ["sa"]},
}
SKIPLESS = tuple(name for name, settings in MODELS.items() if "remove_skips" in settings)
SMOKE = ("plain", "no-sa", "svd-0.7")  # at smoke scale, those of these that are asked for
STEPS = {"smoke": 4, "lab": 256}
STATES = (0.0, 0.25, 1.0)


def measure_models(options: Options, data: GivenData, names: Sequence[str]) -> list[dict[str, Any]]:
    """Train and measure what is missing; return {"model", "seed", "steps", "status", "states"} by model and seed."""
    names = [name for name in names if options.scale != "smoke" or name in SMOKE]
    found, seeds = [], range(options.seeds)
    with options.steps(len(names) * len(seeds)) as begin:
        for name, seed in product(names, seeds):
            begin(f"{data.set.title}, {name}, seed {seed}")
            found.append(_measured(options, data, name, seed))
    return found


def _measured(options: Options, data: GivenData, name: str, seed: int) -> dict[str, Any]:
    config = _configure(options, data, name, seed)
    folder = options.output / options.scale / "small-vits" / data.set.name / name / f"seed-{seed}"
    path = folder / "jacobians.json"
    if path.exists() and read_json(path)["steps"] == config.steps:
        return read_json(path)
    found: dict[str, Any] = {"model": name, "seed": seed, "steps": config.steps, "status": "finished", "states": []}
    try:
        train(config, folder / "run", device=options.device, quiet=True)
    except Diverged:
        found["status"] = "diverged"
    else:
        image, skips = image_for(options, data, seed), not config.remove_skips
        states = _states(config, folder / "run")
        found["states"] = [{"step": step, **measure_state(model, image, skips=skips)} for step, model in states]
    write_json(path, found)
    return found


def _configure(options: Options, data: GivenData, name: str, seed: int) -> Config:
    """Return the configuration: the recipe's, in float32, with a smaller model and a shorter training."""
    assert isinstance(data.set, ImageSet)
    settings, scale, size = dict(MODELS[name]), options.scale, data.set.image_size
    width, depth = (8, 2) if scale == "smoke" else (24, settings.pop("depth", 4))
    steps = STEPS[scale]
    return recipe(
        "vit_tiny", scale=scale, data=data.spec, image_size=size, steps=steps, batch_size=128, warmup_epochs=0,
        warmup_steps=steps // 16, compile=False, amp_dtype="float32", save_every=steps // 4, keep=4, eval_batches=1,
        log_every=steps // 4, seed=seed, cache_dir=str(options.output / scale / "cache"),
        model_kwargs=small_vit(width, 2, img_size=size, patch_size=size // 4, depth=depth), padding=size // 8,
        **settings,
    )  # fmt: skip


def _states(config: Config, folder: Path) -> Iterable[tuple[int, nn.Module]]:
    """Yield the random start, rebuilt from the seed, and the saved states, in float64 on the CPU."""
    model = make_task(config, data_of(config)).build().eval().double()
    for share in STATES:
        step = round(share * config.steps)
        if step:
            model.load_state_dict(dict(read(state_path(folder / "checkpoints", step)).model))
        yield step, model


def measure_state(model: nn.Module, image: Tensor, *, skips: bool = True) -> dict[str, Any]:
    """Return log κ of every half's output (`out`; with the skip `plus`) and Jacobians, and of the stack of all blocks.

    Without `skips`, no Jacobian by input is measured: where a skip is missing, a norm makes it singular.
    """
    kinds = [kind for kind in KINDS if skips or kind == "params"]
    parts = halves(model, image)
    network = {"params": _whole(model, parts[0].tokens, "params")}
    if skips:
        network["skip"] = _whole(model, parts[0].tokens, "input")
    return {"halves": [_half(part, kinds) for part in parts], "network": network}


def _half(part: Half, kinds: Sequence[str]) -> dict[str, Any]:
    found = {kind: rounded(part.spectrum(kind).log_kappa) for kind in kinds}
    return {"site": part.site, "out": part.log_kappa(), "plus": part.log_kappa(skip=True), **found}


def _whole(model: nn.Module, tokens: Tensor, wrt: str) -> float:
    """Return log κ of the Jacobian of all blocks, from the first one's input to the last one's output."""
    blocks = model.get_submodule("blocks")
    return rounded(jacobian_spectrum(blocks, tokens, wrt, method="exact", max_entries=MAX_ENTRIES).log_kappa)
