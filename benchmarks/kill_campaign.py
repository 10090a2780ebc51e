"""Kills training runs at random moments, continues them, and compares every byte with an uninterrupted run.

Usage: python benchmarks/kill_campaign.py [--kills N] [--per-run N] [--seed N] [--only NAME ...] [--jobs N]
           [--minutes M] [--broken [NAME ...]] [--workers N ...] [--csv FILE] [--again]

Runs of each configuration are killed several times (SIGINT, SIGTERM, SIGHUP or SIGKILL; before the first weight update,
at a random moment, while a checkpoint is being written, before an older one is deleted, during validation, or between
the pictures, the report and the page that a finished run writes) and continued with --resume each time, until they end.
Some are stopped and continued (SIGSTOP, SIGCONT) before they are killed, some have no stderr or one whose reader has
closed it, and each process has another number of loading threads.  ``metrics.jsonl``, ``program.json``, ``config.yml``
and all checkpoints must then be those of an uninterrupted run, for each fold of a cross-validation, too.  Every file of
a finished run must exist, and every process must have ended with the exit code of its signal and without a traceback.
Otherwise the exit code is 5.  A process seen at such a moment is stopped, checked to be still there, and then killed;
"missed" counts the kills that came at another moment than the intended one.

The runs and counts are kept in .measurements/: after a stop, the same command goes on with the next run.  The rows of
``--csv`` are written after each run.

With ``--broken`` the processes run builds that this script breaks on purpose, to show that the campaign would notice.
The exit code is 5 if it noticed each of them, 1 if one escaped.

With ``--workers 1 2 4`` runs of two configurations, in turn, are trained by 1, 2 or 4 processes of this machine
(``mpiexec``), a number drawn each time.  One random process gets SIGINT, SIGTERM, SIGKILL or SIGSTOP at a random moment
of training.  All must end with the exit code that docs/cluster.md lists, and the bytes must be those of one
uninterrupted process.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import measuring
from measuring import Provenance, add_again, kept_folder, write_rows

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -signal.SIGKILL}
MOMENTS = ("before", "any time", "checkpoint", "validation", "deletion", "page")
STDERRS = ("log", "log", "closed", "no reader")
THREADS = (1, 2, 3, 5, 8)
# Many processes of a busy machine may start at the same time.
START_LIMIT_S = 900.0

# The code of a training process. It makes a folder as soon as it handles signals: before that, Python ends otherwise.
PROGRAM = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from ipucnn import interrupts
interrupts.listen()
os.mkdir(sys.argv.pop(1))
{broken}
from ipucnn.__main__ import main
main()
"""

BROKEN: Dict[str, str] = {
    # A value of the optimizer's state that this build does not save.
    "slot": """
from ipucnn.runs.writer import RunWriter
write = RunWriter.write_checkpoint
def write_checkpoint(self, name, weights, slots, meta):
    changed = {first: slots[first] * 0 for first in list(slots)[:1]}
    return write(self, name, weights, {**slots, **changed}, meta)
RunWriter.write_checkpoint = write_checkpoint
""",
    # This build draws the order and augmentation of a continued run from another seed.
    "seed": """
from dataclasses import replace
from ipucnn.runs.resume import Continue
from ipucnn.runs.train import TrainingRun
dataset = TrainingRun.dataset
def other_dataset(self, *args, **named):
    kept = self.context
    self.context = replace(kept, seed=kept.seed + isinstance(kept.start, Continue))
    try:
        return dataset(self, *args, **named)
    finally:
        self.context = kept
TrainingRun.dataset = other_dataset
""",
    # A continued run of this build writes the last row again.
    "row": """
from ipucnn.runs.writer import RunWriter
reopen = RunWriter.reopen
RunWriter.reopen = lambda self, config, program, history: reopen(self, config, program, [*history, *history[-1:]])
""",
}
BROKEN_CONFIGURATION = "cnn"

# Together they have all optimizers and schedules, batch norm, group norm and none, dropout, augmentation, replicas,
# accumulation, distributed, pipelined and precise batch norm, segmentation, executions cut in the middle.
CONFIGURATIONS: Dict[str, str] = {
    "cnn": "mnist_cnn --dataset digits --augment --dropout 0.2 --replicas 2 --micro-batch-size 8 "
    "--gradient-accumulation-count 2 --optimizer adam --optimizer-params {} --lr-schedule cosine --num-epochs 40 "
    "--ckpts-per-epoch 1 --logs-per-epoch 2",
    "resnet": "cifar_resnet8 --dataset digits --augment --micro-batch-size 16 --optimizer sgd --optimizer-params "
    "'{\"momentum\": 0.9}' --lr-schedule stepped --lr-schedule-params "
    '\'{"boundaries": [0.5, 0.75], "values": [1, 0.1, 0.01]}\' '
    '--lr-warmup-params \'{"warmup_mode": "shift", "warmup_epochs": 1}\' --limit-train 640 --num-epochs 6 '
    "--ckpts-per-epoch 2 --logs-per-epoch 4 --keep-checkpoints 1",
    "pipeline": "cifar_resnet8 --dataset digits --augment --ipus-per-replica 2 --replicas 2 --micro-batch-size 4 "
    "--gradient-accumulation-count 8 --optimizer rmsprop --optimizer-params {} --limit-train 640 --num-epochs 6 "
    "--ckpts-per-epoch 1 --lr-schedule const --precise-batch-norm 0",
    "efficientnet": "efficientnet-b0 --dataset digits --augment --replicas 4 --dbn-replica-group-size 2 "
    "--micro-batch-size 4 --limit-train 128 --limit-eval 40 --num-epochs 4 --ckpts-per-epoch 2 --logs-per-epoch 4 "
    "--keep-checkpoints 2",
    "unet": "unet --dataset membranes --augment --base-filters 2 --image-size 188 --optimizer adam "
    "--optimizer-params {} --lr-schedule exponential --lr-schedule-params "
    '\'{"initial_learning_rate": 0.0005, "epochs_to_decay": 2, "decay_rate": 0.5}\' --num-epochs 6 --ckpts-per-epoch 1',
    "folds": "mnist_cnn --dataset digits --kfold 2 --augment --dropout 0.2 --micro-batch-size 16 --limit-train 640 "
    "--num-epochs 8 --ckpts-per-epoch 1 --logs-per-epoch 2 --keep-checkpoints 1",
    "lenet": "lenet --dataset digits --augment --norm-layer none --micro-batch-size 8 --replicas 4 --optimizer lars "
    "--optimizer-params {} --lr-schedule polynomial --num-epochs 24 --logs-per-epoch 1/4 --ckpts-per-epoch 1/8 "
    "--validation-freq 4",
}


def start(
    configuration: str,
    folder: Path,
    resume: bool,
    log: Path,
    rng: random.Random,
    broken: str = "",
    stderr: str = "log",
) -> "subprocess.Popen[bytes]":
    """Starts a training process; the file ``started`` appears as soon as it handles signals.

    Args:
        configuration: arguments of ``ipucnn train``.
        folder: the run folder.
        resume: continue the run.
        log: file for the output.
        rng: chooses the number of loading threads.
        broken: key of ``BROKEN``, or "".
        stderr: one of ``STDERRS``.
    """
    shutil.rmtree(mark_of(folder), ignore_errors=True)
    words = [
        sys.executable,
        "-c",
        PROGRAM.format(broken=BROKEN[broken] if broken else ""),
        str(mark_of(folder)),
    ]
    words += ["train", *shlex.split(configuration), "--seed", "11", "--run-dir", str(folder)]
    words += ["--pipeline-num-parallel", str(rng.choice(THREADS)), *(["--resume"] if resume else [])]
    with open(log, "ab") as out:
        if stderr == "closed":
            words = ["sh", "-c", 'exec "$@" 2>&-', "sh", *words]
            return measuring.start(words, stdout=out, stderr=out)
        if stderr == "no reader":
            reading, writing = os.pipe()
            try:
                return measuring.start(words, stdout=out, stderr=writing)
            finally:
                os.close(writing)
                os.close(reading)
        return measuring.start(words, stdout=out, stderr=out)


def mark_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".started")


def runs_of(folder: Path) -> List[Path]:
    """Returns the runs in a folder: the folds of a cross-validation, or the folder itself."""
    return sorted(folder.glob("fold-*")) or [folder]


def trained(folder: Path, since: float) -> bool:
    """Whether the process that was started at ``since`` has begun to train."""
    paths = [run / "environment.json" for run in runs_of(folder)]
    return any(path.exists() and path.stat().st_mtime >= since for path in paths)


def is_writing(run: Path, seen: int) -> bool:
    """Whether a checkpoint's temporary file exists."""
    place = run / "checkpoints"
    return place.is_dir() and any(name.endswith(".tmp") for name in os.listdir(place))


def is_ending(run: Path, seen: int) -> bool:
    """Whether a run has written its pictures or its report, but not yet its page."""
    has_some = (run / "report.json").exists() or (run / "predictions.png").exists()
    return has_some and not (run / "report.html").exists()


def is_deleting(run: Path, seen: int) -> bool:
    """Whether there are more numbered checkpoints than the run keeps, so that one is about to be deleted."""
    checkpoints, config = run / "checkpoints", run / "config.yml"
    kept = (
        re.search(r"^keep-checkpoints: (\d+)$", config.read_text(), re.MULTILINE) if config.exists() else None
    )
    if kept is None or not checkpoints.is_dir():
        return False
    return sum(name.startswith("checkpoint-") for name in os.listdir(checkpoints)) > int(kept.group(1))


def is_validating(run: Path, seen: int) -> bool:
    """Whether an execution was recorded after the first ``seen`` bytes, but no validation after it."""
    path = run / "metrics.jsonl"
    if recorded_bytes(run) <= seen:
        return False
    lines = path.read_bytes().splitlines()
    return bool(lines) and b'"execution"' in lines[-1]


def recorded_bytes(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


SIGNS = {"checkpoint": is_writing, "validation": is_validating, "deletion": is_deleting, "page": is_ending}


def wait_for(process: "subprocess.Popen[bytes]", is_so: Any, what: str) -> None:
    """Waits until a condition holds or the process has ended.

    Raises:
        SystemExit: neither within ``START_LIMIT_S``.
    """
    until = time.time() + START_LIMIT_S
    while not is_so() and process.poll() is None:
        if time.time() > until:
            process.kill()
            raise SystemExit(f"{what} within {START_LIMIT_S:.0f} s")
        time.sleep(0.002)


def kill(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    since: float,
    moment: str,
    number: Any,
    delay_s: float,
    wait_s: float,
    stop_s: float,
) -> Optional[Tuple[int, str]]:
    """Kills a training process.

    Args:
        process: the training process of the run in ``folder``, started at ``since``.
        moment: the moment to wait for, ``wait_s`` seconds at most, from ``delay_s`` seconds of training on; with
            "before" the process is killed ``delay_s`` seconds after it began to handle signals, whatever it does then.
        number: the signal.
        stop_s: seconds for which the process is stopped before; 0: it is not stopped.

    Returns:
        Exit code and the moment of the kill; None if the run ended before.
    """
    wait_for(process, mark_of(folder).exists, f"{folder}: the process did not begin")
    hit = "before"
    if moment == "before":
        pause(process, delay_s)
        if trained(folder, since):
            hit = "any time"
    else:
        wait_for(process, lambda: trained(folder, since), f"{folder}: training did not begin")
        # One of several checkpoints or validations, not always the first after the start.
        pause(process, delay_s)
        seen = {run: recorded_bytes(run) for run in runs_of(folder)}
        patience = time.time() + wait_s
        while process.poll() is None:
            if moment == "any time" or time.time() > patience:
                hit = "any time"
                break
            if arrived(process, folder, moment, seen):
                hit = moment
                break
            time.sleep(0.0002)
    if process.poll() is not None:
        return None
    if stop_s:
        process.send_signal(signal.SIGSTOP)
        time.sleep(stop_s)
    process.send_signal(number)
    if stop_s or hit in SIGNS:
        process.send_signal(signal.SIGCONT)
    process.wait(timeout=START_LIMIT_S)
    return process.returncode, hit


def arrived(process: "subprocess.Popen[bytes]", folder: Path, moment: str, seen: Dict[Path, int]) -> bool:
    """Whether the process is at the moment now; if so it is stopped there, so that the signal reaches it there."""
    import psutil

    def is_there() -> bool:
        return any(SIGNS[moment](run, seen.get(run, 0)) for run in runs_of(folder))

    if not is_there() or process.poll() is not None:
        return False
    process.send_signal(signal.SIGSTOP)
    wait_for(
        process,
        lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED,
        f"{folder}: not stopped",
    )
    if process.poll() is None and is_there():
        return True
    process.send_signal(signal.SIGCONT)
    return False


def pause(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Waits for some seconds, or until the process has ended."""
    ready = time.time() + seconds
    while time.time() < ready and process.poll() is None:
        time.sleep(0.001)


def compare(reference: Path, folder: Path) -> List[str]:
    """Returns the files that are missing or are not byte for byte those of the reference run."""
    wrong = []
    for expected in runs_of(reference):
        run = folder / expected.relative_to(reference)
        wrong += [str((run / name).relative_to(folder)) for name in compare_run(expected, run)]
    return wrong + ["folds.json"] * (folds_of(reference) != folds_of(folder))


def folds_of(folder: Path) -> List[str]:
    """Returns the lines of a cross-validation's figures without times; none for another run."""
    path = folder / "folds.json"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if '"train_s"' not in line]


def options_of(run: Path) -> List[str]:
    """Returns the lines of a run's configuration without its folder and the values that each process draws anew."""
    lines = (run / "config.yml").read_text().splitlines()
    return [line for line in lines if not line.startswith(("run-dir:", "pipeline-num-parallel:"))]


def compare_run(reference: Path, folder: Path) -> List[str]:
    """Compares a single run in the same way."""
    if not (folder / "checkpoints").is_dir():
        return ["checkpoints"]
    ends_with = ("predictions.png", "report.json", "report.html")
    finished = [name for name in ends_with if (reference / name).exists() > (folder / name).exists()]
    if options_of(reference) != options_of(folder):
        finished.append("config.yml")
    names = ["metrics.jsonl", "program.json"]
    names += [f"checkpoints/{p.name}" for p in sorted((reference / "checkpoints").iterdir())]
    checkpoints = {f"checkpoints/{p.name}" for p in (folder / "checkpoints").iterdir()}
    extra = sorted(checkpoints - set(names))
    return (
        finished
        + [
            name
            for name in names
            if not (folder / name).is_file()
            or (folder / name).read_bytes() != (reference / name).read_bytes()
        ]
        + extra
    )


def new_result(name: str) -> Dict[str, Any]:
    """Returns the counts of a configuration, all zero."""
    result: Dict[str, Any] = {"name": name, "start_s": 0.0, "train_s": 0.0}
    result.update(dict.fromkeys(COUNTS, 0))
    return result


_writing = threading.Lock()
COUNTS = (
    "runs", "kills", *MOMENTS, "missed", *(number.name for number in EXIT_CODES), "stopped", "no stderr", "late",
    "wrong end", "differing",
)  # fmt: skip


def reference_run(configuration: str, folder: Path, log: Path, broken: str) -> Tuple[float, float]:
    """Trains an uninterrupted run; returns the seconds until it trains, and the seconds of training."""
    since = time.time()
    process = start(configuration, folder, False, log, random.Random(0), broken)
    wait_for(process, lambda: trained(folder, since), f"{folder}: training did not begin")
    began = time.time()
    if process.wait() != 0:
        raise SystemExit(f"{folder}: the uninterrupted run failed\n{log.read_text(errors='replace')[-2000:]}")
    return began - since, time.time() - began


def campaign(
    name: str,
    kills: int,
    per_run: int,
    seed: int,
    place: Path,
    broken: str = "",
    until: float = float("inf"),
    moments: Tuple[str, ...] = MOMENTS,
    after_run: Callable[[Dict[str, Any]], None] = lambda result: None,
) -> Dict[str, Any]:
    """Runs one configuration until ``kills`` kills were made, at most ``per_run`` in one run.

    Runs of an earlier call in ``place`` are continued; ``result.json`` has the counts after each run.

    Args:
        name: key of ``CONFIGURATIONS``.
        kills: total number of kills.
        per_run: the most kills of one run.
        seed: each run draws from this, its configuration's name and its number.
        place: folder for the runs.
        broken: key of ``BROKEN``.
        until: no run begins after that time.
        moments: the moments of the kills, taken in turns.
        after_run: called with the counts after each run.
    """
    configuration, place_of_runs, log = CONFIGURATIONS[name], place / name, place / f"{name}.log"
    place_of_runs.mkdir(parents=True, exist_ok=True)
    saved, reference = place_of_runs / "result.json", place_of_runs / "reference"
    if saved.exists():
        result = json.loads(saved.read_text())
    else:
        shutil.rmtree(reference, ignore_errors=True)
        result = new_result(name)
        result["start_s"], result["train_s"] = reference_run(configuration, reference, log, broken)
        saved.write_text(json.dumps(result))
    while result["kills"] < kills and time.time() < until:
        rng = random.Random(f"{seed} {name} {result['runs']}")
        folder = place_of_runs / f"run-{result['runs']}"
        # Left by a run that was under way when an earlier call ended.
        shutil.rmtree(folder, ignore_errors=True)
        num_kills = min(per_run, kills - result["kills"])
        problem = one_run(configuration, folder, num_kills, rng, log, result, broken, moments)
        result["runs"] += 1
        if problem and broken:
            # Only a difference in bytes counts for a broken build: one that merely failed is an error here.
            raise SystemExit(f"{folder}: the build with a broken {broken} {problem}")
        differing = [problem] if problem else compare(reference, folder)
        if differing:
            result["differing"] += 1
            print(f"{folder}: {', '.join(differing)}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
        saved.write_text(json.dumps(result))
        after_run(result)
        if result["late"] > 3 * kills + 3:
            raise SystemExit(f"{name}: runs end before they can be killed; train longer")
    return result


def one_run(
    configuration: str,
    folder: Path,
    kills: int,
    rng: random.Random,
    log: Path,
    result: Dict[str, Any],
    broken: str,
    moments: Tuple[str, ...],
) -> Optional[str]:
    """Trains one run, kills it up to ``kills`` times and continues it to its end; counts go into ``result``.

    Returns:
        The fault of a process that should have ended well, else None.
    """
    for turn in range(kills):
        moment = moments[(result["runs"] + turn) % len(moments)]
        number = rng.choice(list(EXIT_CODES))
        share_s = result["train_s"] * 0.8 / kills
        delay_s = rng.uniform(0, result["start_s"] if moment == "before" else share_s)
        stop_s = rng.uniform(0.1, 1.0) if rng.random() < 0.25 else 0.0
        if moment in SIGNS:
            share_s = START_LIMIT_S
        if moment == "page":
            delay_s, stop_s = 0.0, 0.0
        stderr, before = rng.choice(STDERRS), log.stat().st_size
        since = time.time()
        process = start(configuration, folder, turn > 0, log, rng, broken, stderr)
        killed = kill(process, folder, since, moment, number, delay_s, share_s, stop_s)
        printed = log.read_bytes()[before:].decode(errors="replace")
        if killed is None or killed[0] == 0:
            result["late"] += 1
            return None if process.returncode == 0 else f"failed: {printed[-2000:]}"
        code, hit = killed
        result["kills"] += 1
        result[hit] += 1
        result["missed"] += hit != moment
        result[number.name] += 1
        result["stopped"] += bool(stop_s)
        result["no stderr"] += stderr != "log"
        if (
            code != EXIT_CODES[number]
            or "Traceback" in printed
            or "bug" in printed
            or "Exception ignored" in printed
        ):
            result["wrong end"] += 1
            print(
                f"{folder}: {number.name} ({hit}) gave exit code {code}\n{printed[-2000:]}", file=sys.stderr
            )
    before = log.stat().st_size
    ended = start(configuration, folder, True, log, rng, broken).wait()
    shutil.rmtree(mark_of(folder), ignore_errors=True)
    if ended != 0:
        return f"--resume failed: {log.read_bytes()[before:].decode(errors='replace')[-2000:]}"
    return None


# Exit codes of `mpiexec` after a signal to one of its processes.  A stopped process is missed after twice the timeout;
# if it is the only one, it is killed.
WORKER_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: 9, signal.SIGSTOP: 7}
RANK_TIMEOUT_S = 8
_WORKERS_COMMON = (
    "cifar_resnet8 --dataset digits --augment --replicas 2 --micro-batch-size 8 --gradient-accumulation-count 4 "
    "--optimizer adam --optimizer-params {} --lr-schedule cosine --limit-train 640 --limit-eval 100 --num-epochs 24 "
    "--ckpts-per-epoch 1 --logs-per-epoch 2 --precise-batch-norm 0 --threads 1"
)
# In a pipeline all workers measure the statistics anew before each checkpoint.
WORKERS_CONFIGURATIONS = {
    "resnet": _WORKERS_COMMON,
    "pipeline": f"{_WORKERS_COMMON} --ipus-per-replica 2",
}
WORKER_DELAY_S = 6.0


def start_workers(
    configuration: str, count: int, most: int, folder: Path, resume: bool, log: Path
) -> "subprocess.Popen[bytes]":
    """Starts ``count`` of at most ``most`` processes."""
    mpiexec = str(Path(sysconfig.get_path("scripts")) / "mpiexec")
    words = [mpiexec, "-n", str(count), sys.executable, "-m", "ipucnn", "train"]
    words += [*shlex.split(WORKERS_CONFIGURATIONS[configuration]), "--seed", "11", "--run-dir", str(folder)]
    words += ["--resume"] if resume else ["--max-workers", str(most)]
    words += ["--rank-timeout", str(RANK_TIMEOUT_S)] if count > 1 else []
    with open(log, "ab") as out:
        # In the background of a script SIGINT is ignored, and an ignored signal stays ignored.
        restore = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        return measuring.start(words, stdout=out, stderr=out, preexec_fn=restore)


def kill_a_worker(
    process: "subprocess.Popen[bytes]", folder: Path, number: Any, rng: random.Random
) -> Optional[int]:
    """Sends a signal to a random process at a random moment of training; returns the exit code.

    It returns None if the run had ended.
    """
    import psutil

    since = time.time()
    wait_for(process, lambda: trained(folder, since), f"{folder}: training did not begin")
    pause(process, rng.uniform(0, WORKER_DELAY_S))
    workers = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
    workers = [worker for worker in workers if "train" in worker.cmdline()]
    if not workers:
        process.wait()
        return None
    chosen = rng.choice(sorted(workers, key=lambda worker: worker.pid))
    try:
        chosen.send_signal(number)
        if number == signal.SIGSTOP and len(workers) == 1:
            chosen.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass
    return process.wait(timeout=START_LIMIT_S)


def worker_campaign(options: argparse.Namespace, place: Path) -> int:
    """Runs the campaign of workers and prints its table; returns the exit code."""
    log, most, saved = place / "workers.log", max(options.workers), place / "workers.json"
    until = time.time() + options.minutes * 60 if options.minutes is not None else float("inf")
    names = list(WORKERS_CONFIGURATIONS)
    counts = {"kills": 0, "runs": 0, "differing": 0, "wrong end": 0, "late": 0}
    counts.update({number.name: 0 for number in WORKER_CODES})
    counts.update({f"{count} workers": 0 for count in options.workers})
    if saved.exists():
        counts.update(json.loads(saved.read_text()))
    else:
        for name in names:
            shutil.rmtree(place / f"reference-{name}", ignore_errors=True)
            if start_workers(name, 1, most, place / f"reference-{name}", False, log).wait():
                raise SystemExit(f"reference of {name}: {log.read_text()[-2000:]}")
        saved.write_text(json.dumps(counts))
    while counts["kills"] < options.kills and time.time() < until:
        folder, turn = place / f"run-{counts['runs']}", 0
        rng = random.Random(f"{options.seed} workers {counts['runs']}")
        # Left by a run that was under way when an earlier call ended.
        shutil.rmtree(folder, ignore_errors=True)
        configuration = names[counts["runs"] % len(names)]
        while turn < options.per_run and counts["kills"] < options.kills:
            count, number = rng.choice(options.workers), rng.choice(list(WORKER_CODES))
            before = log.stat().st_size
            process = start_workers(configuration, count, most, folder, turn > 0, log)
            code = kill_a_worker(process, folder, number, rng)
            printed = log.read_bytes()[before:].decode(errors="replace")
            turn += 1
            if code is None or code == 0:
                counts["late"] += 1
                break
            counts["kills"] += 1
            counts[number.name] += 1
            counts[f"{count} workers"] += 1
            print(
                f"{folder.name}: {number.name} to one of {count} processes gave exit code {code}", flush=True
            )
            is_killed = number == signal.SIGSTOP and count == 1
            if code != WORKER_CODES[signal.SIGKILL if is_killed else number] or "Traceback" in printed:
                counts["wrong end"] += 1
                print(printed[-3000:], file=sys.stderr, flush=True)
        count = rng.choice(options.workers)
        if start_workers(configuration, count, most, folder, True, log).wait():
            raise SystemExit(f"{folder}: --resume with {count} workers failed\n{log.read_text()[-3000:]}")
        counts["runs"] += 1
        differing = compare(place / f"reference-{configuration}", folder)
        if differing:
            counts["differing"] += 1
            print(f"{folder}: {', '.join(differing)}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
        saved.write_text(json.dumps(counts))
        write_counts(options, {"configuration": "workers", **counts})
        print(", ".join(f"{name} {value}" for name, value in counts.items()), flush=True)
    if counts["kills"] < options.kills:
        print(f"{options.kills - counts['kills']} kills are left: the same command goes on")
    return 5 if counts["differing"] or counts["wrong end"] else 0


def self_check(names: List[str], seed: int, place: Path) -> int:
    """Checks that runs of each broken build differ; they are killed twice if there is something to continue from."""
    escaped = 0
    for broken in names:
        row = campaign(
            BROKEN_CONFIGURATION, 2, 2, seed, place / broken, broken, moments=("any time", "checkpoint")
        )
        escaped += not row["differing"]
        how = "caught" if row["differing"] else "NOT caught"
        print(f"build with a broken {broken}: {how} ({row['kills']} kills, {row['runs']} runs)", flush=True)
    return 1 if escaped else 5


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="kills per configuration")
    parser.add_argument("--per-run", type=int, default=4, help="kills of one run, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--jobs", type=int, default=1, help="configurations side by side")
    parser.add_argument("--minutes", type=float, help="begin no run after so long")
    add_again(parser)
    parser.add_argument("--broken", nargs="*", choices=list(BROKEN), help="self-check with broken builds")
    parser.add_argument("--csv", type=Path, help="also write the counts of each configuration there")
    parser.add_argument(
        "--workers", type=int, nargs="+", help="kill processes of a run: how many there may be"
    )
    options = parser.parse_args(arguments)
    kind = "".join(f"-{count}" for count in options.workers or ())
    place = kept_folder(f"kills-{options.seed}-{options.per_run}{kind}", options.again)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, seed {options.seed}", flush=True)
    if options.workers is not None:
        code = worker_campaign(options, place)
    elif options.broken is not None:
        code = self_check(options.broken or list(BROKEN), options.seed, place)
    else:
        code = all_campaigns(options, place)
    return code


def write_counts(options: argparse.Namespace, row: Dict[str, Any]) -> None:
    """Writes the counts of a configuration to the CSV file, if there is one; its rows of other configurations stay."""
    if options.csv is None:
        return
    words = ["--kills", str(options.kills), "--per-run", str(options.per_run), "--seed", str(options.seed)]
    words += (
        ["--workers", *map(str, options.workers)] if options.workers else ["--only", row["configuration"]]
    )
    how = Provenance(f"python benchmarks/kill_campaign.py {' '.join(words)}")
    with _writing:
        write_rows(options.csv, [{**row, **how.columns()}], ("configuration",))


def all_campaigns(options: argparse.Namespace, place: Path) -> int:
    """Runs the campaign of each configuration, and prints the table."""
    until = time.time() + options.minutes * 60 if options.minutes is not None else float("inf")
    width = [max(len(head) + 2, 7) for head in COUNTS]
    print(f"{'configuration':14}" + "".join(f"{head:>{w}}" for head, w in zip(COUNTS, width)), flush=True)

    def line(name: str, row: Dict[str, Any]) -> str:
        return f"{name:14}" + "".join(f"{row[head]:{w}}" for head, w in zip(COUNTS, width))

    def write(row: Dict[str, Any]) -> None:
        write_counts(options, {"configuration": row["name"], **{key: row[key] for key in COUNTS}})

    def begin(name: str) -> Dict[str, Any]:
        row = campaign(
            name, options.kills, options.per_run, options.seed, place, until=until, after_run=write
        )
        write(row)
        return row

    rows = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        begun = {pool.submit(begin, name): name for name in options.only}
        for done in concurrent.futures.as_completed(begun):
            rows.append(done.result())
            print(line(begun[done], rows[-1]), flush=True)
    print(line("together", {head: sum(row[head] for row in rows) for head in COUNTS}))
    left = sum(max(0, options.kills - row["kills"]) for row in rows)
    if left:
        print(f"{left} kills are left: the same command goes on")
    return 5 if any(row["differing"] or row["wrong end"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
