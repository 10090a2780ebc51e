"""Runs the commands of the README and the docs, as a reader would paste them, and compares the shape of their output.

    python benchmarks/paste_docs.py                        # a clean clone in a fresh environment, every page
    python benchmarks/paste_docs.py README.md docs/first-run.md --python .venv/bin/python --minutes 10
    python benchmarks/paste_docs.py --python .venv/bin/python --only plan-splits models    # what trains nothing

The lines of each ``console`` block that begin with ``$ ipucnn`` run one after the other, in a folder for each page; a
line that ends in a backslash continues on the next.  The lines that a page shows below a command must appear in the
command's output in that order, although numbers may differ; ``...`` stands for any lines.  A Python block below a
sentence that ends in "to `FILE.py`:" is written to that file.  A comment above a block changes how it is run:

    <!-- paste: --num-epochs 2 -->     options that shorten the block's trainings
    <!-- paste: benchmark --steps-per-execution 1 -->   options that shorten its measurements
    <!-- paste: exit 3 -->             the exit code of its commands
    <!-- paste: skip, needs IPUs -->   why the block is not run
    <!-- paste: first, train lenet --num-epochs 1 -->   a command that a reader of the page has already run; the
                                                        only comment that may stand above several blocks

Commands that need files of the reader (``DATA``, ``DIR``, ``photos/``, ...) or IPUs are skipped and counted.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
NEEDS = re.compile(
    r"\b(DATA|DIR|OUT|FILE|RUN|more/|photos/|slices/|volume\.tif|cat\.jpg|my_run|bench/|runs/[ab]\b|own\.json)"
    r"|--device ipu|--weights|--wandb|\.h5\b|\.keras\b"
)
# A benchmark's notes on how quiet the machine is: they differ between machines, and while other programs run.
QUIET = re.compile(r"session: warm-up|\s(95 % interval|warm-up|percentiles|other programs)\s")


class Command(NamedTuple):
    """A command of a page.

    Attributes:
        page, line: its place.
        args: the words after ``ipucnn``.
        shown: the lines below it.
        options: options that shorten a training or measurement.
        code: the exit code.
        skip: why it is not run; "" if it is.
    """

    page: str
    line: int
    args: List[str]
    shown: List[str]
    options: List[str]
    code: int
    skip: str


def files(text: str) -> Dict[str, str]:
    """Returns the Python files that a page asks its reader to write, by name."""
    return dict(re.findall(r"to `(\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL))


def joined(text: str) -> Iterator[Tuple[int, str]]:
    """Yields the lines of a page and the number at which each begins; lines that end in a backslash are joined."""
    number = 1
    for line in re.sub(r" \\\n +", "\0", text).splitlines():
        yield number, line.replace("\0", " ")
        number += 1 + line.count("\0")


def commands(page: str, text: str) -> Iterator[Command]:
    """Yields the commands of a page in order."""
    note, inside, command = "", False, None  # type: ignore[var-annotated]
    for number, line in joined(text):
        if not inside:
            comment = re.fullmatch(r"<!-- paste: (first, )?(.*) -->", line)
            if comment and comment.group(1):
                yield Command(page, number, shlex.split(comment.group(2)), [], [], 0, "")
            elif comment:
                note = comment.group(2)
            elif line.startswith("```console"):
                inside = True
            elif line.strip():
                note = ""
            continue
        ends = line.startswith("```")
        if (ends or line.startswith("$ ")) and command is not None:
            yield command
            command = None
        if ends:
            inside, note = False, ""
        elif line.startswith("$ ipucnn "):
            args = shlex.split(line[len("$ ipucnn ") :], comments=True)
            code = re.match(r"exit (\d+)", note)
            skip = note.partition(",")[2].strip() if note.startswith("skip") else ""
            if not skip and NEEDS.search(line):
                skip = "needs files of the reader, a download, or IPUs"
            of, _, cut = note.partition("--")
            options = shlex.split("--" + cut) if cut and (of.strip() or "train") == args[0] else []
            command = Command(page, number, args, [], options, int(code.group(1)) if code else 0, skip)
        elif command is not None:
            command.shown.append(line)


def shape(line: str) -> str:
    """Returns a line without its numbers, units and blanks.

    It also drops parts that only some machines print: an earlier, better accuracy, and packages to install.
    """
    line = re.sub(r" +\((best|after:) [^)]*\)", "", line)
    line = re.sub(r"[-+]?\d[\d,]*(\.\d+)?", "0", line.replace("·", "0"))
    line = re.sub(r"\b(s|ms|us|min|h|k|M|G|T|[KMG]iB|[KMGT]?FLOP/s)\b", "u", line)
    line = re.sub(r"\b0 u( 0 u)*", "0 u", line)
    return " ".join(line.replace("─", "").split())


def missing(shown: Sequence[str], printed: str) -> Optional[str]:
    """Returns the first line of a page that the output lacks after the line before it; None if all are there."""
    rest = [shape(line) for line in printed.splitlines()]
    for line in shown:
        expected = shape(line)
        if not expected or expected == "..." or QUIET.match(line) or set(expected) <= set("0 |.-~=wasltc%()"):
            continue  # drawings and rows of numbers
        if expected not in rest:
            return line
        rest = rest[rest.index(expected) + 1 :]
    return None


def fresh_python(folder: Path) -> Path:
    """Returns the interpreter of a new environment with a clean clone installed in it."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "clone")], check=True)
    venv.create(str(folder / "venv"), with_pip=True)
    python = folder / "venv" / "bin" / "python"
    # The libraries that write exports are an extra; the pages say so.
    subprocess.run([str(python), "-m", "pip", "install", "-q", f"{folder / 'clone'}[export]"], check=True)
    return python


def paste(command: Command, python: Path, folder: Path, timeout: float) -> str:
    """Runs a command in a folder, and writes its output beside the folder; returns the fault, or ""."""
    env: Dict[str, str] = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env.pop("COLUMNS", None)
    try:
        done = subprocess.run(
            [str(python), "-m", "ipucnn", *command.args, *command.options],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {timeout:.0f} s"
    printed = done.stdout.decode("utf-8", "replace")
    folder.with_name(f"{command.page}.{command.line}.txt").write_text(printed, encoding="utf-8")
    if done.returncode != command.code:
        return f"exit code {done.returncode}, not {command.code}: {printed.strip()[-300:]}"
    absent = missing(command.shown, printed)
    return "" if absent is None else f"the page shows what is not printed: {absent.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="pages; the README and all of docs/ without any")
    parser.add_argument(
        "--python", type=Path, help="an interpreter with ipucnn, in place of a fresh environment"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="COMMAND", help="run these alone, such as plan-splits models"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no command after so long")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a command may take")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="a new folder to work in, which is left with every output"
    )
    given = parser.parse_args()
    pages = [Path(page).resolve() for page in given.pages]
    pages = pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    began, counts = time.monotonic(), dict.fromkeys(("right", "wrong", "passed over", "not begun"), 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep.absolute() if given.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=not given.keep)
        python = given.python.absolute() if given.python else fresh_python(folder)
        for page in pages:
            place = folder / page.stem
            place.mkdir()
            text = page.read_text(encoding="utf-8")
            for name, content in files(text).items():
                (place / name).write_text(content, encoding="utf-8")
            for command in commands(page.name, text):
                title = f"{command.page}:{command.line}: ipucnn {shlex.join(command.args)}"[:110]
                if command.skip or (given.only and command.args[0] not in given.only):
                    counts["passed over"] += 1
                    continue
                if time.monotonic() - began > given.minutes * 60:
                    counts["not begun"] += 1
                    continue
                since = time.monotonic()
                wrong = paste(command, python, place, given.timeout)
                counts["wrong" if wrong else "right"] += 1
                took = f"{'WRONG' if wrong else 'right'}  {time.monotonic() - since:5.1f} s"
                print(f"{took}  {title}{': ' + wrong if wrong else ''}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
