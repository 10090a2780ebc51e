"""Kills training runs at random moments, continues them, and compares every byte with an uninterrupted run.

Usage: python benchmarks/kill_campaign.py [--trials N] [--kills N] [--seed N] [--only NAME ...] [--keep DIR]

Each trial of a configuration is a run that is killed several times (SIGINT, SIGTERM or SIGKILL; at a random
moment, while a checkpoint is being written, or during validation) and each time continued with --resume,
until it ends.  ``metrics.jsonl``, ``program.json`` and all checkpoints must then be those of a run that was
left alone.  Exit code 5 if any differ.
"""

import argparse
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
MOMENTS = ("any time", "checkpoint", "validation")
START_LIMIT_S = 300.0

# Between them: all optimizers and schedules, batch norm, group norm and none, dropout, augmentation, replicas,
# accumulation, distributed and pipelined batch norm, segmentation, executions cut in the middle.
CONFIGURATIONS: Dict[str, str] = {
    "cnn": "mnist_cnn --dataset digits --augment --dropout 0.2 --replicas 2 --micro-batch-size 8 "
    "--gradient-accumulation-count 2 --optimizer adam --optimizer-params {} --lr-schedule cosine --num-epochs 40 "
    "--ckpts-per-epoch 1 --logs-per-epoch 2",
    "resnet": "cifar_resnet8 --dataset digits --augment --micro-batch-size 16 --optimizer sgd --optimizer-params "
    "'{\"momentum\": 0.9}' --lr-schedule stepped --lr-schedule-params "
    '\'{"boundaries": [0.5, 0.75], "values": [1, 0.1, 0.01]}\' '
    '--lr-warmup-params \'{"warmup_mode": "shift", "warmup_epochs": 1}\' --limit-train 640 --num-epochs 6 '
    "--ckpts-per-epoch 2 --logs-per-epoch 4",
    "pipeline": "cifar_resnet8 --dataset digits --augment --ipus-per-replica 2 --replicas 2 --micro-batch-size 4 "
    "--gradient-accumulation-count 8 --optimizer rmsprop --optimizer-params {} --limit-train 640 --num-epochs 6 "
    "--ckpts-per-epoch 1 --lr-schedule const",
    "efficientnet": "efficientnet-b0 --dataset digits --augment --replicas 4 --dbn-replica-group-size 2 "
    "--micro-batch-size 4 --limit-train 128 --limit-eval 40 --num-epochs 4 --ckpts-per-epoch 2 --logs-per-epoch 4",
    "unet": "unet --dataset membranes --augment --base-filters 2 --image-size 188 --optimizer adam "
    "--optimizer-params {} --lr-schedule exponential --lr-schedule-params "
    '\'{"initial_learning_rate": 0.0005, "epochs_to_decay": 2, "decay_rate": 0.5}\' --num-epochs 6 --ckpts-per-epoch 1',
    "lenet": "lenet --dataset digits --augment --norm-layer none --micro-batch-size 8 --replicas 4 --optimizer lars "
    "--optimizer-params {} --lr-schedule polynomial --num-epochs 24 --logs-per-epoch 1/4 --ckpts-per-epoch 1/8 "
    "--validation-freq 4",
}


def command(configuration: str, folder: Path, resume: bool) -> List[str]:
    import shlex

    words = shlex.split(configuration)
    line = [sys.executable, "-m", "ipucnn", "train", *words, "--seed", "11", "--run-dir", str(folder)]
    return [*line, "--resume"] if resume else line


def start(configuration: str, folder: Path, resume: bool, log: Path) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "-1", "NO_COLOR": "1"}
    with open(log, "ab") as out:
        return subprocess.Popen(command(configuration, folder, resume), stdout=out, stderr=out, env=env)


def trained(folder: Path, since: float) -> bool:
    """Whether the process that was started at ``since`` has begun to train."""
    path = folder / "environment.json"
    return path.exists() and path.stat().st_mtime >= since


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint's temporary file is there."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(name.endswith(".tmp") for name in os.listdir(checkpoints))


def is_validating(folder: Path, seen: int) -> bool:
    """Whether an execution was recorded since, with the validation that follows it not yet."""
    path = folder / "metrics.jsonl"
    if not path.exists() or path.stat().st_size <= seen:
        return False
    lines = path.read_bytes().splitlines()
    return bool(lines) and b'"execution"' in lines[-1]


def kill(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    since: float,
    moment: str,
    number: Any,
    delay_s: float,
) -> Optional[int]:
    """Kills a training process once it trains; its exit code, or None if it ended before."""
    while not trained(folder, since) and process.poll() is None:
        if time.time() - since > START_LIMIT_S:
            process.kill()
            raise SystemExit(f"{folder}: training did not begin within {START_LIMIT_S:.0f} s")
        time.sleep(0.002)
    metrics = folder / "metrics.jsonl"
    # One in a few checkpoints or validations, not always the first after the start.
    ready = time.time() + delay_s
    while time.time() < ready and process.poll() is None:
        time.sleep(0.001)
    seen = metrics.stat().st_size if metrics.exists() else 0
    while process.poll() is None:
        if (
            moment == "any time"
            or (moment == "checkpoint" and is_writing(folder))
            or (moment == "validation" and is_validating(folder, seen))
        ):
            process.send_signal(number)
            break
        time.sleep(0.0005)
    else:
        return None
    process.wait(timeout=START_LIMIT_S)
    return process.returncode


def compare(reference: Path, folder: Path) -> List[str]:
    """The files that are not byte for byte those of the reference run."""
    names = ["metrics.jsonl", "program.json"]
    names += [f"checkpoints/{p.name}" for p in sorted((reference / "checkpoints").iterdir())]
    there = {f"checkpoints/{p.name}" for p in (folder / "checkpoints").iterdir()}
    extra = sorted(there - set(names))
    return [
        name
        for name in names
        if not (folder / name).is_file() or (folder / name).read_bytes() != (reference / name).read_bytes()
    ] + extra


def campaign(name: str, trials: int, kills: int, rng: random.Random, place: Path) -> Dict[str, Any]:
    """All trials of one configuration."""
    configuration, reference, log = CONFIGURATIONS[name], place / name / "reference", place / f"{name}.log"
    (place / name).mkdir(parents=True)
    since = time.time()
    process = start(configuration, reference, False, log)
    while not trained(reference, since) and process.poll() is None:
        time.sleep(0.01)
    began = time.time()
    if process.wait() != 0:
        raise SystemExit(f"{name}: the uninterrupted run failed\n{log.read_text(errors='replace')[-2000:]}")
    train_s = time.time() - began
    result: Dict[str, Any] = {"name": name, "train_s": train_s, "kills": 0, "late": 0, "wrong_code": 0}
    result.update(dict.fromkeys(MOMENTS, 0))
    result.update({number.name: 0 for number in EXIT_CODES})
    result["differing"] = []
    for trial in range(trials):
        folder = place / name / f"trial-{trial}"
        done = False
        for turn in range(kills):
            moment = MOMENTS[(trial + turn) % len(MOMENTS)]
            number = rng.choice(list(EXIT_CODES))
            delay_s = rng.uniform(0, train_s * 0.7)
            since = time.time()
            process = start(configuration, folder, turn > 0, log)
            code = kill(process, folder, since, moment, number, delay_s)
            if code is None or code == 0:
                result["late"] += 1
                done = process.returncode == 0
                if not done:
                    raise SystemExit(f"{name}: failed\n{log.read_text(errors='replace')[-2000:]}")
                break
            result["kills"] += 1
            result[moment] += 1
            result[number.name] += 1
            if code != EXIT_CODES[number]:
                result["wrong_code"] += 1
                print(f"{name}: {number.name} gave exit code {code}", file=sys.stderr)
        if not done and start(configuration, folder, True, log).wait() != 0:
            raise SystemExit(f"{name}: --resume failed\n{log.read_text(errors='replace')[-2000:]}")
        differing = compare(reference, folder)
        if differing:
            result["differing"].append((trial, differing))
            print(f"{name}, trial {trial}: {', '.join(differing)}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    return result


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=4, help="runs per configuration")
    parser.add_argument("--kills", type=int, default=3, help="kills per run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in")
    options = parser.parse_args(arguments)
    place = options.keep or Path(tempfile.mkdtemp(prefix="kill-campaign-"))
    rng = random.Random(options.seed)
    rows = []
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, seed {options.seed}", flush=True)
    heads = ("kills", *MOMENTS, *(number.name for number in EXIT_CODES), "late", "wrong_code")
    print(f"{'configuration':14}{'trials':>8}" + "".join(f"{h:>12}" for h in heads) + f"{'differing':>12}")
    for name in options.only:
        row = campaign(name, options.trials, options.kills, rng, place)
        rows.append(row)
        figures = "".join(f"{row[head]:12}" for head in heads)
        print(f"{name:14}{options.trials:8}{figures}{len(row['differing']):12}", flush=True)
    totals = "".join(f"{sum(row[head] for row in rows):12}" for head in heads)
    differing = sum(len(row["differing"]) for row in rows)
    print(f"{'together':14}{options.trials * len(rows):8}{totals}{differing:12}")
    if options.keep is None:
        shutil.rmtree(place)
    return 5 if differing or any(row["wrong_code"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
