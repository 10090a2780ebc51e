"""What ``attack.py`` attacks with: command lines, YAML, run folders and data files.

Everything is drawn from a ``random.Random`` and laid into a sandbox; the same draw gives the same case.  Commands
and options are those that the program declares, so that a new option is attacked without a change here.
"""

import ctypes
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ipucnn.command_table import COMMANDS

_WRITES = re.compile(r"\b(write|draw|create)\b", re.IGNORECASE)
_PATH_METAVAR = re.compile(r"\b(FILE|DIR|PATH)\b")


class Option(NamedTuple):
    """One option of a command as the program declares it.

    Attributes:
        flags: its spellings, ``--x``.
        negative: the spellings that switch it off.
        kind: bool, choice, int, float, size, dict, path or text.
        is_list: takes several values.
        choices: the legal values of a choice.
        low, high: bounds of a number, None for none.
        default: the default as text, empty where there is none.
        writes: names something that the command writes.
    """

    flags: Tuple[str, ...]
    negative: Tuple[str, ...]
    kind: str
    is_list: bool
    choices: Tuple[str, ...]
    low: Optional[float]
    high: Optional[float]
    default: str
    writes: bool

    @property
    def name(self) -> str:
        return self.flags[0]


class CommandLine(NamedTuple):
    """A command with its options and the names of its arguments."""

    name: str
    arguments: Tuple[str, ...]
    options: Tuple[Option, ...]


def declared_commands() -> Dict[str, CommandLine]:
    """Every command that there is, from its own declaration."""
    import typer

    from ipucnn.command_group import build_root

    root = build_root(with_completion=False)
    context = typer.Context(root, info_name="ipucnn")
    found = {}
    for name in COMMANDS:
        command = root.get_command(context, name)
        params = command.get_params(context)
        found[name] = CommandLine(
            name,
            tuple(param.name for param in params if param.param_type_name == "argument"),
            tuple(
                _option(param)
                for param in params
                if param.param_type_name == "option" and "--help" not in param.opts
            ),
        )
    return found


def _option(param: Any) -> Option:
    from ipucnn.config.options import BY_NAME

    spec = BY_NAME.get(param.name)
    metavar = param.metavar or ""
    choices: Tuple[str, ...] = ()
    low = high = None
    default = ""
    if spec is not None and any("--" + key in param.opts for key in spec.keys):
        choices, low, high = spec.choices, spec.minimum, spec.maximum
        low = spec.above if low is None else low
        high = spec.below if high is None else high
        default = "" if spec.default is None else str(spec.default)
        types = {"INT": "int", "FLOAT": "float", "SIZE": "size", "DICT": "dict", "": "bool"}
        kind = types.get(spec.kind.metavar.rstrip("."), "text")
    else:
        kind, number = _kind_of(param), _number_of(param)
        if number is not None:
            kind, low, high = number.kind.__name__, number.minimum, number.maximum
        if kind == "text" and "|" in metavar and not _PATH_METAVAR.search(metavar):
            choices = tuple(metavar.rstrip(".").split("|"))
    if getattr(param, "is_flag", False) or param.secondary_opts:
        kind = "bool"
    elif _PATH_METAVAR.search(metavar):
        kind = "path"
    elif choices:
        kind = "choice"
    flags = tuple(name for name in param.opts if name.startswith("--")) or tuple(param.opts)
    writes = kind == "path" and bool(_WRITES.search((param.help or "").split(".")[0]))
    return Option(
        flags, tuple(param.secondary_opts), kind, bool(param.multiple), choices, low, high, default, writes
    )


def _number_of(param: Any) -> Any:
    """The ``config.spec.Number`` whose parser an option has, or None."""
    parser = getattr(getattr(getattr(param, "type_descriptor", None), "parameter_info", None), "parser", None)
    return getattr(parser or getattr(getattr(param, "type", None), "func", None), "number", None)


def _kind_of(param: Any) -> str:
    """The kind of an option that is not one of a run's, by the type it is declared with."""
    annotation = str(getattr(getattr(param, "type_descriptor", None), "annotation", ""))
    name = annotation or getattr(getattr(param, "type", None), "name", "")
    for part, kind in (
        ("int", "int"),
        ("float", "float"),
        ("bool", "bool"),
        ("path", "path"),
        ("Path", "path"),
    ):
        if part in name:
            return kind
    return "text"


# -- the sandbox ----------------------------------------------------------------------------------------------


class Sandbox:
    """The folders of one case: ``work`` is the working directory, all of ``guarded`` is compared afterwards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.guarded = root / "guarded"
        self.work = self.guarded / "deep" / "work"
        self.home = self.guarded / "home"
        self.tmp = self.guarded / "tmp"
        self.outside = self.guarded / "outside"
        self.mark = root / "executed"
        self.stdout, self.stderr = root / "stdout", root / "stderr"

    def make(self, git: Optional[Path]) -> None:
        """The empty folders, and traps: files that write to ``mark`` if anything runs them.

        Args:
            git: a repository to put into the working directory; None for none.
        """
        for folder in (self.work, self.home, self.tmp, self.outside):
            folder.mkdir(parents=True)
        trap = f"open({str(self.mark)!r}, 'a').write(__file__ + '\\n')\n"
        for name in ("json", "tensorflow", "yaml", "PIL", "sitecustomize", "usercustomize", "trap_backend"):
            (self.work / f"{name}.py").write_text(trap, encoding="utf-8")
        (self.work / "matplotlibrc").write_text("backend: module://trap_backend\n", encoding="utf-8")
        (self.home / ".bashrc").write_text("# a decoy\n", encoding="utf-8")
        (self.outside / "decoy.txt").write_text("a decoy\n", encoding="utf-8")
        if git is not None:
            shutil.copytree(str(git), str(self.work / ".git"))
            (self.work / ".git" / "config").write_text(
                "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"
                f"\tfsmonitor = \"touch '{self.mark}'; false\"\n\tpager = touch '{self.mark}'\n",
                encoding="utf-8",
            )


class Case:
    """One case.

    Attributes:
        kind, number: which.
        args: the command line without the program.
        may_write: what the command may write or change, or anything below it.
        environment: variables beside the usual ones.
        streams: "files", or which stream is closed or broken.
        needs_tensorflow: to be run where TensorFlow may compute.
        is_fresh: to be run as a process of its own.
        is_unprivileged: to be run without root's right to pass by permissions.
    """

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number = kind, number
        self.args: List[str] = []
        self.may_write: List[Path] = []
        self.environment: Dict[str, Optional[str]] = {}
        self.streams = "files"
        self.needs_tensorflow = kind != "line"
        self.is_fresh = False
        self.is_unprivileged = False


class Draw:
    """Draws values and lays into the sandbox what they name."""

    def __init__(self, rng: random.Random, sandbox: Sandbox, prepared: Path) -> None:
        self.rng, self.sandbox, self.prepared = rng, sandbox, prepared
        self._names = 0

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, items: Any) -> Any:
        return self.rng.choice(list(items))

    def new_name(self, ending: str = "") -> str:
        self._names += 1
        return f"n{self._names}{ending}"

    # -- numbers and words ------------------------------------------------------------------------------------

    def number(self, option: Optional[Option] = None) -> str:
        """A number: legal, at a bound, or absurd."""
        rng = self.rng
        whole = option is not None and option.kind == "int"
        low = 1.0 if option is None or option.low is None else float(option.low)
        high = max(low, 8.0) if option is None or option.high is None else float(option.high)
        dice = rng.random()
        if dice < 0.45:
            if whole:
                return str(rng.randint(int(low), int(min(high, low + 8))))
            return repr(round(rng.uniform(low, min(high, low + 1)), 4))
        if dice < 0.65:
            step = 1 if whole else 1e-9
            edge = rng.choice([low, low - step, low + step, high, high - step, high + step, 0, -1])
            return str(int(edge)) if whole and abs(edge) < 1e18 else repr(edge)
        return self.pick(ABSURD_NUMBERS)

    def typo(self, word: str) -> str:
        if len(word) < 2:
            return word + "x"
        at = self.rng.randrange(len(word) - 1)
        return self.pick(
            [
                word[:at] + word[at + 1 :],
                word[:at] + word[at + 1] + word[at] + word[at + 2 :],
                word[:at] + word[at] + word[at:],
                word.upper(),
                word + " ",
                word.replace("-", "_"),
            ]
        )

    def text(self) -> str:
        return self.pick(ABSURD_TEXTS).replace("MARK", str(self.sandbox.mark))

    # -- paths ------------------------------------------------------------------------------------------------

    def path(self, writes: bool = False, ending: str = "") -> str:
        """A path of any class, made in the sandbox."""
        return self.pick(_PATHS if writes else _PATHS + _READ_ONLY_PATHS)(self, ending)

    def file(self, content: bytes, ending: str = "") -> str:
        name = self.new_name(ending)
        (self.sandbox.work / name).write_bytes(content)
        return name

    # -- values of options ------------------------------------------------------------------------------------

    def value(self, option: Option, legal: bool = False) -> str:
        """A value for an option."""
        rng = self.rng
        if not legal and rng.random() < 0.12:
            return self.pick([self.text, self.number, self.mapping, self.path])()
        if option.kind == "choice":
            word = rng.choice(option.choices)
            return word if legal or rng.random() < 0.7 else self.typo(word)
        if option.kind in ("int", "float"):
            if not legal:
                return self.number(option)
            low = 1.0 if option.low is None else float(option.low)
            high = low + 3 if option.high is None else min(float(option.high), low + 3)
            if option.kind == "int":
                return str(rng.randint(int(low), int(high)))
            return repr(round(rng.uniform(low + 1e-4 * (high - low), high - 1e-4 * (high - low)), 4))
        if option.kind == "size":
            return rng.choice(["28", "32", "32x40"]) if legal else rng.choice(SIZES)
        if option.kind == "dict":
            return rng.choice(LEGAL_MAPPINGS) if legal else self.mapping()
        if option.kind == "path":
            return self.path(option.writes, _ending(option))
        for part, words in WORDS.items():
            if part in option.name:
                word = rng.choice(words)
                return word if legal or rng.random() < 0.8 else self.typo(word)
        if option.default and (legal or rng.random() < 0.4):
            return option.default
        return rng.choice(["500", "10%", "1/2"]) if legal else self.text()

    def mapping(self) -> str:
        """A dictionary as it is typed: JSON, YAML, or nearly."""
        return self.pick(LEGAL_MAPPINGS) if self.chance(0.3) else self.pick(ABSURD_MAPPINGS)

    def typed(self, option: Option, legal: bool = False) -> List[str]:
        """An option with its values as words of a command line."""
        flag = self.pick(option.flags)
        if option.kind == "bool":
            if option.negative and self.chance(0.5):
                flag = self.pick(option.negative)
            return (
                [flag, self.pick(["False", "true", "2", ""])] if not legal and self.chance(0.05) else [flag]
            )
        if not legal and self.chance(0.03):
            return [self.typo(flag), self.value(option)]
        values = [
            self.value(option, legal) for _ in range(self.rng.choice([1, 1, 2, 3]) if option.is_list else 1)
        ]
        if not legal and self.chance(0.1):
            return [f"{flag}={values[0]}"]
        return [flag, *values]


ABSURD_NUMBERS = (
    *("nan", "inf", "-inf", "1e309", "1e300", "-1e300", "1e-400", "5e-324", "-0", "-0.0", "0", "-1", "-7"),
    *("2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551616", "1" + "0" * 30, "9" * 400, "9" * 5000, "-" + "9" * 4301, "0." + "3" * 3000),
    *("0x10", "0b1", "1_000", "\uff11\uff12", "٣", "½", "1/0", "1/3", "0/1", "-1/3"),
    *("9" * 4301 + "/1", "1/" + "9" * 400),
    *("1,5", "1 2", "+5", ".5", "5.", "1e", "1e5", "true", "None", "", " ", "50%", "101%", "0%", "-5%"),
    *("9" * 400 + "%", "1e2%", "2**8", "1e999999999999", "999999999999999999/1", "1:30", "12:30:45"),
)
ABSURD_TEXTS = (
    *("", " ", "-", "--", "[bold]x[/bold]", "[/]", "[link=file:///x]y[/link]", "[red", "a\nb", "\t", "\r"),
    *("\x1b[31mred\x1b[0m", "\x07", "\x7f", "\x9b31m", "\u202eabc", "\u2028", "\ufeff", "é" * 100),
    *("日本語", "💥" * 70, "a" * 256, "b" * 5000, "c" * 100000, "\udcff\udcfe", "x\udc80y"),
    *("@confusion_matrix@", "%s%n%d", "{0}{x!r}"),
    *("${HOME}", "$(touch MARK)", "`touch MARK`", "; touch MARK", "| touch MARK", "__import__('os')"),
    *("../../x", "..", ".", "~", "~/x", "~nouser/x", "None", "null", "none", "*", "?", "[a-z]"),
    *("***", "'", '"'),
    *("lenet", "lenett", "digits", "imagenet", "tfds:mnist", "tfds:../x", "tfds:", "random", "best", "last"),
    *("auto", "ipu", "params", "conv1", "0", "http://127.0.0.1:9/x", "s3://x/y", "file:///etc/hostname"),
)
LEGAL_MAPPINGS = (
    '{"momentum": 0.9}',
    "momentum: 0.5",
    "{}",
    '{"initial_learning_rate": 0.001}',
    '{"name": "group_norm", "num_groups": 2}',
    "batch_norm",
    "none",
)
ABSURD_MAPPINGS = (
    "[" * 2000,
    "[" * 60000,
    "{" * 60000,
    '{"a":' * 1500 + "1" + "}" * 1500,
    "{momentum: 2001-01-01}",
    "{momentum: !!int foo}",
    "{momentum: !!python/object/apply:os.system ['touch MARK']}",
    "&a [*a]",
    "{a: &a [x, x], b: &b [*a, *a, *a, *a, *a, *a], c: &c [*b, *b, *b, *b, *b, *b], d: [*c, *c, *c, *c]}",
    "? [a]\n: b",
    "{? {a: 1} : 2}",
    '{"momentum": 1e999}',
    '{"momentum": NaN}',
    '{"momentum": ' + "9" * 4400 + "}",
    '{"momentum": null}',
    '{"momentum": [0.9]}',
    '{"momentum": {"a": 1}}',
    '{"momentum": true}',
    '{"momentum": "0.9; import os"}',
    '{"momentum": -1}',
    '{"momentun": 0.9}',
    '{"": 1}',
    '{"a\\u0000b": 1}',
    '{"\\ud800": 1}',
    '{"momentum": 0.9, "momentum": 0.1}',
    '{"warmup_mode": "shift", "warmup_epochs": 1e300}',
    '{"boundaries": [1, 0, -1], "values": []}',
    '{"name": "group_norm", "num_groups": 1e18}',
    "{<<: {momentum: 1}}",
    "{<<: 3}",
    "- a\n- b",
    "a: b: c",
    "'",
    "%YAML 9.9\n---\na: 1",
    "!!binary abc",
    "!!timestamp x",
    "!!set {a}",
    "2001-01-01",
    "\x00",
    "---\na: 1\n---\nb: 2",
)
SIZES = (
    *("32", "28", "31", "1", "0", "-1", "1x1", "32x", "x32", "32x32x3", "100000", "100000x100000", "32x1"),
    *("1e3", "9" * 400, "4294967296x2", "nan", "224", "188", "32 x 32", "32X32", "2147483648x1", "0x0"),
)
WORDS = {
    "model": (
        "lenet",
        "mnist_cnn",
        "cifar_resnet8",
        "unet",
        "resnet50",
        "efficientnet-b0",
        "toy_model",
        "res*",
        "*",
    ),
    "dataset": (
        "digits",
        "membranes",
        "random",
        "mnist",
        "cifar10",
        "imagefolder",
        "isbi2012",
        "tfds:mnist",
        "imagemasks",
    ),
    "--config": ("lenet", "unet", "resnet50", "efficientnet-b0@digits", "mnist_cnn"),
    "system": ("m2000", "pod16", "bow-pod64", "c600", "pod4"),
    "splits": ("auto", "conv1", "conv2_block1_out", "dense", "flatten", "block2a_expand_conv"),
    "limit": ("8", "500", "10%", "1", "100%", "0.001%"),
    "rows": ("1", "lenet", "0", "lenet-training"),
    "suite": ("cnn", "quick", "published"),
    "compare": ("params", "equal-layers", "equal-blocks"),
    "checkpoint": ("best", "last", "last.npz", "checkpoint-00000002.npz", "../x"),
    "format": ("csv", "json", "jsonl"),
    "split": ("eval", "train"),
    "logs-per-epoch": ("1", "1/2", "4"),
    "ckpts-per-epoch": ("1", "1/2", "4"),
}


def _ending(option: Option) -> str:
    return {
        "--html": ".html",
        "--save": ".yml",
        "--plan": ".yml",
        "--config-path": ".yml",
        "--suite": ".yml",
        "--plot": ".png",
        "--contact-sheet": ".png",
        "--predictions": ".csv",
        "--output": ".csv",
    }.get(option.name, "")


# -- classes of paths -----------------------------------------------------------------------------------------


def _absent(draw: Draw, ending: str) -> str:
    return draw.new_name(ending)


def _below_absent(draw: Draw, ending: str) -> str:
    return f"{draw.new_name()}/{draw.new_name()}/x{ending}"


def _folder(draw: Draw, ending: str) -> str:
    name = draw.new_name(draw.pick(["", ending]))
    (draw.sandbox.work / name).mkdir()
    return name


def _foreign_folder(draw: Draw, ending: str) -> str:
    name = _folder(draw, "")
    (draw.sandbox.work / name / "thesis.txt").write_text("years of work\n", encoding="utf-8")
    return name


def _file(draw: Draw, ending: str) -> str:
    return draw.file(
        draw.pick([b"", b"x", b"\0" * 100, b"a: 1\n", b"{}", b"\xff\xfe\n", b"rows: [lenet]\n"]), ending
    )


def _below_file(draw: Draw, ending: str) -> str:
    return draw.file(b"x") + "/x" + ending


def _fifo(draw: Draw, ending: str) -> str:
    name = draw.new_name(ending)
    os.mkfifo(str(draw.sandbox.work / name))
    return name


def _socket(draw: Draw, ending: str) -> str:
    name = draw.new_name(ending)
    here = os.getcwd()
    os.chdir(str(draw.sandbox.work))  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    finally:
        os.chdir(here)
    return name


def _terminal(draw: Draw, ending: str) -> str:
    """A pseudo-terminal of this case; a process that ends with it reads what is written there."""
    master, slave = os.openpty()
    name = os.ttyname(slave)
    os.close(slave)
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        die_with_parent(parent)
        try:
            while os.getppid() == parent:
                try:
                    os.read(master, 65536)
                except OSError:  # nobody has it open
                    signal.sigtimedwait([], 0.05)
        finally:
            os._exit(0)
    os.set_inheritable(master, True)
    return name


def _loop(draw: Draw, ending: str) -> str:
    first, second = draw.new_name(ending), draw.new_name(ending)
    os.symlink(second, str(draw.sandbox.work / first))
    os.symlink(first, str(draw.sandbox.work / second))
    return draw.pick([first, first + "/x"])


def _dangling(draw: Draw, ending: str) -> str:
    name = draw.new_name(ending)
    os.symlink("nowhere", str(draw.sandbox.work / name))
    return name


def _link_out(draw: Draw, ending: str) -> str:
    name = draw.new_name(ending)
    os.symlink(str(draw.sandbox.outside / "decoy.txt"), str(draw.sandbox.work / name))
    return name


def _long_name(draw: Draw, ending: str) -> str:
    return draw.pick(["n" * 256, "n" * 250 + ending, "d/" * 2500 + "x", "é" * 128, "n" * 255])


def _no_user(draw: Draw, ending: str) -> str:
    return draw.pick(["~nouser/x", "~nouser", "~/" + draw.new_name(ending), "~", "~/absent/x" + ending])


def _unreadable(draw: Draw, ending: str) -> str:
    name = draw.file(b"a: 1\n", ending)
    os.chmod(str(draw.sandbox.work / name), 0)
    return name


def _closed_folder(draw: Draw, ending: str) -> str:
    name = _foreign_folder(draw, "")
    os.chmod(str(draw.sandbox.work / name), draw.pick([0, 0o444, 0o555]))
    return name + draw.pick(["", "/x" + ending, "/thesis.txt"])


def _strange_name(draw: Draw, ending: str) -> str:
    name = (
        draw.pick(["é ü", "\udcff\udcfe", "[bold]x[red]", "a\nb", "\x1b[31m", "-x", "$(x)", "💥", ".hidden"])
        + ending
    )
    if draw.chance(0.5):
        path = os.path.join(str(draw.sandbox.work), name)
        if not os.path.lexists(path):
            if draw.chance(0.5):
                os.mkdir(path)
            else:
                Path(path).write_bytes(b"x")
    return draw.pick([name, "./" + name])


def _odd(draw: Draw, ending: str) -> str:
    return draw.pick(
        ["", ".", "..", "-", " ", "/dev/fd/9999", "./" + draw.new_name(ending), "/dev/stdout", "/dev/fd/2"]
    )


def _good_run(draw: Draw, ending: str) -> str:
    return copy_run(draw, "classification")


def _yaml_file(draw: Draw, ending: str) -> str:
    return draw.file(yaml_bytes(draw), ".yml")


def _proc(draw: Draw, ending: str) -> str:
    return draw.pick(
        ["/proc/self/environ", "/proc/self/mem", "/proc/self/fd", "/proc/self/status", "/nonexistent/x"]
    )


_PATHS: List[Callable[[Draw, str], str]] = [
    *(_absent, _absent, _absent, _below_absent, _folder, _foreign_folder, _file, _file, _below_file, _fifo),
    *(_socket, _terminal, _loop, _dangling, _link_out, _long_name, _no_user, _unreadable, _closed_folder),
    *(_strange_name, _odd),
]
_READ_ONLY_PATHS: List[Callable[[Draw, str], str]] = [_good_run, _yaml_file, _yaml_file, _proc]


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


# -- YAML -----------------------------------------------------------------------------------------------------


def yaml_bytes(draw: Draw) -> bytes:
    """A YAML file from a grammar: presets, suites or plans, with legal and absurd keys and values."""
    dice = draw.rng.random()
    if dice < 0.12:
        return _bomb(draw)
    lines: List[str] = []
    if draw.chance(0.05):
        lines.append(draw.pick(["%YAML 1.1\n---", "%YAML 9.9\n---", "%TAG ! tag:x,2000:\n---", "---"]))
    if dice < 0.65:
        for name in draw.rng.sample(["lenet", "unet", "mine", "defaults"], draw.rng.randint(1, 3)):
            anchor = draw.pick(["", "", " &a", " &b"])
            lines.append(f"{name}:{anchor}")
            lines += _yaml_options(draw, "  ", merges=True)
    elif dice < 0.85:
        lines.append(
            draw.pick(["title: t", "title: [x]", "about: 1", "epoch-images: 50000", "epoch-images: -1"])
        )
        if draw.chance(0.3):
            lines.append("defaults:")
            lines += _yaml_options(draw, "  ")
        lines.append("rows:")
        for _ in range(draw.rng.randint(1, 3)):
            lines.append(
                "  - model: " + draw.pick(["lenet", "res*", "nope", "[lenet]", "*", "&x lenet", "1"])
            )
            if draw.chance(0.4):
                lines.append("    mode: " + draw.pick(["training", "inference", "fit", "x", "[training]"]))
            if draw.chance(0.3):
                lines.append(
                    "    for-each: " + draw.pick(["{micro-batch-size: [1, 2]}", "{x: 1}", "[]", "{seed: {}}"])
                )
            lines += _yaml_options(draw, "    ", at_most=2)
    else:
        plan = draw.prepared / "plan.yml"
        lines = plan.read_text(encoding="utf-8").splitlines() if plan.exists() else ["model: lenet"]
        for _ in range(draw.rng.randint(0, 4)):
            at = draw.rng.randrange(len(lines))
            key = lines[at].split(":")[0]
            lines[at] = draw.pick(
                [f"{key}: {_yaml_value(draw)}", lines[at] + "x", "", lines[at].lstrip(), lines[0]]
            )
    text = draw.pick(["\n", "\n", "\n", "\r\n"]).join(lines) + "\n"
    data = text.encode("utf-8", "surrogateescape")
    if draw.chance(0.06):
        at = draw.rng.randrange(len(data) + 1)
        data = (
            data[:at]
            + draw.pick([b"\xff", b"\0", b"\xc3", b"\x1b[31m", b"\xe2\x80\xa8", b"\t", b"\x85"])
            + data[at:]
        )
    return draw.pick([b"", b"", b"", b"\xef\xbb\xbf"]) + data


def _yaml_options(draw: Draw, indent: str, merges: bool = False, at_most: int = 6) -> List[str]:
    from ipucnn.config.options import SPECS

    lines = []
    if merges and draw.chance(0.2):
        lines.append(f"{indent}<<: {draw.pick(['*a', '*b', '[*a, *b]', '3', '{}', '*absent'])}")
    for _ in range(draw.rng.randint(0 if lines else 1, at_most)):
        spec = draw.pick(SPECS)
        key = draw.typo(spec.key) if draw.chance(0.06) else spec.key
        value = str(spec.default) if draw.chance(0.3) and spec.default is not None else _yaml_value(draw)
        if spec.choices and draw.chance(0.6):
            value = draw.pick(spec.choices)
        lines.append(f"{indent}{key}: {value}")
    return lines


def _yaml_value(draw: Draw) -> str:
    return draw.pick(
        [
            *(
                "1",
                "2",
                "0.5",
                "1e-5",
                "true",
                "~",
                "''",
                "[]",
                "{}",
                "2001-01-01",
                "2001-01-01 10:00:00",
                "0o17",
            ),
            *(
                "12:30:45",
                "!!int foo",
                "!!float x",
                "!!binary a",
                "!!set {a}",
                "!!omap [a: 1]",
                "!custom x",
                "&c 3",
            ),
            *(
                "*a",
                "*absent",
                "[1, [2, [3]]]",
                "{a: {b: {c: 1}}}",
                "? a",
                "| \n      text",
                '"\\0"',
                '"\\e[31m"',
            ),
            *(
                ".nan",
                ".inf",
                "-.inf",
                "9" * 400,
                "9" * 4400,
                "1/3",
                "50%",
                '"[bold]x"',
                "é",
                "- a",
                "a: b",
                "'",
            ),
            f"!!python/object/apply:os.system ['touch {draw.sandbox.mark}']",
            "!!python/name:os.system ''",
            draw.number(),
        ]
    )


def _bomb(draw: Draw) -> bytes:
    rng = draw.rng
    kind = rng.randrange(9)
    if kind == 0:
        return draw.pick([b"[", b"{", b"- ", b"a: [", b"? "]) * rng.choice([60, 1000, 100000])
    if kind == 1:
        width, depth = rng.choice([3, 9]), rng.choice([3, 9, 12])
        lines = ["a0: &a0 [x, x]"] + [
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)
        ]
        return ("\n".join(lines) + "\n").encode()
    if kind == 2:
        lines = ["a0: &a0 {k0: 1}"] + [
            f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n  k{n}: 1"
            for n in range(1, rng.choice([4, 8]))
        ]
        return ("\n".join(lines) + "\n").encode()
    if kind == 3:
        return rng.choice([b"a: &a [*a]\n", b"a: &a {b: *a}\n", b"lenet: &a\n  <<: *a\n", b"&a [*a, *a]\n"])
    if kind == 4:
        return b"lenet:\n  seed: " + b"9" * rng.choice([5000, 2_000_000]) + b"\n"
    if kind == 5:
        return b"lenet:\n" + b"".join(b"  k%d: 1\n" % n for n in range(rng.choice([2000, 60000])))
    if kind == 6:
        return b"".join(b" " * n + b"k:\n" for n in range(rng.choice([40, 60, 400])))
    if kind == 7:
        return b"lenet:\n  model-name: " + b"x" * rng.choice([2000, 900_000, 3_000_000]) + b"\n"
    return bytes(rng.randrange(256) for _ in range(rng.choice([1, 30, 1000])))


# -- run folders ----------------------------------------------------------------------------------------------


def copy_run(draw: Draw, task: str, name: Optional[str] = None) -> str:
    """A copy of a run that was prepared, in the working directory."""
    name = name or draw.new_name("-run")
    shutil.copytree(str(draw.prepared / task), str(draw.sandbox.work / name))
    return name


def damage_run(draw: Draw, run: Path) -> List[str]:
    """Changes one to three files of a run folder; what was done."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    wanted = [path for path in files if path.suffix in (".npz", ".yml", ".json", ".jsonl")]
    done = []
    for path in draw.rng.sample(wanted, min(len(wanted), draw.rng.choice([1, 1, 2, 3]))):
        generic = draw.chance(0.4)
        if generic:
            change: Callable[[Draw, Path], str] = _damage_file
        elif path.suffix == ".npz":
            change = _damage_checkpoint
        elif path.suffix == ".yml":
            change = _damage_yaml
        else:
            change = _damage_json
        done.append(f"{path.relative_to(run)}: {change(draw, path)}")
    return done


def _damage_file(draw: Draw, path: Path) -> str:
    rng = draw.rng
    data = path.read_bytes()
    kind = rng.choice(
        [
            "flip",
            "flip",
            "cut",
            "empty",
            "absent",
            "folder",
            "fifo",
            "loop",
            "link",
            "unreadable",
            "noise",
            "zeros",
            "tail",
        ]
    )
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 8, 100])):
            if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "tail":
        path.write_bytes(data + bytes(rng.randrange(256) for _ in range(100)))
    elif kind == "noise":
        path.write_bytes(bytes(rng.randrange(256) for _ in range(min(len(data), 2000))))
    elif kind in ("empty", "zeros"):
        path.write_bytes(b"" if kind == "empty" else b"\0" * len(data))
    elif kind == "unreadable":
        path.chmod(0)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(str(path))
        elif kind == "loop":
            os.symlink(path.name, str(path))
        elif kind == "link":
            os.symlink(
                str(draw.pick([draw.sandbox.outside / "decoy.txt", draw.sandbox.home / ".bashrc"])), str(path)
            )
    return kind


def _damage_yaml(draw: Draw, path: Path) -> str:
    if draw.chance(0.15):
        path.write_bytes(yaml_bytes(draw))
        return "another YAML file"
    lines = path.read_text(encoding="utf-8").splitlines()
    done = []
    for _ in range(draw.rng.choice([1, 1, 2, 4])):
        at = draw.pick([n for n, line in enumerate(lines) if ":" in line])
        key = lines[at].split(":")[0]
        lines[at] = draw.pick(
            [f"{key}: {_yaml_value(draw)}", "", draw.typo(key) + ": 1", f"{key}: {draw.number()}"]
        )
        done.append(lines[at][:80])
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
    return "; ".join(done)


def _json_value(draw: Draw) -> Any:
    return draw.pick(
        [
            None,
            True,
            0,
            -1,
            2**63,
            1e308,
            10**400,
            "",
            "x",
            "[bold]x",
            "\x1b[31m",
            "\ud800",
            [],
            [1],
            {},
            {"a": 1},
        ]
        + [[[]] * 3, "9" * 5000, 0.5, float("nan"), float("inf"), "é", "../../x", False]
    )


def change_json(draw: Draw, value: Any) -> str:
    """Removes, renames or retypes one field somewhere in a JSON value; which one."""
    where = ""
    for _ in range(8):
        keys: List[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return f"nothing at {where}"
        key = draw.pick(keys)
        where += f"/{key}"
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and draw.chance(0.7):
            value = inner
            continue
        if draw.chance(0.25):
            del value[key]
            return f"without {where}"
        value[key] = _json_value(draw)
        return f"{where} is {str(value[key])[:60]!r}"
    return where


def _damage_json(draw: Draw, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = draw.rng.randrange(len(lines))
        value = json.loads(lines[at])
        done = change_json(draw, value)
        lines[at] = draw.pick([json.dumps(value), json.dumps(value), "[" * 100000, "", "{", lines[at] * 2])
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"line {at + 1}: {done}"
    if draw.chance(0.1):
        path.write_text(draw.pick(["[" * 100000, "{" * 100000, "null", "[]", "3", '"x"', "NaN", "9" * 5000]))
        return "another JSON value"
    value = json.loads(text)
    done = change_json(draw, value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return done


def _damage_checkpoint(draw: Draw, path: Path) -> str:
    """Changes an array or a fact of a checkpoint, with or without the checksum that belongs to it."""
    import numpy as np

    with zipfile.ZipFile(str(path)) as archive:
        arrays = {name: archive.read(name) for name in archive.namelist()}
    loaded = {
        name[: -len(".npy")]: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        for name, data in arrays.items()
    }
    meta = json.loads(bytes(loaded.pop("meta")).decode("utf-8"))
    raw: Dict[str, bytes] = {}
    if draw.chance(0.5):
        done = "meta " + change_json(draw, meta)
    else:
        name = draw.pick(sorted(loaded))
        done = f"{name} {_damage_array(draw, loaded, raw, name)}"
    if draw.chance(0.7) and "sha256" in meta and not raw:
        meta["sha256"] = checksum(loaded, meta)
        done += ", checksum corrected"
    with zipfile.ZipFile(str(path), "w", zipfile.ZIP_STORED) as archive:
        text = json.dumps(meta).encode("utf-8", "surrogatepass")
        for name, array in {"meta": np.frombuffer(text, np.uint8), **loaded}.items():
            buffer = io.BytesIO()
            if name in raw:
                buffer.write(raw[name])
            else:
                np.lib.format.write_array(buffer, np.asarray(array, order="C"), allow_pickle=True)
            # As the program writes them: its reader refuses any other zip at once.
            entry = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(entry, "w", force_zip64=True) as handle:
                handle.write(buffer.getvalue())
    return done


def checksum(arrays: Dict[str, Any], meta: Dict[str, Any]) -> str:
    """The checksum that the program would have written; where its rule is another, the one over the arrays."""
    from ipucnn.training import checkpoints

    own = getattr(checkpoints, "_digest", None)
    try:
        return str(own(arrays, {k: v for k, v in meta.items() if k != "sha256"}))  # type: ignore[misc]
    except TypeError:
        pass
    try:
        return str(own(arrays))  # type: ignore[misc]
    except Exception:
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
            digest.update(arrays[name].tobytes())
        return digest.hexdigest()


class _Touch:
    """Unpickled, it would run a program."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Tuple[Any, Tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def _damage_array(draw: Draw, arrays: Dict[str, Any], raw: Dict[str, bytes], name: str) -> str:
    import numpy as np

    array = arrays[name]
    kind = draw.pick(
        ["nan", "inf", "type", "type", "type", "shape", "shape", "gone", "more", "pickle", "header"]
    )
    if kind in ("nan", "inf"):
        arrays[name] = np.full_like(array, float(kind)) if array.dtype.kind == "f" else array
    elif kind == "type":
        new = draw.pick(["U3", "S4", "c8", "?", "M8[s]", "m8[s]", "V4", "f2", "f8", "i8", "u1", ">f4", "i4"])
        kind = new
        try:
            arrays[name] = array.astype(new)
        except (TypeError, ValueError):
            arrays[name] = np.zeros(array.shape, new)
    elif kind == "shape":
        arrays[name] = draw.pick(
            [
                array.reshape(-1),
                array[..., None],
                array.reshape(-1)[:1],
                np.zeros(0, "f4"),
                np.zeros((0, 3), "f4"),
                array.T,
            ]
        )
    elif kind == "gone":
        del arrays[name]
    elif kind == "more":
        arrays[draw.pick([name + "x", "../../x", "slots/x/y", "weights/\x1b[31m", "[bold]"])] = array
    elif kind == "pickle":
        arrays[name] = np.array([_Touch(draw.sandbox.mark)], object)
    else:
        shape = draw.pick([(2**31, 2**31), (10**12,), (2**62, 4), (-1,), (10**9,)])
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape!r}, }}"
        if draw.chance(0.2):
            text = draw.pick(
                [
                    "(" * 5000,
                    "{",
                    "__import__('os')",
                    "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
                ]
            )
        body = text.encode() + b"\n"
        raw[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body) % 65536) + body + array.tobytes()[:64]
    return kind


# -- weights of Keras -----------------------------------------------------------------------------------------


def keras_weights(draw: Draw) -> str:
    """A weight file of Keras made of a prepared checkpoint, in its old layout, hostile in one way; its name."""
    import h5py
    import numpy as np

    kind = draw.pick(
        [
            "good",
            "bytes",
            "bytes",
            "cut",
            "type",
            "huge",
            "huge",
            "link",
            "circle",
            "names",
            "zip",
            "bomb",
            "file",
        ]
    )
    with zipfile.ZipFile(str(draw.prepared / "classification" / "checkpoints" / "last.npz")) as archive:
        tensors = {
            name[len("weights/") : -len(".npy")]: np.lib.format.read_array(
                io.BytesIO(archive.read(name)), allow_pickle=False
            )
            for name in archive.namelist()
            if name.startswith("weights/")
        }
    victim = draw.pick(sorted(tensors))
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        layers: Dict[str, List[str]] = {}
        for name in tensors:
            layers.setdefault(name.split("/")[0], []).append(name)
        file.attrs["layer_names"] = [layer.encode() for layer in layers]
        for layer, names in layers.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = [f"{name}:0".encode() for name in names]
            for name in names:
                value = tensors[name]
                if name == victim and kind == "type":
                    value = np.zeros(value.shape, draw.pick(["i8", "S4", "c8", "f8", "f2", "?"]))
                if name == victim and kind == "huge":
                    shape = draw.pick([(2**40,), (10**9, 10), (2**62,), (0,), value.shape + (2**31,)])
                    group.create_dataset(
                        f"{name}:0",
                        shape,
                        "f4",
                        chunks=tuple(min(side, 64) for side in shape) if all(shape) else None,
                    )
                elif name == victim and kind == "link":
                    group[f"{name}:0"] = draw.pick(
                        [h5py.SoftLink("/nowhere"), h5py.ExternalLink("other.h5", "/x")]
                    )
                elif name == victim and kind == "circle":
                    group.require_group(name.rpartition("/")[0])[name.rpartition("/")[2] + ":0"] = file["/"]
                else:
                    group[f"{name}:0"] = value
        if kind == "names":
            file.attrs["layer_names"] = draw.pick(
                [[b"x"], [b""], b"x", 3, [b"/"], [b"../x"], [b"\x1b[31m"], [b"a" * 5000], np.zeros(0)]
            )
    data = buffer.getvalue()
    ending = draw.pick([".h5", ".weights.h5", ".hdf5"])
    if kind == "cut":
        data = data[: draw.rng.randrange(len(data))]
    elif kind == "bytes":
        changed = bytearray(data)
        for _ in range(draw.pick([1, 4, 50])):
            changed[draw.rng.randrange(draw.pick([100, 3000, len(changed)]))] = draw.rng.randrange(256)
        data = bytes(changed)
    elif kind in ("zip", "bomb"):
        packed, ending = io.BytesIO(), ".keras"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(draw.pick(["model.weights.h5", "model.weights.h5", "x", "../x"]), data)
            archive.writestr(
                "config.json", '{"module": "os", "class_name": "system", "config": {"args": ["x"]}}'
            )
        data = packed.getvalue()
        if draw.chance(0.4):
            data = data[: draw.rng.randrange(len(data))]
        if kind == "bomb":
            data = (draw.prepared / "bomb.keras").read_bytes()
    name = draw.file(data, ending)
    if kind == "file":
        _damage_file(draw, draw.sandbox.work / name)
    return name


def write_zip_bomb(path: Path) -> None:
    """A small zip whose member stands for three gigabytes."""
    archive = zipfile.ZipFile(str(path), "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("model.weights.h5", "w", force_zip64=True) as handle:
        for _ in range(3 * 2**30 // 2**24):
            handle.write(bytes(2**24))


# -- data files -----------------------------------------------------------------------------------------------


def image_bytes(
    draw: Draw, form: str = "PNG", size: Tuple[int, int] = (12, 10), mode: str = "RGB", pages: int = 1
) -> bytes:
    """A small image in a format of Pillow."""
    from PIL import Image

    pictures = []
    for _ in range(pages):
        count = size[0] * size[1] * len(mode)
        pictures.append(Image.frombytes(mode, size, bytes(draw.rng.randrange(256) for _ in range(count))))
    buffer = io.BytesIO()
    details: Dict[str, Any] = {}
    if pages > 1 and form in ("TIFF", "GIF", "PNG"):
        details.update(save_all=True, append_images=pictures[1:])
    if form == "TIFF" and draw.chance(0.5):
        details["compression"] = draw.pick(["tiff_lzw", "tiff_deflate", "packbits"])
    if form == "GIF" and mode == "RGB":
        pictures = [picture.convert("P") for picture in pictures]
    pictures[0].save(buffer, form, **details)
    return buffer.getvalue()


def hostile_image(draw: Draw, form: Optional[str] = None, mode: str = "RGB", pages: int = 1) -> bytes:
    """An image file that lies, or is damaged, or is none."""
    rng = draw.rng
    form = form or rng.choice(["PNG", "PNG", "JPEG", "GIF", "BMP", "TIFF", "TIFF", "WEBP", "PPM"])
    kind = rng.choice(
        ["bytes", "bytes", "header", "header", "cut", "empty", "text", "huge", "mode", "pickle", "good"]
    )
    if kind == "good":
        return image_bytes(draw, form, mode=mode, pages=pages)
    if kind == "empty":
        return b""
    if kind == "text":
        return rng.choice(
            [b"<html></html>", b"\0" * 300, b"GIF89a", b"\x89PNG\r\n\x1a\n", b"II*\0", b"BM", b"\xff\xd8\xff"]
        )
    if kind == "pickle":
        return pickle.dumps(_Touch(draw.sandbox.mark))
    if kind == "huge":
        return _huge_png(
            rng.choice([(100000, 100000), (2**31 - 1, 2**31 - 1), (9400, 9400), (30000, 4000), (1, 2**30)])
        )
    if kind == "mode":
        form, mode = rng.choice(
            [
                ("PNG", "L"),
                ("PNG", "RGBA"),
                ("TIFF", "LAB"),
                ("TIFF", "CMYK"),
                ("JPEG", "CMYK"),
                ("TIFF", "I"),
                ("TIFF", "F"),
                ("PNG", "1"),
            ]
        )
        from PIL import Image

        buffer = io.BytesIO()
        Image.new(mode, (12, 10)).save(buffer, form)
        return buffer.getvalue()
    data = bytearray(image_bytes(draw, form, mode=mode, pages=pages))
    if kind == "cut":
        return bytes(data[: rng.randrange(len(data))])
    end = 64 if kind == "header" else len(data)
    for _ in range(rng.choice([1, 2, 8])):
        data[rng.randrange(min(end, len(data)))] = rng.randrange(256)
    if form == "PNG" and kind == "header":
        data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def _huge_png(size: Tuple[int, int]) -> bytes:
    """A PNG whose header promises many pixels; those up to 100 million are there (all black)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width, height = size
    body = b""
    if width * height <= 10**8:
        packer = zlib.compressobj(9)
        body = b"".join(packer.compress(bytes(1 + width)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _idx(draw: Draw, shape: Tuple[int, ...], top: int) -> bytes:
    count = 1
    for side in shape:
        count *= side
    head = struct.pack(">I", 0x0800 + len(shape)) + struct.pack(f">{len(shape)}I", *shape)
    return head + bytes(draw.rng.randrange(top) for _ in range(count))


def make_idx(draw: Draw, folder: Path) -> None:
    """MNIST's four files, one of them hostile."""
    rng = draw.rng
    files = {}
    for part, count in (("train", 12), ("t10k", 6)):
        files[f"{part}-images-idx3-ubyte"] = _idx(draw, (count, 28, 28), 256)
        files[f"{part}-labels-idx1-ubyte"] = _idx(draw, (count,), 10)
    victim = rng.choice(sorted(files))
    data = files[victim]
    kind = rng.choice(
        ["shape", "shape", "bytes", "cut", "empty", "gzip", "gzip", "bomb", "tail", "labels", "good", "file"]
    )
    if kind == "shape":
        dimensions = 3 if "images" in victim else 1
        shape = [rng.choice([0, 1, 28, 12, 2**16, 2**31, 2**32 - 1]) for _ in range(dimensions)]
        data = data[:4] + struct.pack(f">{dimensions}I", *shape) + data[4 + 4 * dimensions :]
    elif kind == "bytes":
        changed = bytearray(data)
        for _ in range(rng.choice([1, 4])):
            changed[rng.randrange(min(16, len(changed)))] = rng.randrange(256)
        data = bytes(changed)
    elif kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind == "empty":
        data = b""
    elif kind == "gzip":
        packed = gzip.compress(data)
        data = rng.choice(
            [packed, packed[: rng.randrange(len(packed))], packed + b"x", packed[:20] + b"\0" + packed[21:]]
        )
    elif kind == "bomb":
        data = gzip.compress(data + bytes(400_000_000 if draw.chance(0.2) else 10_000_000), 1)
    elif kind == "tail":
        data += b"x"
    elif kind == "labels":
        data = data[:-1] + b"\xff"
    files[victim] = data
    for name, content in files.items():
        packs = name == victim and content[:2] == b"\x1f\x8b"
        (folder / (name + (".gz" if packs or draw.chance(0.05) else ""))).write_bytes(content)
    if kind == "file":
        _damage_file(draw, folder / sorted(os.listdir(str(folder)))[0])


def make_cifar(draw: Draw, folder: Path, name: str) -> None:
    """CIFAR's files as pickles or binary, one of them hostile."""
    import numpy as np

    rng = draw.rng
    if draw.chance(0.25):
        rows, labels = 6, 2 if name == "cifar100" else 1
        parts = (
            ["train.bin", "test.bin"]
            if name == "cifar100"
            else [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
        )
        for part in parts:
            body = b"".join(
                bytes(rng.randrange(10) for _ in range(labels)) + bytes(3072) for _ in range(rows)
            )
            (folder / part).write_bytes(body)
        _damage_file(draw, folder / rng.choice(parts))
        return
    fine = name == "cifar100"
    key = "fine_labels" if fine else "labels"
    parts = ["train", "test"] if fine else [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    meta_name, meta_key = ("meta", "fine_label_names") if fine else ("batches.meta", "label_names")
    content: Dict[str, Any] = {
        part: {"data": np.zeros((6, 3072), np.uint8), key: [n % 10 for n in range(6)]} for part in parts
    }
    content[meta_name] = {meta_key: [f"class {n}" for n in range(100 if fine else 10)]}
    victim = rng.choice([*parts, meta_name])
    value = content[victim]
    kind = rng.choice(
        ["value", "value", "value", "shared", "run", "opcodes", "bytes", "bytes", "file", "names"]
    )
    packed: Optional[bytes] = None
    if kind in ("value", "names"):
        if victim == meta_name or kind == "names":
            victim = meta_name
            content[victim] = {
                meta_key: draw.pick(
                    [
                        None,
                        3,
                        "abc",
                        [1] * 10,
                        [b"x"] * 10,
                        ["[bold]"] * 10,
                        ["\x1b[31m"] * 10,
                        {},
                        [[]] * 10,
                        ["@confusion_matrix@"] * 10,
                    ]
                )
            }
        else:
            value[key] = draw.pick(
                [
                    None,
                    [0.5] * 6,
                    [10**30] * 6,
                    [-1] * 6,
                    ["x"] * 6,
                    [0] * 5,
                    {},
                    [True] * 6,
                    [[0]] * 6,
                    [float("nan")] * 6,
                    b"\0" * 6,
                ]
            )
            if draw.chance(0.4):
                value["data"] = draw.pick(
                    [
                        np.zeros((6, 3071), np.uint8),
                        np.zeros((0, 3072), np.uint8),
                        np.zeros((6, 3072), np.float32),
                        [1],
                        None,
                        np.zeros(3072, np.uint8),
                    ]
                )
    elif kind == "shared":
        shared: Any = []
        for _ in range(rng.choice([5, 30, 200])):
            shared = [shared, shared, shared]
        value[draw.pick([key, "data", "x", meta_key])] = shared
    elif kind == "run":
        content[victim] = draw.pick(
            [
                _Touch(draw.sandbox.mark),
                {"data": _Touch(draw.sandbox.mark), key: [0]},
                [_Touch(draw.sandbox.mark)],
            ]
        )
    elif kind == "opcodes":
        packed = draw.pick(
            [
                b"(lp0\ng0\na" * 1000 + b".",
                b"\x80\x04" + b"]" * 100000 + b".",
                b"\x80\x04(" * 5000,
                b"\x80\x04\x8e" + struct.pack("<Q", 2**60),
                b"\x80\x04B" + struct.pack("<I", 2**32 - 1),
                b"\x80\x04\x95" + struct.pack("<Q", 2**62),
                b"I" + b"9" * 100000 + b"\n.",
                b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1),
                b"cos\nsystem\n(S'touch " + str(draw.sandbox.mark).encode() + b"'\ntR.",
                b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I99999999999\ntS'b'\ntR.",
                b"\x80\x04Nr" + struct.pack("<I", 2**31) + b".",
                b"",
                b".",
            ]
        )
    for part, item in content.items():
        data = pickle.dumps(item, rng.choice([2, 2, 4])) if part != victim or packed is None else packed
        (folder / part).write_bytes(data)
    if kind in ("bytes", "file"):
        path = folder / victim
        if kind == "file":
            _damage_file(draw, path)
        else:
            changed = bytearray(path.read_bytes())
            for _ in range(rng.choice([1, 1, 3])):
                changed[rng.randrange(min(200, len(changed)))] = rng.randrange(256)
            path.write_bytes(bytes(changed))


def make_imagefolder(draw: Draw, folder: Path) -> None:
    """``train`` and ``val`` with classes of a few images, some of them hostile."""
    rng = draw.rng
    names = [
        "a",
        draw.pick(
            ["b", "[bold]b", "é", "\x1b[31mb", "@confusion_matrix@", "b\nc", "\udcff", "-b", "b" * 200]
        ),
    ]
    for part in ("train", "val"):
        for label in names:
            inside = os.path.join(str(folder), part, label)
            os.makedirs(inside)
            for number in range(3):
                form, ending = rng.choice([("PNG", ".png"), ("JPEG", ".jpg"), ("BMP", ".bmp")])
                data = hostile_image(draw) if draw.chance(0.25) else image_bytes(draw, form)
                Path(inside, f"{number}{ending}").write_bytes(data)
    if draw.chance(0.3):
        first = folder / "train" / "a"
        victim = first / sorted(os.listdir(str(first)))[0]
        if draw.chance(0.5):
            _damage_file(draw, victim)
        else:
            kind = rng.choice(["loop", "class", "empty", "deep"])
            if kind == "loop":
                os.symlink("z", str(folder / "train" / "z"))
            elif kind == "class":
                os.makedirs(str(folder / "val" / "only here"))
                (folder / "val" / "only here" / "x.png").write_bytes(image_bytes(draw))
            elif kind == "empty":
                shutil.rmtree(str(folder / "val"))
                (folder / "val").mkdir()
            else:
                os.symlink("..", str(first / "up"))


def make_masks(draw: Draw, folder: Path) -> None:
    """Images of 188x188 with masks, one hostile."""
    for inside in ("images", "masks"):
        (folder / inside).mkdir()
    rng = draw.rng
    victim = (rng.randrange(4), rng.choice(["images", "masks"]))
    from PIL import Image

    for number in range(4):
        for inside in ("images", "masks"):
            buffer = io.BytesIO()
            picture = Image.new("L", (188, 188), 0)
            picture.paste(255, (40, 40, 100, 120 + number))
            picture.save(buffer, "PNG")
            data = buffer.getvalue()
            if (number, inside) == victim:
                data = draw.pick(
                    [
                        lambda: hostile_image(draw, "PNG", "L"),
                        lambda: hostile_image(draw, "TIFF", "L", 3),
                        lambda: image_bytes(draw, "PNG", (188, 188), "L"),
                        lambda: image_bytes(draw, "PNG", (100, 188), "L"),
                        lambda: image_bytes(draw, "PNG", (188, 188), "RGB"),
                    ]
                )()
            (folder / inside / f"{number}.png").write_bytes(data)


def make_stack(draw: Draw, folder: Path) -> None:
    """ISBI's two volumes of 188x188, one hostile."""
    from PIL import Image

    rng = draw.rng
    for name in ("train-volume.tif", "train-labels.tif"):
        pages = []
        for number in range(4):
            picture = Image.new("L", (188, 188), 255)
            picture.paste(0, (30, 30, 90 + number, 160))
            pages.append(picture)
        buffer = io.BytesIO()
        details = {"compression": "tiff_lzw"} if draw.chance(0.5) else {}
        pages[0].save(buffer, "TIFF", save_all=True, append_images=pages[1:], **details)
        (folder / name).write_bytes(buffer.getvalue())
    path = folder / rng.choice(["train-volume.tif", "train-labels.tif"])
    kind = rng.choice(["image", "file", "bytes", "bytes", "offsets"])
    if kind == "image":
        path.write_bytes(hostile_image(draw, "TIFF", "L", 4))
    elif kind == "file":
        _damage_file(draw, path)
    else:
        data = bytearray(path.read_bytes())
        if kind == "offsets":  # the list of pages leads somewhere else, or round in a circle
            data[4:8] = struct.pack("<I", rng.choice([0, 4, 8, 2**32 - 1, len(data) - 4]))
        for _ in range(rng.choice([1, 3, 20])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))


DATA_SETS: Dict[str, Callable[[Draw, Path], None]] = {
    "mnist": make_idx,
    "cifar10": lambda draw, folder: make_cifar(draw, folder, "cifar10"),
    "cifar100": lambda draw, folder: make_cifar(draw, folder, "cifar100"),
    "imagefolder": make_imagefolder,
    "imagemasks": make_masks,
    "isbi2012": make_stack,
}
