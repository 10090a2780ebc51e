"""Writes everything users see of a tree to a folder, and compares another tree with it.

    python benchmarks/golden.py --write DIR [--sections help config plan run poplar]
    python benchmarks/golden.py --compare DIR [--sections ...]

``--write`` records the output of the ``ipucnn`` that Python imports (set PYTHONPATH for another tree).  ``--compare``
records it again and prints the differences from DIR; the exit code is 5 if there are any.  Everything comes from the
command line, so trees of different inner structure can be compared:

  help     every ``--help`` page
  config   ``--print-config --json`` of 30 presets
  plan     ``plan-splits``: the report, and the plan.yml of 40 plans
  run      metrics.jsonl, program.json and the SHA-256 of the checkpoints of 6 short seeded runs on the host
  poplar   the same of 12 runs of the Poplar session on the tests' test double of the SDK, and the log of its calls

Measured figures are left out.  The runs need processes of their own: some minutes on two cores.
"""

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence

EXIT_DIFFERENT = 5
REPOSITORY = Path(__file__).resolve().parent.parent

COMMANDS = ("train", "evaluate", "infer", "benchmark", "verify-dataset", "plan-splits", "models", "doctor")

PRESETS = """
toy_model; mnist_cnn; lenet; lenet@digits; cifar_resnet8; cifar_resnet8@digits; cifar_resnet20; cifar_resnet56@digits;
efficientnet-b0; efficientnet-b0@small; efficientnet-b0@digits; efficientnet-b0-g16; efficientnet-b4; efficientnet-b7;
efficientnetv2-s; efficientnetv2-l; resnet18; resnet18@small; resnet50; resnet50@digits; resnet50-keras; resnet101;
resnext101_32x4d; densenet121; mobilenet; mobilenetv2; mobilenetv3-large; vgg16; unet; inceptionv3
"""

PLANS = """
cifar_resnet8 --stages 2
cifar_resnet8 --stages 3 --schedule Interleaved
cifar_resnet8 --stages 2 --recomputation on --compare equal-layers equal-blocks params
cifar_resnet8 --stages 4 --schedule Sequential
cifar_resnet8 --stages 4 --schedule Sequential --recomputation on
cifar_resnet8 --stages 2 --micro-batch-size 512
cifar_resnet8 --ipus 4
cifar_resnet8 --stages 1
cifar_resnet8 --stages 2 --optimizer rmsprop --optimizer-params {"centered":1}
lenet --stages 2
mnist_cnn --stages 2 --schedule Interleaved
toy_model --stages 2
resnet18 --stages 2
resnet18 --stages 4 --schedule Interleaved --available-memory-proportion 20
resnet18 --ipus 8 --micro-batch-size 4
resnet18 --stages 2 --optimizer lars --optimizer-params {"momentum":0.9}
resnet18 --stages 2 --optimizer adam --optimizer-params {}
resnet18 --stages 2 --optimizer rmsprop --optimizer-params {"momentum":0.9}
resnet18 --stages 2 --optimizer rmsprop --optimizer-params {}
resnet18 --stages 2 --optimizer-state-offloading
resnet50 --stages 2
resnet50 --stages 4
resnet50 --stages 4 --schedule Interleaved --recomputation on
resnet50 --stages 4 --schedule Sequential --ipus-per-replica 4
resnet50 --stages 2 --precision 32.32
resnet50 --stages 2 --precision 16.32 --num-replicas 4
resnet50 --stages 4 --available-memory-proportion 60 30 20 60
resnet50 --stages 4 --micro-batch-size 16
resnet50 --ipus 16
resnet50 --stages 2 --eight-bit-transfer --half-partials
resnet50-keras --stages 2
resnext101_32x4d --stages 4 --recomputation on
densenet121 --stages 4
efficientnet-b0 --stages 2
efficientnet-b0 --stages 4 --schedule Interleaved
efficientnet-b4 --stages 4 --recomputation on --micro-batch-size 1
efficientnet-b4 --stages 2 --micro-batch-size 64
mobilenetv2 --stages 2 --system pod64
unet --stages 4 --available-memory-proportion 70 30 45 70
unet --stages 4 --schedule Interleaved --optimisations
"""

SMALL = (
    "--dataset digits --limit-train 96 --limit-eval 40 --num-epochs 2 --seed 3 --lr-schedule const "
    "--learning-rate 0.01 --micro-batch-size 4 --run-dir run --json"
)
RUNS = """
toy_model
toy_model --gradient-accumulation-count 3 --num-replicas 2 --optimizer rmsprop --optimizer-params {}
lenet --num-replicas 4 --optimizer lars --optimizer-params {"momentum":0.0}
cifar_resnet8 --image-size 16 --num-replicas 2 --dbn-replica-group-size 2
cifar_resnet8 --image-size 16 --ipus-per-replica 2 --pipeline-splits auto --gradient-accumulation-count 4
toy_model --optimizer adam --optimizer-params {} --pad-dataset --validation-num-replicas 2
"""
POPLAR_RUNS = """
toy_model
toy_model --num-replicas 2 --eight-bit-transfer
toy_model --gradient-accumulation-count 3 --available-memory-proportion 30
toy_model --precision 16.16 --stochastic-rounding ON
toy_model --precision 16.32 --half-partials
toy_model --num-replicas 2 --dbn-replica-group-size 2
toy_model --optimizer adam --optimizer-params {} --optimizer-state-offloading --gradient-accumulation-count 2
toy_model --ipus-per-replica 2 --pipeline-splits auto --gradient-accumulation-count 4
toy_model --ipus-per-replica 2 --gradient-accumulation-count 4 --available-memory-proportion 20 40 --recomputation
toy_model --ipus-per-replica 2 --gradient-accumulation-count 4 --available-memory-proportion 20 25 40 45
toy_model --ipus-per-replica 2 --gradient-accumulation-count 2 --pipeline-schedule Interleaved --num-replicas 2
toy_model --ipus-per-replica 2 --gradient-accumulation-count 4 --pipeline-validation-model
"""


def lines(text: str) -> List[str]:
    """Joins lines."""
    return [" ".join(line.split()) for line in text.replace(";", "\n").splitlines() if line.strip()]


def called(arguments: Sequence[str]) -> str:
    """Returns exit code, stdout and stderr of a command that runs in this process."""
    from ipucnn import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.run(list(arguments))
        except SystemExit as ending:
            code = int(ending.code or 0)
    return f"$ ipucnn {' '.join(arguments)}\nexit {code}\n{out.getvalue()}--- stderr\n{err.getvalue()}"


def write_help(folder: Path) -> None:
    """Writes every help page."""
    for command in ("", *COMMANDS):
        (folder / f"{command or 'ipucnn'}.txt").write_text(
            called([*command.split(), "--help"]), encoding="utf-8"
        )


def write_config(folder: Path) -> None:
    """Writes the resolved configurations of presets."""
    for name in lines(PRESETS):
        text = called(["train", "--config", name, "--print-config", "--json"])
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def write_plan(folder: Path) -> None:
    """Writes reports and saved plans."""
    for number, line in enumerate(lines(PLANS)):
        more = [] if "--optimisations" in line else ["--save", "plan.yml"]
        text = called(["plan-splits", *line.split(), *more])
        with contextlib.suppress(FileNotFoundError):
            text += "--- plan.yml\n" + Path("plan.yml").read_text(encoding="utf-8")
            os.unlink("plan.yml")
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")


def _run(arguments: List[str]) -> str:
    """Returns the files of a training run without measured figures."""
    text = called(arguments)
    head, _, err = text.partition("--- stderr\n")
    rows = head.splitlines()[0:2]
    rows += [line for line in err.splitlines() if line.startswith(("warning", "error", "hint"))]
    for name in ("program.json", "metrics.jsonl"):
        path = Path("run") / name
        if path.exists():
            rows += [f"--- {name}", path.read_text(encoding="utf-8")]
    for path in sorted(Path("run").glob("checkpoints/*")):
        rows.append(f"--- {path.name}: {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return "\n".join(rows) + "\n"


def one_run(line: str) -> str:
    """Trains on the host."""
    return _run(["train", *line.split(), *SMALL.split(), "--device", "cpu"])


def one_poplar_run(line: str) -> str:
    """Trains on the test double, and records the log of its calls."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from poplar_double import installed

    with installed() as machine:
        text = _run(["train", *line.split(), *SMALL.split()])
    log = [
        f"{call} {json.dumps(arguments, default=_plain, sort_keys=True)}" for call, arguments in machine.log
    ]
    return text + "--- log\n" + "\n".join(_without_addresses(entry) for entry in log) + "\n"


def _plain(value: Any) -> Any:
    attributes = getattr(value, "__dict__", None)
    return {str(k): _short(v) for k, v in attributes.items()} if attributes else _short(value)


def _short(value: Any) -> str:
    return repr(value)[:400]


def _without_addresses(text: str) -> str:
    """Removes object addresses and the temporary folder's path."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    return text.replace(os.getcwd(), ".")


def _in_processes(kind: str, rows: List[str], folder: Path) -> None:
    """Runs each training in a process and an empty folder of its own."""
    for number, line in enumerate(rows):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--one", kind, line],
                cwd=empty,
                env=os.environ,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
            )
        text = done.stdout.partition("=== golden\n")[2] or f"exit {done.returncode}\n{done.stderr}"
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
        print(f"{kind} {number + 1} of {len(rows)}", file=sys.stderr, flush=True)


SECTIONS: Dict[str, Any] = {
    "help": write_help,
    "config": write_config,
    "plan": write_plan,
    "run": lambda folder: _in_processes("run", lines(RUNS), folder),
    "poplar": lambda folder: _in_processes("poplar", lines(POPLAR_RUNS), folder),
}


def write(folder: Path, sections: Sequence[str]) -> None:
    """Writes the output of this tree."""
    import ipucnn

    where = Path(ipucnn.__file__).resolve().parent.parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(where), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = os.getcwd()
    for section in sections:
        place = folder / section
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as empty:
            os.chdir(empty)
            try:
                SECTIONS[section](place)
            finally:
                os.chdir(before)


def compare(there: Path, here: Path, sections: Sequence[str]) -> int:
    """Prints the differences; returns how many files differ."""
    count = 0
    for section in sections:
        old, new = ({p.name: p for p in (base / section).glob("*")} for base in (there, here))
        for name in sorted({*old, *new}):
            texts = [
                by_name[name].read_text(encoding="utf-8").splitlines() if name in by_name else []
                for by_name in (old, new)
            ]
            if texts[0] == texts[1]:
                continue
            count += 1
            title = f"{section}/{name}"
            print(
                "\n".join(difflib.unified_diff(*texts, f"there/{title}", f"here/{title}", n=1, lineterm=""))
            )
    print(f"{count} files differ" if count else "no file differs")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", metavar="DIR", type=Path)
    parser.add_argument("--compare", metavar="DIR", type=Path)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(COLUMNS="100", NO_COLOR="1", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    if options.one is not None:
        from ipucnn.sessions.host.environment import set_variables

        set_variables()
        kind, line = options.one
        print("=== golden\n" + {"run": one_run, "poplar": one_poplar_run}[kind](line), end="")
        return 0
    if (options.write is None) == (options.compare is None):
        parser.error("give --write DIR or --compare DIR")
    if options.write is not None:
        write(options.write.resolve(), options.sections)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.sections)
        return EXIT_DIFFERENT if compare(options.compare.resolve(), Path(folder), options.sections) else 0


if __name__ == "__main__":
    sys.exit(main())
