"""The program as a user runs it: help pages, exit codes, `error:` and `hint:` lines, lazy imports."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.presets import few_presets as few_presets
from support.refusals import Refusal, check_refused

from ipucnn import __version__, cli, errors
from ipucnn.command_table import COMMANDS
from ipucnn.config.command import request_of
from ipucnn.config.options import SPECS, find_spec, specs_for
from ipucnn.filesystem import reason_of
from ipucnn.interrupts import Interruption

DERIVED = ["train", "benchmark", "plan-splits", "verify-dataset"]


@pytest.fixture(autouse=True)
def few_of_the_presets(run, few_presets):
    """Runs commands in an empty folder, with few presets."""


def test_version(run):
    assert run("--version") == (0, f"ipucnn {__version__}\n", "")


@pytest.mark.parametrize(
    "args", [(), ("--help",), ("-h",), ("--help-all",), ("-v",), ("-v", "--verbose"), ("-v", "--help")]
)
def test_root_help_lists_every_command(run, args):
    code, out, err = run(*args)
    assert (code, err) == (0, "")
    for command in COMMANDS.values():
        assert command.name in out
        assert command.summary in out


def test_help_is_readable_with_an_absurd_columns_variable(run):
    code, out, err = run("train", "--help", columns=1)
    assert (code, err) == (0, "") and "--micro-batch-size" in out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h", "--help-all"])
def test_help_before_and_after_a_command_is_the_same(run, command, option):
    assert run(option, command) == run(command, option)


@pytest.mark.parametrize("command", DERIVED)
@pytest.mark.parametrize("width", [80, 160])
def test_command_help_lists_its_options_in_panels(run, command, width):
    code, out, err = run(command, "--help-all", columns=width)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width
    for spec in SPECS:
        flag = f"--[no-]{spec.key}" if spec.is_bool else spec.flag
        listed = sum(line.replace(",", " ").startswith(f"│ {flag} ") for line in out.splitlines())
        assert listed == (command in spec.commands), spec.key
        if listed:
            assert spec.panel in out
    for line, about in COMMANDS[command].examples:
        assert line in out and about.split()[0] in out


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.common])
def test_the_help_of_a_large_command_shows_its_common_options(run, command):
    code, out, _ = run(command, "--help", columns=80)
    everything = run(command, "--help-all", columns=80)[1]
    assert code == 0 and len(out.splitlines()) < 100 < len(everything.splitlines())
    for name in COMMANDS[command].common.split():
        assert len(re.findall(rf"{name}[ ,|]", out.replace("[no-]", ""))) >= 1, name
    assert "--help-all" in out and "Examples" in out


def test_help_finds_options_by_a_word(run):
    def options(*words):
        code, out, err = run("train", "--help", *words, columns=80)
        assert (code, err) == (0, "")
        return re.findall(r"^│ --(?:\[no-\])?([a-z0-9-]+)", out, re.MULTILINE)

    assert options("lr")[0] == "learning-rate"
    assert options("batch", "norm")[0] == "norm-layer" and "micro-batch-size" not in options("batch", "norm")
    assert options("Patience") == ["early-stopping"]
    assert options("erasing") == ["random-erasing"]
    # No option matches the whole word, so options that match each of its parts are shown.
    assert options("fraction-of-validation") == ["validation-fraction"]
    assert run("train", "--help", "lenet") == run("train", "lenet", "--help")


def test_names_of_other_programs_are_not_options():
    for spec in SPECS:
        for wish in spec.synonyms.split():
            assert find_spec(wish) is None, f"{wish} is an option, and {spec.key} claims it"


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "models {}",
        "train --{}",
        "infer nothing --split {}",
        "infer nothing image.png --format {}",
        "infer {0} --weights {0}",
        "evaluate {0} --checkpoint {0}",
        "benchmark lenet --mode {}",
        "verify-dataset {0} --dataset {0}",
    ],
)
def test_very_long_arguments_are_shortened_in_errors(run, line):
    code, out, err = run(*line.format("x" * 5000).split())
    assert code in (2, 3) and out == "" and len(err) < 1000
    assert err.startswith("error: ") and "\nhint: " in err


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_completion_is_set_up_in_a_known_shell(run, monkeypatch, tmp_path, capsys, option):
    """Typer ends the process itself, with exit code 0."""
    import shellingham

    monkeypatch.setattr(shellingham, "detect_shell", lambda *_: ("bash", "/bin/bash"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ending:
        run(option)
    printed = capsys.readouterr()
    assert (ending.value.code, printed.err) == (0, "")
    is_installed = any("ipucnn" in path.name for path in (tmp_path / ".bash_completions").glob("*"))
    assert is_installed == (option == "--install-completion")
    assert ("COMPREPLY" in printed.out) == (option == "--show-completion")


def test_completion_without_a_usable_home_folder_is_refused(run, monkeypatch, tmp_path):
    import shellingham

    monkeypatch.setattr(shellingham, "detect_shell", lambda *_: ("bash", "/bin/bash"))
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").write_text("")
    check_refused(run, Refusal("--install-completion", "settings cannot be written", "set HOME"))


def test_completion_of_an_unknown_shell_is_an_error_with_a_hint(run, monkeypatch):
    import shellingham

    def unknown(*_):
        raise shellingham.ShellDetectionFailure

    monkeypatch.setattr(shellingham, "detect_shell", unknown)
    check_refused(run, Refusal("--show-completion", "--show-completion: the shell", "run it in bash"))


def test_root_help_finds_commands_and_options_by_a_word(run):
    """Words of the first page, and some alternative names, lead to commands and options."""
    for words, commands, options in (
        ("rehearse", {"train", "plan-splits"}, {"--device"}),
        ("what-if", {"plan-splits"}, set()),
        ("row", {"diff"}, {"--row"}),
        ("learning rate", {"plot"}, {"--learning-rate,", "--plot-schedule"}),
    ):
        code, out, err = run("--help", *words.split(), columns=120)
        assert (code, err) == (0, "")
        about_commands, _, about_options = out.partition("Options about")
        listed = {line.split()[1] for line in about_commands.splitlines() if line.startswith("│ ")}
        assert listed == commands, words
        assert options <= set(about_options.split()), words
    assert "plan-splits: Plan row N" in run("--help", "row")[1]
    assert run("--help", "train") == run("train", "--help")


@pytest.mark.parametrize("columns", [80, 100, None])
@pytest.mark.parametrize("splits", ["", "--pipeline-splits encoder_block_2_conv1 decoder_block_0_concat"])
def test_print_config_breaks_no_word(succeeds, report, columns, splits):
    preset = "unet_of_a_rather_long_name"
    Path("c.yml").write_text(
        f"{preset}:\n  model-name: unet\n  pipeline-splits: [encoder_block_1_conv1]\n  recomputation: true\n"
    )
    words = f"train --config-path c.yml --config {preset} --dataset membranes {splits} --print-config".split()
    out, _ = succeeds(*words, columns=columns)
    assert max(map(len, out.splitlines())) <= (columns or 140)
    options = report(*words)["options"]
    shown = out.split()
    assert shown.count("key") == 1  # one table
    for key, option in options.items():
        assert key in shown
        for word in str(option["origin"]).split():
            assert word in shown or option["origin"] == "default", key
    for layer in options["pipeline-splits"]["value"]:
        assert layer in shown


def test_print_config_shows_values_and_origins(succeeds):
    out, _ = succeeds("train", "lenet", "--num_epochs", "2", "--print-config")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert rows["num-epochs"] == ["num-epochs", "2", "flag"]
    assert rows["optimizer"][-2:] == ["preset", "lenet"]
    assert rows["shuffle"] == ["shuffle", "True", "default"]


def test_print_config_tells_an_empty_list_from_none(succeeds):
    words = ["train", "lenet", "--print-config", "--pipeline-splits", ""]
    for mapping, shown in ((["--device-mapping", ""], "''"), ([], "-")):
        out, _ = succeeds(*words, *mapping)
        rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
        assert rows["device-mapping"][1] == shown and rows["pipeline-splits"][1] == "-"


def test_commands_have_the_help_of_the_shipped_presets(succeeds):
    """The presets of these tests would stay in it for the tests of other files."""
    out, _ = succeeds("train", "--help", "label-smoothing")
    assert "the preset's, else none" in " ".join(out.replace("│", " ").split())


def test_print_config_shows_no_control_characters(succeeds):
    Path("c.yml").write_text('x: {model: lenet, run-dir: "a\\e[31mb"}\n')
    out, _ = succeeds("train", "--config-path", "c.yml", "--config", "x", "--print-config")
    assert "\x1b" not in out and "a\\x1b[31mb" in out


def test_print_config_as_json_has_every_option(report):
    result = report("train", "lenet", "--no-shuffle", "--print-config")
    assert result["preset"] == "lenet"
    assert set(result["options"]) == {spec.key for spec in specs_for("train")}
    assert result["options"]["shuffle"] == {"value": False, "origin": "flag"}
    assert result["options"]["dataset"]["value"] == "digits"


@pytest.fixture
def calls(monkeypatch):
    """Replaces ``train``; returns the options that it gets."""
    received = []
    monkeypatch.setattr("ipucnn.commands.train.train", received.append)
    return received


def test_a_command_gets_the_resolved_configuration(run, calls):
    line = "-v train --replicas 4 --pipeline_splits a b --device-mapping 0 1 0 --model lenet --logs-per-epoch 1/3"
    line += " --recomputation True --eval-freq 2 --precision 16.16 --json"
    assert run(*line.split()) == (0, "", "")
    (call,) = calls
    assert (call.verbose, call.json, call.print_config) == (True, True, False)
    resolved = request_of(call, "train").resolve()
    assert (resolved.command, resolved.record.name, str(resolved.origins["num_replicas"])) == (
        "train",
        "lenet",
        "flag",
    )
    values = {
        "num_replicas": 4,
        "pipeline_splits": ("a", "b"),
        "device_mapping": (0, 1, 0),
        "logs_per_epoch": 1 / 3,
        "recomputation": True,
        "validation_freq": 2,
        "precision": "16.16",
    }
    assert {name: getattr(resolved.config, name) for name in values} == values


def test_verbose_is_off_by_default(succeeds, calls):
    succeeds("train")
    assert (calls[0].verbose, calls[0].json, calls[0].config) == (False, False, None)
    assert request_of(calls[0], "train").resolve().record.name == "toy_model"


def test_none_resets_a_value_of_a_preset(succeeds, calls):
    succeeds("train", "cifar_resnet8", "--lr-warmup-params", "none", "--pipeline-splits")
    config = request_of(calls[0], "train").resolve().config
    assert (config.lr_warmup_params, config.pipeline_splits) == (None, ())


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (
            errors.DataError("no such file", "look elsewhere"),
            3,
            "error: no such file\nhint: look elsewhere\n",
        ),
        (errors.InfeasibleError("too big"), 4, "error: too big\n"),
        (errors.MissingError("no IPU"), 6, "error: no IPU\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Interruption(errors.EXIT_SIGHUP), 129, "interrupted\n"),
        (MemoryError(), 4, "error: out of memory\n"),
    ],
)
def test_exit_codes(run, monkeypatch, raised, code, text):
    def fail(args):
        raise raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    exit_code, out, err = run("train")
    assert (exit_code, out) == (code, "") and err.startswith(text)


@pytest.mark.parametrize("error", [ZeroDivisionError(), BrokenPipeError()])
def test_a_bug_shows_its_traceback(capsys, monkeypatch, error):
    # A broken pipe inside the program is a bug: those of stdout and stderr are handled before this point.
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.run(["train"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and type(error).__name__ in err and "bug" in err


def test_a_hint_is_printed_once(run, monkeypatch):
    """Python shows the hint as part of the error's text, the command line on a line of its own."""

    def fail(args):
        try:
            raise errors.DataError("no file", "make the file") from OSError("disk on fire")
        except errors.DataError as cause:
            raise errors.DataError("no run", "make a run") from cause

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(errors.DataError, match=r"^no run\nhint: make a run\Z"):
        fail([])
    assert str(errors.DataError("no run")) == "no run"
    assert run("train")[2].splitlines() == ["error: no run", "hint: make a run"]
    lines = run("train", "-v")[2].splitlines()
    causes = ["caused by: DataError: no file", "caused by: OSError: disk on fire"]
    assert lines == ["error: no run", "hint: make a run", *causes]


def _shell(command, **environment):
    """Runs a shell command in which ``ipucnn`` is the program; returns its exit code, stdout and stderr."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; ipucnn() {{ "{sys.executable}" -m ipucnn "$@"; }}; {command}'],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("args", "unbuffered"), [("--version", ""), ("train --help", "1")])
def test_a_full_file_system_is_an_error_line(args, unbuffered, tmp_path):
    # A limit on file sizes fails like a full disk, without writing to a device.
    command = f"ulimit -f 0; ipucnn {args} > '{tmp_path}/out'"
    code, _, err = _shell(command, PYTHONUNBUFFERED=unbuffered, PYTHONDONTWRITEBYTECODE="1")
    assert code == 3
    lines = err.splitlines()
    assert lines[0] == "error: standard output cannot be written: File too large"
    assert lines[1].startswith("hint: free some space") and len(lines) == 2


def test_other_system_exits_keep_their_code(monkeypatch):
    def leave(args):
        raise SystemExit(143)

    monkeypatch.setattr(cli, "_dispatch", leave)
    with pytest.raises(SystemExit) as ending:
        cli.run(["train"])
    assert ending.value.code == 143


@pytest.mark.slow
def test_closed_and_ascii_streams_are_not_errors():
    assert _shell("ipucnn --version >&-") == (0, "", "")
    assert _shell("ipucnn train lenet --num-epochs 0 2>&-") == (2, "", "")
    code, out, err = _shell("ipucnn train --help", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "") and out.isascii()


def test_errors_are_one_line_of_printable_text(run):
    check_refused(run, Refusal(["train", "le\x1b[31mnet\n\udcff"], "le\\x1b[31mnet\\n\\udcff"), alone=True)


def test_the_reason_is_never_empty():
    assert reason_of(OSError(errno.ENOENT, "No such file", "/a")) == "No such file"
    assert reason_of(OSError("odd")) == "odd"
    assert reason_of(OSError()) == "OSError"


@pytest.mark.slow_cases("ImportError()-MissingError-True", "KeyboardInterrupt()-KeyboardInterrupt-False")
@pytest.mark.parametrize(
    ("raised", "ends_as", "printed"),
    [
        ("KeyboardInterrupt()", "KeyboardInterrupt", False),
        ("Interruption(143)", "Interruption", False),
        ("RuntimeError()", "RuntimeError", True),
        ("ImportError()", "MissingError", True),
    ],
)
def test_output_of_tensorflow_is_shown_only_if_its_import_fails(tmp_path, raised, ends_as, printed):
    (tmp_path / "tensorflow.py").write_text(
        "import os\nfrom ipucnn.interrupts import Interruption\n"
        f"os.write(2, b'oneDNN is on\\n')\nraise {raised}\n"
    )
    script = (
        "from ipucnn.sessions.host import environment\n"
        "try: environment.import_tensorflow()\n"
        "except BaseException as error: print(repr(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.stdout.startswith(f"{ends_as}(") and ("oneDNN" in done.stderr) == printed


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ipucnn tr", "train"),
        ("ipucnn train cifar_resnet", "cifar_resnet8"),
        ("ipucnn train --micro", "--micro-batch-size"),
        ("ipucnn train --dataset cifar", "cifar10"),
        ("ipucnn train --lr-schedule cos", "cosine"),
    ],
)
def test_completion_offers_options_models_and_choices(capsys, monkeypatch, line, offered):
    monkeypatch.setenv("_IPUCNN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        cli.run([])
    assert offered in capsys.readouterr().out.split()


@pytest.mark.slow
def test_commands_import_only_required_modules():
    """Help pages import neither NumPy nor TensorFlow, the first page not even Typer; no check imports TensorFlow."""
    program = (
        "import sys; from ipucnn import cli; from ipucnn.command_table import COMMANDS\n"
        "def imported(line, *names):\n"
        "    cli.run(line.split())\n"
        "    return [line] * bool(set(names) & set(sys.modules))\n"
        "bad = imported('', 'typer', 'numpy', 'tensorflow')\n"
        "for name in COMMANDS: bad += imported(name + ' --help', 'numpy', 'tensorflow')\n"
        "bad += imported('train nope', 'numpy', 'tensorflow')\n"
        "for line in ('train lenet --print-config', 'plan-splits lenet --system nope', 'doctor'):\n"
        "    bad += imported(line, 'tensorflow', 'keras')\n"
        "for line in ('--loss bce_dice', '--baseline absent', '--precision 16', '--mode datum',\n"
        "             '--mode data --device-generated-data', '--mode training --inference',\n"
        "             '--mode data --compare-with keras'):\n"
        "    bad += imported('benchmark lenet ' + line, 'tensorflow', 'keras')\n"
        "sys.exit(str(bad) if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fail_with(monkeypatch, error):
    """Makes ``ipucnn runs`` fail with this error."""
    from ipucnn.runs import compare

    def fail(*_):
        raise error

    monkeypatch.setattr(compare, "find_runs", fail)


def system_error(number, *path):
    return OSError(number, os.strerror(number), *path)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (system_error(errno.ENOENT, "mine/file"), "check the path"),
        (system_error(errno.EACCES, b"/elsewhere/b"), "change its permissions"),
        (system_error(errno.ENOSPC, "/elsewhere/file"), "free some space"),
        (system_error(errno.ENOSPC), "set TMPDIR"),
        (system_error(errno.EMFILE), "ulimit -n"),
        (system_error(errno.EIO), "give another path"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/a']"), "set TMPDIR"),
    ],
)
def test_errors_of_the_machine_and_of_paths_are_no_bugs(run, monkeypatch, error, hint):
    fail_with(monkeypatch, error)
    check_refused(run, Refusal("runs mine", reason_of(error), hint, 3), alone=True)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EBADF, errno.EINVAL, errno.EISDIR])
@pytest.mark.parametrize("path", [(), (7,)])
def test_other_errors_of_the_system_are_bugs(capsys, monkeypatch, number, path):
    fail_with(monkeypatch, system_error(number, *path))
    assert cli.run(["runs", "mine"]) == errors.EXIT_BUG
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "this is a bug in ipucnn" in shown and "hint:" not in shown


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("train lenet", "use a smaller --micro-batch-size or --image-size"),
        ("evaluate run", "use a smaller --validation-micro-batch-size or --image-size"),
        ("verify-dataset run", "hint: end other programs"),
        ("runs run", "hint: end other programs"),
    ],
)
def test_out_of_memory_advises_options_of_the_command(run, monkeypatch, command, hint):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(cli, "_dispatch", fail)
    check_refused(run, Refusal(command, "out of memory", hint, 4), alone=True)


def test_with_v_errors_of_the_system_have_a_traceback(capsys, monkeypatch):
    fail_with(monkeypatch, system_error(errno.ENOSPC))
    for args, has_traceback in ((["runs", "mine"], False), (["-v", "runs", "mine"], True)):
        assert cli.run(args) == 3
        shown = capsys.readouterr().err
        assert ("Traceback" in shown) == has_traceback and "error: No space left" in shown
