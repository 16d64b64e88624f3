#!/usr/bin/env python3
"""Trains a dozen small runs and compares them, to the last bit, with what they gave before: for changes of the engine
that must not change what is computed.

    python scripts/same_runs.py --record before.json            # on the old code
    python scripts/same_runs.py --assert-equal before.json      # on the new: exit 1 names every difference
    python scripts/same_runs.py --device cuda --record gpu.json # two more, compiled and replayed

Every run is a command line with every setting that matters, so that no default, old or new, decides. What is compared:
each loss and metric of metrics.jsonl, each value of probe.jsonl, and a checksum of each tensor of the last saved
weights; fields that a row did not have before are left alone, and steps that the probe did not measure before. Bits
are those of one machine and one version of torch: record both sides on the same one.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = "model_kwargs=img_size=8,patch_size=2,depth=3,embed_dim=32,num_heads=2"
COMMON = (
    "model=vit_tiny_patch16_224", MODEL, "data=digits", "image_size=8", "epochs=2", "batch_size=128", "accumulate=1",
    "opt=adamw", "lr=1e-3", "weight_decay=0.05", "sched=cosine", "warmup_epochs=1", "warmup_lr=1e-6", "min_lr=0",
    "padding=1", "flip=0", "mixup=0", "cutmix=0", "label_smoothing=0", "drop_path=0", "amp_dtype=float32",
    "compile=false", "workers=2", "seed=3", "probe_every=7", "probe_samples=8", "probe_exact=float32",
    "eval_every=1", "log_every=1", "save_every=5", "keep=2", "deterministic=true", "step_graph=false",
)  # fmt: skip
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "surgery": ("remove_skips=sa", "gray=dct", "epsilon=0.9", "clip_grad=1.0"),
    "skyformer": ("attention=skyformer", "attention_kwargs=num_landmarks=8"),
    "augmented": ("mixup=0.8", "cutmix=1.0", "label_smoothing=0.1", "flip=0.5", "erasing=0.3", "drop_path=0.2"),
    "averaged": ("ema_decay=0.9", "accumulate=2", "opt=lamb", "sched=tanh"),
    "bfloat16": ("amp_dtype=bfloat16", "probe_marks=true", "probe_exact=float64"),
    "streamed": ("cache_limit=0", "data=folder:DIGITS", "padding=0", "scale_min=0.5"),
    "masked": ("task=mae", "decoder_dim=32", "decoder_depth=1", "decoder_heads=2", "mask_ratio=0.5"),
    "killed": ("drop_path=0.2", "ema_decay=0.9"),
    "two processes": ("drop_path=0.1",),
    "sharded": ("shard=true",),
    "linear probe": ("task=linear_probe", "checkpoint=MASKED"),
}
GPU_RUNS = {
    "compiled": ("amp_dtype=bfloat16", "compile=true", "mixup=0.8"),
    "replayed": ("amp_dtype=bfloat16", "compile=true", "step_graph=true", "deterministic=false", "probe_exact=no"),
}
PROCESSES = {"two processes": 2, "sharded": 2}
IGNORED = {"images_per_second", "data_wait", "memory_mib", "run", "time"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write what the runs gave to this file")
    parser.add_argument("--assert-equal", type=Path, help="compare with what this file has")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", help="this run alone; may be given several times")
    options = parser.parse_args()
    runs = GPU_RUNS if options.device != "cpu" else RUNS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in runs.items():
            if options.only and name not in options.only and not (name == "masked" and "linear probe" in options.only):
                continue
            train(name, settings, Path(folder), options.device)
            found[name] = read(Path(folder) / name.replace(" ", "-"))
            print(
                f"{name}: {len(found[name]['metrics'])} rows, weights {digest(found[name]['weights'])[:12]}", flush=True
            )
    if options.record:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
    if options.assert_equal:
        before = json.loads(options.assert_equal.read_text())
        differ = [line for name in found for line in differences(name, before.get(name), found[name])]
        print("\n".join(differ) or f"{len(found)} runs are equal to the last bit")
        return bool(differ)
    return 0


def train(name: str, settings: tuple[str, ...], folder: Path, device: str) -> None:
    output = folder / name.replace(" ", "-")
    given = dict(text.partition("=")[::2] for text in (*COMMON, *settings))
    if given["data"] == "folder:DIGITS":
        given["data"] = f"folder:{digits(folder / 'digits')}"
    if given.get("checkpoint") == "MASKED":
        given["checkpoint"] = str(max((folder / "masked/checkpoints").glob("step-*")) / "model.safetensors")
    command = ["-m", "wellcond", "train", "digits", "--output", str(output), "--device", device]
    command += [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    processes = PROCESSES.get(name, 1)
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command]
    if name == "killed":
        kill_after(6, command, output)
    done = subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def kill_after(step: int, command: list[str], output: Path) -> None:
    """Kill it with -9 as soon as that many steps are in its metrics, which is after a saved state."""
    process = subprocess.Popen(
        [sys.executable, *command], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > step):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def digits(folder: Path) -> Path:
    """The embedded digits as files, for runs that read them one by one."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(images[:600], labels[:600], strict=True)):
        place = folder / ("val" if number % 6 == 0 else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.uint8(image.reshape(8, 8) * 15)
        Image.fromarray(np.stack([pixels] * 3, -1)).save(place / f"{number}.png")
    return folder


def read(folder: Path) -> dict[str, Any]:
    """All numbers as text, to the last bit."""
    from safetensors import safe_open

    rows = {}
    for file in ("metrics", "probe"):
        path = folder / f"{file}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        rows[file] = [json.dumps({k: v for k, v in row.items() if k not in IGNORED}, sort_keys=True) for row in lines]
    weights = {}
    with safe_open(str(max((folder / "checkpoints").glob("step-*")) / "model.safetensors"), framework="np") as file:
        for name in sorted(file.keys()):
            weights[name] = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
    return {**rows, "weights": weights}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(name: str, before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    if before is None:
        return [f"{name}: was not recorded"]
    found = []
    measured = {json.loads(row)["step"] for row in before["probe"]}
    now = {**now, "probe": [row for row in now["probe"] if json.loads(row)["step"] in measured]}
    for kind in ("metrics", "probe"):
        rows = [(json.loads(a), json.loads(b)) for a, b in zip(before[kind], now[kind], strict=False)]
        pairs = [(a, b) for a, b in rows if any(b.get(key) != value for key, value in a.items() if key not in IGNORED)]
        if pairs:
            found.append(
                f"{name}, {kind}: {len(pairs)} rows differ, the first:\n  before {pairs[0][0]}\n  now    {pairs[0][1]}"
            )
        elif len(before[kind]) != len(now[kind]):
            found.append(f"{name}, {kind}: {len(before[kind])} rows before, {len(now[kind])} now")
    tensors = [
        key for key in {**before["weights"], **now["weights"]} if before["weights"].get(key) != now["weights"].get(key)
    ]
    if tensors:
        found.append(f"{name}: {len(tensors)} of {len(before['weights'])} tensors differ, e.g. {tensors[0]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
