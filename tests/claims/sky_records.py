"""Evidence as lab runs of Skyformer's claims would write it, with numbers that a test chooses."""

import math

from wellcond.bench.lra import SDPA
from wellcond.claims import sky_lra, sky_table1, sky_time
from wellcond.claims.approximations import APPROXIMATIONS
from wellcond.claims.catalogue import CLAIMS
from wellcond.claims.lra import ARMS, MAIN, TASKS

BASE = {"lra_text": 62.0, "lra_listops": 38.0, "imdb_pairs": 80.0, "lra_pathfinder": 66.0, "lra_image": 41.0}
GAINS = {
    "softmax": 0.0, "kernelized": 1.0, "nystrom": 1.2, "skyformer": 2.0, "compat": 0.5, "softmax-masked": 3.0,
    "softmax-float16": 3.0, "softmax-grayed": 0.3,
}  # fmt: skip
STEP = {"softmax": 3.0, "kernelized": 4.0, "nystrom": 2.2, "skyformer": 2.0}  # ms
MEMORY = {"softmax": 800.0, "kernelized": 950.0, "nystrom": 600.0, "skyformer": 500.0}
DECAY = {"imdb_pairs": 0.16, "lra_pathfinder": 0.2, "lra_text": 0.25, "lra_listops": 0.3, "lra_image": 0.22}
ENVIRONMENT = {
    "command": "wellcond reproduce", "commit": "0" * 40, "dirty": False, "device": "NVIDIA H200",
    "versions": {"torch": "2.11"}, "date": "2026-11-16T00:00:00", "cpu": {"name": "a CPU"},
}  # fmt: skip


def run(task, arm, seed, *, gain=None, slow=1.0, decay=None, errors=1.0):
    """`slow`: how many steps it needs for a given loss, over the usual; `errors`: Skyformer's over the others'."""
    top1 = BASE[task] + (GAINS[arm] if gain is None else gain) + 0.1 * seed
    steps = range(500, 50_001, 500)
    validation = [
        {"step": step, "loss": 0.4 + 0.3 * math.exp(-step / 8000 / slow) + (step / 60000 if task == "lra_text" else 0),
         "top1": (50 + (top1 - 50) * (1 - math.exp(-step / 8000 / slow))) / 100}
        for step in steps
    ]  # fmt: skip
    found = {
        "seed": seed, "lr": 1e-4, "run": f"{task}/{task}/{arm}/seed-{seed}", "status": "finished", "top1": top1,
        "images per second": 5000.0, "losses": [[1.0, 0.5]],
        "test_accuracy": {"best": {"top1": top1 / 100, "top5": 0.9}, "last": {"top1": top1 / 100 - 0.01}},
        "validation": validation, "device": "NVIDIA H200", "commit": "0" * 40,
    }  # fmt: skip
    if arm == "softmax":
        decay = (decay or DECAY[task]) * (1 + 0.01 * seed)
        found["attention_spectrum"] = {
            "samples": 16,
            "values": [200 * math.exp(-decay * i - 2 * (i > 0)) for i in range(64)],
        }
        of_size = {
            name: [1.5 * (512 / (512 + (4 if name == "skyformer" else 1) * d)) for d in (16, 32, 64, 128, 256)]
            for name in APPROXIMATIONS
        }
        of_size["skyformer"] = [errors * value for value in of_size["skyformer"]]
        sizes = {str(n): {"norm": 20.0, **of_size} for n in (512, 1024, 2048, 4096)}
        found["approximations"] = {"budgets": [16, 32, 64, 128, 256], "trained": sizes, "initial": sizes}
    return found


def steps(task, *, time=None, memory=None):
    """What sky-time measures on one task; Skyformer's, where they are not the usual."""
    ms = {SDPA: 5.0, **STEP} | ({"skyformer": time} if time else {})
    mib = {SDPA: 900.0, **MEMORY} | ({"skyformer": memory} if memory else {})
    published = {"softmax": {"ms": 60.0, "memory_mib": 9000.0}, "skyformer": {"ms": 30.0, "memory_mib": 2000.0}}
    return {
        "claim": "sky-time", "scale": "lab", "data": task, "seeds": 3, "settings": [], "device": "NVIDIA H200",
        "batch": 16, "time": {arm: [one * (1 + 0.01 * i) for i in range(6)] for arm, one in ms.items()},
        "memory": {arm: [one] * 2 for arm, one in mib.items()}, "published": published, "paper": sky_time.PAPER[task],
        "environment": ENVIRONMENT,
    }  # fmt: skip


def record(id_, task, seeds=3, ms=None, **changes):
    """Of one task: `changes` by arm are those of `run`; `ms`: what steps take alone, where it is not the usual."""
    claim = CLAIMS[id_]
    arms = {
        arm: {
            "lr": 1e-4,
            "runs": [run(task, arm, s, **changes.get(arm, {})) for s in range(min(seeds, ARMS[arm].seeds or seeds))],
        }
        for arm in claim.arms
    }
    return {
        "claim": id_, "scale": "lab", "data": task, "steps": 50_000, "seeds": 3, "confidence": 0.95, "arms": arms,
        "settings": {"batch_size": 16}, "paper": dict(claim.paper.get(task, {})),
        "ms alone": STEP if ms is None else ms, "environment": ENVIRONMENT,
    }  # fmt: skip


def records(id_, tasks=TASKS, seeds=3, **changes):
    return [record(id_, task, seeds, **changes) for task in tasks]


def stability(task, *, nystrom=1.0, kernelized=0.8, skyformer=0.78, seeds=5):
    means = {"nystrom": nystrom, "kernelized": kernelized, "skyformer": skyformer}
    ratios = {
        name: {"after": [mean + 0.004 * (seed - 2) for seed in range(seeds)],
               "before": [300 * mean + seed for seed in range(seeds)]}
        for name, mean in means.items()
    }  # fmt: skip
    return {
        "claim": "sky-table1", "scale": "lab", "data": task, "seeds": 3, "settings": [], "steps": 20, "batch": 16,
        "ratios": ratios, "paper": dict(zip(sky_table1.ATTENTIONS, sky_table1.PAPER[task], strict=True)),
        "environment": ENVIRONMENT,
    }  # fmt: skip


assert set(sky_lra.PAPER) == set(TASKS)
assert set(MAIN) < set(ARMS)
