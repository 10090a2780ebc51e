"""Counts how wrong inputs are refused: command lines, YAML files, folders, checkpoints and images.

Usage: python benchmarks/refused_inputs.py [--only KIND ...] [--seed 1] [--csv FILE] [--again]

Each case is a wrong input, derived from a declaration or from a right input that is damaged, and a command that gets
it.  The right input comes first: the command must accept it.  Every command runs in a process and a folder of its own,
and each rule is checked:

  code       the exit code is 2, 3, 4 or 6
  one line   stderr has one line of `error:` and one of `hint:`
  no trace   there is no traceback, and nothing is called a bug
  unchanged  no file was written or changed
  no TensorFlow   TensorFlow was not imported
  in time    the command took less than 20 s

The table has the number of cases of each kind, and of those that break a rule; the exit code is 5 if one does.  After a
stop, the same command goes on with the next kind.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

from measuring import Journal, Provenance, add_again, run_ipucnn, write_rows

from ipucnn import cli
from ipucnn.config.options import SPECS
from ipucnn.config.spec import OptionSpec

CODES = (2, 3, 4, 6)
LIMIT_S = 20.0
RULES = ("code", "one line", "no trace", "unchanged", "no TensorFlow", "in time")
TRAIN = (
    "train toy_model --dataset digits --num-epochs 1 --limit-train 32 --limit-eval 16 --device cpu --seed 1"
)


class Case(NamedTuple):
    """A wrong input.

    Attributes:
        words: the command line that gets it.
        make: makes the input's files in a new folder.
        is_right: whether the input is right, and accepted.
    """

    words: List[str]
    make: Callable[[Path], None] = lambda folder: None
    is_right: bool = False


def illegal_values(spec: OptionSpec) -> Iterator[str]:
    """Yields texts that the declaration of an option excludes."""
    if spec.is_bool or spec.choices or spec.kind.is_number:
        yield "neither-of-them"
    if spec.kind.is_number:
        yield from ("nan", "1e999", *([] if spec.kind.is_list else [""]))  # an empty list is a value
        least, most, above, below = spec.within
        if least is not None and spec.name != "kfold":  # one fold stands for none
            yield str(least - 1)
        if most is not None:
            yield str(most * 1.001 if most > 2.0**53 else most + 1)
        yield from (str(bound) for bound in (above, below) if bound is not None)


def command_lines(rng: random.Random) -> Iterator[Case]:
    """Yields values that options exclude, misspelt names, and words too many or too few."""
    starts = {
        "train": "train toy_model --dataset digits --dry-run",
        "benchmark": "benchmark toy_model",
        "plan-splits": "plan-splits resnet18 --stages 2",
    }
    for command, start in starts.items():
        yield Case([*start.split(), *([] if command == "plan-splits" else ["--print-config"])], is_right=True)
        for spec in SPECS:
            if command in spec.commands:
                for value in illegal_values(spec):
                    yield Case([*start.split(), f"--{spec.key}={value}"])
                place = rng.randrange(len(spec.key))
                yield Case([*start.split(), f"--{spec.key[:place]}_x_{spec.key[place:]}", "1"])
    for line in (
        *("trian", "train lenett", "train lenet extra", "train --config nothing", "train --config-path nothing.yml"),
        *("evaluate", "evaluate nothing", "infer nothing image.png", "export nothing", "benchmark --suite nothing"),
        *("plan-splits vgg99", "verify-dataset nothing", "runs nothing", "train --dataset nothing", "models vgg99"),
    ):  # fmt: skip
        yield Case(line.split())


def yaml_files(rng: random.Random) -> Iterator[Case]:
    """Yields configurations with excluded values, unknown keys, and texts that are no configuration."""
    texts = [
        "",
        "- a\n",
        "a: [\n",
        "x: 1\n",
        "\tx: 1\n",
        "x:\n  y: !!python/name:os.system\n",
        "x: {a: 1, a: 2}\n",
        "\0",
    ]
    for spec in SPECS:
        if spec.in_yaml:
            texts += [f"x:\n  {spec.key}: {json.dumps(value)}\n" for value in illegal_values(spec) if value]
            texts += (
                [f"x:\n  {spec.key}: {{deep: {{deeper: 1}}}}\n"] if not spec.key.endswith("params") else []
            )
            place = rng.randrange(len(spec.key))
            texts.append(f"x:\n  {spec.key[:place]}_{rng.choice('xyz')}{spec.key[place:]}: 1\n")
    yield Case(
        ["train", "toy_model", "--dataset", "digits", "--dry-run", "--config-path", "c.yml", "--config", "x"],
        right_yaml,
        True,
    )
    for text in texts:
        words = [
            "train",
            "toy_model",
            "--dataset",
            "digits",
            "--dry-run",
            "--config",
            "x",
            "--config-path",
            "c.yml",
        ]
        yield Case(words, lambda folder, text=text: write(folder / "c.yml", text.encode()))  # type: ignore[misc]
    for text in (
        "",
        "rows: []\n",
        "rows: [train]\n",
        "rows: [benchmark lenett]\n",
        "row: [benchmark lenet]\n",
    ):
        words = ["benchmark", "--suite", "s.yml", "--print-config"]
        yield Case(words, lambda folder, text=text: write(folder / "s.yml", text.encode()))  # type: ignore[misc]


def folders(rng: random.Random) -> Iterator[Case]:
    """Yields folders that are no data set, or parts of one."""
    makers: Dict[str, Callable[[Path], None]] = {
        "absent": lambda folder: None,
        "empty": lambda folder: folder.mkdir(),
        "a file": lambda folder: write(folder, b"x"),
        "no images": lambda folder: write(folder / "train" / "a" / "notes.txt", b"x"),
        "empty classes": lambda folder: (folder / "train" / "a").mkdir(parents=True),
        "one subset": lambda folder: write(folder / "train" / "a" / "1.png", png()),
        "two folders of one purpose": two_validation_sets,
        "masks without images": lambda folder: write(folder / "masks" / "1.png", png()),
        "images without masks": lambda folder: write(folder / "images" / "1.png", png()),
        "an archive": lambda folder: write(folder / "all.zip", b"PK\3\4"),
        "half of MNIST": lambda folder: write(folder / "train-images-idx3-ubyte", b"\0\0\x08\x03" + bytes(12)),
        "half of CIFAR-10": lambda folder: write(folder / "cifar-10-batches-py" / "data_batch_1", b"\x80"),
        "an empty record": lambda folder: write(folder / "train-00000-of-00001", b""),
        "a torn record": lambda folder: write(folder / "train-00000-of-00001", bytes(range(40))),
        "a folder in a loop": looped_folder,
    }  # fmt: skip
    for words in ("train lenet --dry-run --micro-batch-size 2 --dataset data", "verify-dataset data"):
        yield Case(words.split(), right_folder, True)
    for make in makers.values():
        for words in (
            "train lenet --dry-run --dataset data",
            "verify-dataset data",
            "train lenet --dataset data",
        ):
            yield Case(words.split(), lambda folder, make=make: make(folder / "data"))  # type: ignore[misc]


def checkpoints(rng: random.Random) -> Iterator[Case]:
    """Yields runs with a damaged checkpoint or configuration: cut off, a changed byte, another content."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        ended = run_ipucnn([*TRAIN.split(), "--run-dir", str(run)])
        if ended.code:
            raise SystemExit(f"ipucnn {TRAIN} failed:\n{ended.stderr[-2000:]}")
        names = sorted(f"checkpoints/{path.name}" for path in (run / "checkpoints").iterdir())
        words = ["evaluate", "run", "--device", "cpu"]
        yield Case(words, lambda folder: copy(run, folder), True)
        for name in [*names, "config.yml"]:
            # The command reads the checkpoint that it names, and the configuration.
            which = ["--checkpoint", Path(name).name] if name in names else []
            data = (run / name).read_bytes()
            contents = [b"", b"not this", data[: len(data) // 2], data[1:]]
            if not which:
                contents.append(data + data)  # which is a whole archive for a checkpoint
            else:
                contents.append(data[:-1])
                for _ in range(10):
                    place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
                    contents.append(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            for content in contents:

                def make(folder: Path, name: str = name, content: bytes = content) -> None:
                    copy(run, folder)
                    write(folder / "run" / name, content)

                yield Case([*words, *which], make)


def images(rng: random.Random) -> Iterator[Case]:
    """Yields class folders in which one image is damaged: cut off at some place, or of another kind."""
    yield Case(["verify-dataset", "data"], right_folder, True)
    for form, suffix in (("PNG", "png"), ("JPEG", "jpg"), ("BMP", "bmp"), ("TIFF", "tiff"), ("GIF", "gif")):
        data = png(form)
        cuts = [rng.randrange(4, len(data) * 3 // 4) for _ in range(5)]
        for content in (b"", b"no image", *(data[:cut] for cut in cuts)):

            def make(folder: Path, name: str = f"x.{suffix}", content: bytes = content) -> None:
                right_folder(folder)
                write(folder / "data" / "train" / "a" / name, content)

            yield Case(["verify-dataset", "data"], make)


KINDS = {
    "command lines": command_lines,
    "YAML": yaml_files,
    "folders": folders,
    "checkpoints": checkpoints,
    "images": images,
}


def right_yaml(folder: Path) -> None:
    write(folder / "c.yml", b"x:\n  micro-batch-size: 2\n")


def right_folder(folder: Path) -> None:
    """Makes a folder with two classes, of two images in each subset."""
    for number, (part, name, i) in enumerate(itertools.product(("train", "val"), "ab", (0, 1))):
        write(folder / "data" / part / name / f"{i}.png", png(seed=number))


def two_validation_sets(folder: Path) -> None:
    for part, name in itertools.product(("train", "val", "valid"), "ab"):
        write(folder / part / name / "1.png", png())


def looped_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "train").symlink_to(folder)


def copy(run: Path, folder: Path) -> None:
    shutil.copytree(run, folder / "run")


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def png(form: str = "PNG", seed: int = 0) -> bytes:
    """Returns an image file of 16x16 pixels of noise."""
    from PIL import Image

    data = random.Random(seed).getrandbits(16 * 16 * 3 * 8).to_bytes(16 * 16 * 3, "little")
    file = io.BytesIO()
    Image.frombytes("RGB", (16, 16), data).save(file, form)
    return file.getvalue()


def broken_rules(case: Case) -> Tuple[List[str], str]:
    """Runs a case in a process and a folder of its own; returns the rules that it breaks, and what it printed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        folder.mkdir()
        case.make(folder)
        before, began = state(folder), time.monotonic()
        output, result = Path(temporary) / "output", Path(temporary) / "result"
        child = os.fork()
        if child == 0:
            run_here(case.words, folder, output, result)
        os.waitpid(child, 0)
        seconds, printed = time.monotonic() - began, output.read_text(errors="replace")
        code, has_tensorflow = json.loads(result.read_text()) if result.exists() else (1, False)
        lines = [
            [line for line in printed.splitlines() if line.startswith(kind)] for kind in ("error: ", "hint: ")
        ]
        kept = {
            "code": code == 0 if case.is_right else code in CODES,
            "one line": [len(each) for each in lines] == ([0, 0] if case.is_right else [1, 1]),
            "no trace": not any(
                word in printed for word in ("Traceback", "a bug of ipucnn", "Exception ignored")
            ),
            "unchanged": state(folder) == before or case.is_right,
            "no TensorFlow": not has_tensorflow or case.is_right,
            "in time": seconds < LIMIT_S or case.is_right,
        }
    return [rule for rule in RULES if not kept[rule]], f"exit code {code}: {printed[-600:]}"


def run_here(words: List[str], folder: Path, output: Path, result: Path) -> None:
    """Runs ``ipucnn`` in this process, which then ends."""
    had_tensorflow = "tensorflow" in sys.modules  # in a process of tests
    os.chdir(folder)
    with open(output, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        with contextlib.suppress(SystemExit):
            code = cli.run(words)
            sys.stdout.flush()
            sys.stderr.flush()
            result.write_text(json.dumps([code, "tensorflow" in sys.modules and not had_tensorflow]))
    finally:
        os._exit(0)


def state(folder: Path) -> List[Any]:
    """Returns the files below a folder, with their content."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_symlink())
    return [(str(path), path.read_bytes() if path.is_file() else None) for path in paths]


def count(kind: str, seed: int) -> Dict[str, Any]:
    """Runs the cases of a kind; returns its row."""
    row: Dict[str, Any] = {"kind": kind, "cases": 0, **dict.fromkeys(RULES, 0)}
    for case in KINDS[kind](random.Random(seed)):
        rules, printed = broken_rules(case)
        row["cases"] += 1
        for rule in rules:
            row[rule] += 1
        if rules:
            print(
                f"{', '.join(rules)}: ipucnn {shlex.join(case.words)}\n{printed}\n",
                file=sys.stderr,
                flush=True,
            )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    add_again(parser)
    options = parser.parse_args()
    os.environ.update(NO_COLOR="1", COLUMNS="1000", CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
    journal = Journal("refused_inputs", options.again)
    print(f"{'kind':14}{'cases':>7}  cases that break the rule: {', '.join(RULES)}", flush=True)
    total = 0
    for kind in options.only:
        how = Provenance(f"python benchmarks/refused_inputs.py --seed {options.seed}", ("numpy", "pillow"))
        row = journal.take((kind, options.seed), lambda: {**count(kind, options.seed), **how.columns()})
        print(f"{kind:14}{row['cases']:7}  {', '.join(str(row[rule]) for rule in RULES)}", flush=True)
        total += sum(row[rule] for rule in RULES)
        if options.csv is not None:
            write_rows(options.csv, [row], ("kind",))
    return 5 if total else 0


if __name__ == "__main__":
    sys.exit(main())
