"""Inspecting, reading and writing: paths of every kind, and outputs of every kind."""

import ctypes
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, check_raises, check_refused

from ipucnn import filesystem
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import Kind
from ipucnn.runs import compare
from ipucnn.text import printable, quoted

IS_ROOT = os.geteuid() == 0


# -- inspecting -----------------------------------------------------------------------------------------------

text = st.text(max_size=300) | st.text(alphabet="~/.a\0\n\udc80\ud800é", max_size=40)


@given(text)
def test_every_text_is_a_path_or_an_error_with_a_hint(name):
    try:
        path = filesystem.expand(name)
        filesystem.kind_of(path)
        filesystem.real(path)
        filesystem.entries(path)
        filesystem.read_bytes(path, 10)
    except UserError as error:
        assert error.hint and len(error.message) < 700
        assert printable(error.message) == error.message and printable(error.hint) == error.hint


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("", 2, "a path is empty"),
        ("~nouser/a", 2, "home folder of ~nouser"),
        ("a\0b", 3, "null byte"),
        ("z" * 256, 3, "File name too long"),
        ("é" * 128, 3, "File name too long"),
        ("/".join(["y" * 200] * 21), 3, "File name too long"),
        ("a\ud800", 3, "surrogates not allowed"),
    ],
)
def test_impossible_paths_are_refused(name, code, message):
    error = check_raises({2: ConfigurationError, 3: DataError}[code], message, "", filesystem.expand, name)
    assert error.exit_code == code and len(error.message) < 500


def test_a_cache_path_needs_no_access_to_the_home_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("IPUCNN_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/closed")

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refuse)
        assert filesystem.cache_folder("graphs") == Path("/closed/.cache/ipucnn/graphs")
        check_raises(DataError, "Permission denied", "", filesystem.expand, "~/runs")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    check_raises(ConfigurationError, "home folder", "HOME", filesystem.expand, "~/runs")
    # A user without a home folder has no cache.
    assert filesystem.cache_folder("graphs") is None and filesystem.private_cache_folder("numba") is None
    filesystem.write_cached(None, "text")
    monkeypatch.setenv("IPUCNN_CACHE_DIR", "/elsewhere")
    assert filesystem.cache_folder("graphs") == Path("/elsewhere/graphs")


def test_a_cache_that_cannot_be_written_is_left_out(here):
    (here / "file").write_text("a")
    filesystem.write_cached(here / "file" / "entry", "text")
    filesystem.write_cached(here / "new" / "entry", "text")
    assert (here / "new" / "entry").read_text() == "text"


def test_kinds_follow_links(here):
    (here / "file").write_text("a")
    (here / "folder").mkdir()
    os.mkfifo(here / "fifo")
    for name, kind in (("file", Kind.FILE), ("folder", Kind.FOLDER), ("fifo", Kind.OTHER)):
        (here / f"to-{name}").symlink_to(name)
        assert filesystem.kind_of(here / name) is filesystem.kind_of(here / f"to-{name}") is kind
    (here / "dangling").symlink_to("nowhere")
    for absent in ("dangling", "none", "file/below"):
        assert filesystem.kind_of(here / absent) is Kind.ABSENT


def test_a_deleted_working_directory_is_an_error(here):
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        outputs, inputs = [("--save", here / "a")], [("the plan", Path("plan.yml"))]
        with pytest.raises(FileNotFoundError) as error:
            filesystem.check_not_replaced(outputs, inputs)
        assert "was deleted" in filesystem.user_error_of(error.value).message
    finally:
        os.chdir(here)


@pytest.mark.skipif(
    IS_ROOT, reason="root may search every folder; tests/test_hostile_values.py becomes another user"
)
def test_an_unsearchable_folder_is_an_error(here):
    (here / "closed").mkdir(mode=0)
    check_raises(DataError, "ermission denied", "permissions", filesystem.kind_of, here / "closed" / "a")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("EACCES", "permissions"),
        ("EPERM", "permissions"),
        ("EROFS", "permissions"),
        ("ELOOP", "without links"),
        ("ENAMETOOLONG", "a shorter path"),
        ("ENOENT", "check the path"),
        ("ENOTDIR", "check the path"),
        ("ENOSPC", "free some space"),
        ("EDQUOT", "free some space"),
        ("EFBIG", "free some space"),
        ("EMFILE", "ulimit -n"),
        ("EIO", "another path"),
    ],
)
def test_each_system_error_ends_a_command_with_its_hint(name, hint, monkeypatch, run):
    def refuse(*_):
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), "a")

    monkeypatch.setattr(compare, "find_runs", refuse)
    check_refused(run, Refusal("runs", f"error: a: {os.strerror(getattr(errno, name))}", hint, 3), alone=True)


LONG = "x" * 300
REFUSED = {
    "kind_of": (filesystem.kind_of, ["loop"]),
    "expand": (filesystem.expand, ["nul\0", LONG]),
    "entries": (filesystem.entries, ["loop"]),
    "read_bytes": (lambda path: filesystem.read_bytes(path, 10), ["none", "fifo", "folder", "loop", "large"]),
    "read_text": (lambda path: filesystem.read_text(path, 100), ["none", "large"]),
    "append_text": (lambda path: filesystem.append_text(path, "x"), ["to-file", "fifo", "folder"]),
    "make_folder": (filesystem.make_folder, ["file", "file/below"]),
    "check_makeable": (
        filesystem.check_makeable,
        ["file", "file/below/that", "dangling", "dangling/below", "fifo", LONG],
    ),
    "check_output": (
        filesystem.check_output,
        ["folder", "to-folder", "loop", "dangling", "none/a", "file/a", "", LONG],
    ),
    "write_output": (lambda path: filesystem.write_output_text(path, "a"), ["folder", "fifo", "none/a"]),
}


@pytest.mark.parametrize(("ask", "names"), REFUSED.values(), ids=REFUSED)
def test_errors_of_wrong_kinds_begin_with_the_path(here, ask, names):
    """No call waits for the other end of a FIFO."""
    (here / "file").write_text("mine")
    (here / "large").write_bytes(b"\xff" * 20)
    (here / "folder").mkdir()
    os.mkfifo(here / "fifo")
    links = {"loop": "loop", "dangling": "no/where", "to-folder": "folder", "to-file": "file"}
    for link, target in links.items():
        (here / link).symlink_to(target)
    for name in names:
        path = f"{here}/{name}" if ask is filesystem.expand else here / name
        assert check_raises(UserError, "", "", ask, path).message.startswith(str(here)), name
    assert (here / "file").read_text() == "mine"


# -- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 9, 10, 11, 60])
def test_reading_is_bounded(here, size):
    (here / "a").write_bytes(b"x" * size)
    if size <= 10:
        assert filesystem.read_bytes(here / "a", 10) == b"x" * size
    else:
        check_raises(DataError, "larger than", "", filesystem.read_bytes, here / "a", 10)


def test_files_of_proc_are_read_and_devices_are_refused(here):
    leader, follower = os.openpty()
    terminal, words = Path(os.ttyname(follower)), "is a device, a FIFO or a socket, not a file"
    check_raises(DataError, words, "", filesystem.read_bytes, terminal, 10)
    os.close(leader), os.close(follower)
    version = Path("/proc/version")  # its reported size is 0
    data = version.read_bytes()
    assert filesystem.read_bytes(version, len(data)) == data and version.stat().st_size == 0
    check_raises(DataError, "larger than", "", filesystem.read_bytes, version, len(data) - 1)
    symbols = Path("/proc/kallsyms")  # several megabytes
    if os.access(symbols, os.R_OK):
        assert len(filesystem.read_bytes(symbols, 2**26)) > 2**20


def test_a_folder_deleted_meanwhile_counts_as_locked(here):
    (here / "folder").mkdir()
    assert not filesystem.is_locked(here / "folder") and filesystem.is_locked(here / "absent")


def test_a_fifo_that_meanwhile_replaced_a_file_is_not_waited_for(here, monkeypatch):
    os.mkfifo(here / "a")
    monkeypatch.setattr(filesystem, "kind_of", lambda path: filesystem.Kind.FILE)
    data = []
    reader = threading.Thread(target=lambda: data.append(filesystem.read_bytes(here / "a", 10)), daemon=True)
    reader.start()
    reader.join(10)
    assert data == [b""]


def test_invalid_utf_8_is_reported_with_its_line(here):
    (here / "a").write_bytes(b"one\ntwo\n\xff")
    check_raises(DataError, "line 3: byte 0xff", "", filesystem.read_text, here / "a", 100)


# -- writing --------------------------------------------------------------------------------------------------


def left(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.endswith(".tmp"))


@pytest.mark.parametrize("name", ["a", "a\nb", "é", "z" * 250, "z" * 255, "é" * 127, "\udc80", ".hidden"])
def test_a_name_of_any_length_is_written(here, name):
    for text in ("first", "second"):
        filesystem.write_output_text(here / name, text)
        assert (here / name).read_text() == text and left(here) == []


def test_a_linked_file_is_written_and_keeps_its_mode(here):
    (here / "real").mkdir()
    target = here / "real" / "file"
    target.write_text("old")
    target.chmod(0o640)
    (here / "real" / "second").symlink_to("file")
    (here / "first").symlink_to("real/second")
    filesystem.check_output(here / "first")
    filesystem.write_output_text(here / "first", "new")
    assert target.read_text() == "new" and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert (here / "first").is_symlink() and (here / "real" / "second").is_symlink()
    (here / "dangling").symlink_to("real/made")
    filesystem.write_output_text(here / "dangling", "made")
    assert (here / "real" / "made").read_text() == "made" and (here / "dangling").is_symlink()
    assert left(here) == left(here / "real") == []


def test_a_new_file_has_the_mode_of_any_new_file(here):
    filesystem.write_output_text(here / "ours", "a")
    filesystem.append_text(here / "rows", "a")
    filesystem.write_text(here / "kept", "a")
    (here / "any").write_text("a")
    for path in (here / "ours", here / "rows", here / "kept", filesystem.make_new_file(here, "new")):
        assert path.stat().st_mode == (here / "any").stat().st_mode


def test_a_file_of_a_run_replaces_a_link(here):
    (here / "precious").write_text("mine")
    (here / "config.yml").symlink_to("precious")
    filesystem.write_text(here / "config.yml", "theirs")
    assert (here / "precious").read_text() == "mine"
    assert not (here / "config.yml").is_symlink() and (here / "config.yml").read_text() == "theirs"


def test_lines_are_appended(here):
    filesystem.append_text(here / "rows", "a\n")
    filesystem.append_text(here / "rows", "b\n")
    assert (here / "rows").read_text() == "a\nb\n"


def test_temporary_names_are_unpredictable(here):
    names = []
    for _ in range(2):
        filesystem.write_atomically(here / "a", lambda path: names.append(path.name) or path.write_text("a"))
    assert names[0] != names[1]
    assert all(filesystem.temporary_of(name) == "a" for name in names)


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_full_disk_leaves_only_the_old_file(here, monkeypatch, broken):
    (here / "a").write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, broken, full)
    check_raises(DataError, "No space left", "free some", filesystem.write_output_text, here / "a", "new")
    assert (here / "a").read_text() == "old" and left(here) == []


class Reader(threading.Thread):
    """A thread that opens a FIFO and reads ``num_bytes`` from it."""

    def __init__(self, path, num_bytes):
        super().__init__(daemon=True)
        self.opened, self.num_bytes, self.data = os.open(path, os.O_RDONLY | os.O_NONBLOCK), num_bytes, b""
        os.set_blocking(self.opened, True)
        self.start()

    def run(self):
        while len(self.data) < self.num_bytes:
            self.data += os.read(self.opened, self.num_bytes - len(self.data))
        os.close(self.opened)


def test_a_fifo_is_written_to_and_stays_a_fifo(here):
    fifo = here / "fifo"
    os.mkfifo(fifo)
    hint = "start the program that reads"
    check_raises(DataError, "fifo cannot be written", hint, filesystem.write_output_text, fifo, "a")
    # The last reader closes the FIFO before all is written, which is no error.
    for num_read, num_written in ((5, 5), (300_000, 300_000), (10, 1_000_000)):
        reader = Reader(fifo, num_read)
        filesystem.check_output(fifo)
        filesystem.write_output(fifo, lambda path, size=num_written: path.write_bytes(b"x" * size))
        reader.join(60)
        assert reader.data[:num_read] == b"x" * num_read and stat.S_ISFIFO(fifo.lstat().st_mode)
    assert [p.name for p in here.iterdir()] == ["fifo"]


def test_a_terminal_is_written_to_and_stays_a_device(here):
    leader, follower = os.openpty()
    terminal = Path(os.ttyname(follower))
    (here / "link").symlink_to(terminal)
    for path in (terminal, here / "link"):
        filesystem.check_output(path)
        filesystem.write_output_text(path, "plan\n")
        assert os.read(leader, 100).replace(b"\r", b"") == b"plan\n"
        assert stat.S_ISCHR(os.stat(terminal).st_mode) and (here / "link").is_symlink()
    os.close(leader), os.close(follower)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "/proc/thread-self/fd/{}"])
@pytest.mark.parametrize("to", ["file", "pipe"])
def test_an_open_file_is_written_to_at_its_position(here, name, to):
    """A shell's ``> file`` and ``>(cat)`` give such paths to a process."""
    if to == "pipe":
        reading, number = os.pipe()
    else:
        number = os.open(here / "out", os.O_RDWR | os.O_CREAT)
        reading = os.open(here / "out", os.O_RDONLY)
    os.write(number, b"before ")
    path = Path(name.format(number))
    filesystem.check_output(path)
    filesystem.write_output_text(path, "written ")
    os.write(number, b"after")
    os.close(number)
    assert os.read(reading, 100) == b"before written after"
    os.close(reading)


def test_streams_of_this_process_are_recognised_by_name(here):
    for name in ("/dev/stdout", "/dev/stderr", "/dev//fd/1", "/proc/self/fd/1", "/proc/thread-self/fd/1"):
        assert filesystem.is_written_to(Path(name))
    (here / "file").write_text("a")
    for name in ("file", "none", "/dev/stdoutx", "/proc/self/fdinfo/1"):
        assert not filesystem.is_written_to(here / name)
    reading = os.open(here / "file", os.O_RDONLY)
    for number in (reading, 1000000):
        path = Path(f"/dev/fd/{number}")
        check_raises(DataError, "/dev/fd/", "", filesystem.write_output_text, path, "a")
    os.close(reading)


def test_stdout_keeps_the_order_of_writes(here):
    # Not /dev/stdout: a failure as root would remove it from the machine.
    code = (
        "import pathlib; from ipucnn import filesystem; print('first'); "
        "filesystem.write_output_text(pathlib.Path('/dev/fd/1'), 'second\\n'); print('third')"
    )
    variables = {**os.environ, "PYTHONPATH": str(Path(filesystem.__file__).parents[1])}
    with open(here / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, env=variables)
    assert (here / "out").read_text() == "first\nsecond\nthird\n"


def test_sockets_and_disks_are_refused_as_outputs(here):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        paths = [here / "socket", *(path for path in Path("/dev").iterdir() if path.is_block_device())]
        for path in paths:
            check_raises(DataError, "is a disk or a socket", "", filesystem.check_output, path)


@pytest.mark.skipif(IS_ROOT, reason="root writes everywhere")
def test_unwritable_outputs_are_refused_beforehand(here):
    (here / "sealed").mkdir(mode=0o555)
    (here / "kept").write_text("mine")
    (here / "kept").chmod(0o444)
    os.mkfifo(here / "fifo", 0o444)
    for name in ("sealed/a", "kept", "fifo"):
        check_raises(DataError, "not writable", "", filesystem.check_output, here / name)
    check_raises(DataError, "not writable", "", filesystem.check_makeable, here / "sealed" / "a" / "b")


def test_two_outputs_cannot_be_one_file(here):
    (here / "a").write_text("a")
    (here / "b").symlink_to("a")
    (here / "c").symlink_to("new")
    same = (("a", "a"), ("a", "b"), ("c", "new"), ("new", "./new"), ("new", f"../{here.name}/new"))
    for one, two in same:
        outputs = ("--save", here / one), ("--html", here / two)
        check_raises(
            ConfigurationError, "--save and --html are both", "", filesystem.check_not_replaced, outputs
        )
    filesystem.check_not_replaced((("--save", here / "a"), ("--html", here / "new"), ("--plot", None)))
    filesystem.check_not_replaced((("--save", Path("/dev/stdout")), ("--html", Path("/dev/stdout"))))


def test_an_output_cannot_be_an_input(here):
    (here / "a").write_text("a")
    (here / "b").symlink_to("a")
    inputs = [("the plan", here / "a")]
    outputs = [("--html", here / "b")]
    check_raises(ConfigurationError, "is the plan", "", filesystem.check_not_replaced, outputs, inputs)
    filesystem.check_not_replaced([("--html", here / "c")], inputs)


def test_a_new_folder_lies_beside_the_other_one(here, monkeypatch):
    """Also beside the current folder, whose name is not in its path."""
    (here / "set" / "in").mkdir(parents=True)
    assert filesystem.new_folder(Path("set"), "classes") == Path("set-classes")
    Path("set-classes").symlink_to("nowhere")
    assert filesystem.new_folder(Path("set"), "classes") == Path("set-classes2")
    monkeypatch.chdir("set/in")
    assert filesystem.new_folder(Path("."), "classes") == here.resolve() / "set" / "in-classes"
    assert filesystem.new_folder(Path(".."), "classes") == here.resolve() / "set-classes2"


def test_a_check_of_a_lock_hinders_no_other_check(here, monkeypatch):
    close, answers = os.close, []
    (here / "folder").mkdir()

    def check_again(handle):
        monkeypatch.setattr(os, "close", close)
        answers.append(filesystem.is_locked(here / "folder"))
        close(handle)

    monkeypatch.setattr(os, "close", check_again)
    assert not filesystem.is_locked(here / "folder") and answers == [False]


def test_checking_a_new_folder_does_not_create_it(here):
    filesystem.check_makeable(here / "a" / "b")
    assert list(here.iterdir()) == []


def test_only_temporary_files_of_killed_processes_are_removed(here):
    for name in (".a.123.tmp", ".b.123.tmp", "a", ".a.tmp"):
        (here / name).write_text("x")
    (here / ".a.5.tmp").mkdir()
    (here / "precious").write_text("mine")
    (here / ".a.6.tmp").symlink_to("precious")
    filesystem.remove_temporaries(here, lambda name: name == "a")
    assert sorted(p.name for p in here.iterdir()) == [".a.5.tmp", ".a.tmp", ".b.123.tmp", "a", "precious"]


# -- the rest of the package ----------------------------------------------------------------------------------


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("old")

    def write(path):
        assert (folder / "old").read_text() == "old"
        (path / "new").write_text("new")

    rename = os.rename

    def failing(source, target):
        if Path(target).name == "folder" and (Path(source) / "new").exists():
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        patched.setattr(
            ctypes, "CDLL", lambda name: None
        )  # a system that cannot exchange two folders in one step
        check_raises(DataError, "cannot be written", "", filesystem.write_folder, folder, write)
    assert [p.name for p in folder.iterdir()] == ["old"] and list(tmp_path.iterdir()) == [folder]
    filesystem.write_folder(folder, write)
    assert [p.name for p in folder.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [folder]


@pytest.mark.skipif(sys.platform != "linux", reason="the step in which two folders change places is Linux's")
def test_a_folder_exists_while_it_is_replaced(tmp_path, monkeypatch):
    """It exists whenever the process is killed; with two renames there would be a moment without it."""
    folder = tmp_path / "folder"
    folder.mkdir()

    def killed(*paths):
        raise KeyboardInterrupt

    for module, name in ((os, "fsync"), (ctypes, "CDLL")):
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", killed)
            patched.setattr(module, name, killed)
            with pytest.raises(KeyboardInterrupt):
                filesystem.write_folder(folder, lambda path: (path / "new").write_text("new"))
        assert folder.is_dir()
    assert [p.name for p in folder.iterdir()] == ["new"]


def test_free_bytes_are_those_of_the_nearest_folder(here, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=7))
    (here / "a").mkdir()
    assert filesystem.free_bytes(here / "a" / "b" / "c") == 7 and asked == [here / "a"]


def test_a_folder_below_a_link_or_a_file_cannot_be_made(here):
    (here / "link").symlink_to("absent")
    (here / "file").touch()
    for name, what in (("link", "a link that leads nowhere"), ("file", "a file")):
        with pytest.raises(DataError, match=f"{name} is {what}, not a folder"):
            filesystem.check_makeable(here / name / "run")


def test_new_files_have_the_next_unused_name(here):
    names = [filesystem.make_new_file(here, "a").name for _ in range(4)]
    assert names == ["a", "a.2", "a.3", "a.4"] and sorted(os.listdir(here)) == names


@tries(100, slow=1000)
@given(st.binary(min_size=1, max_size=12).filter(lambda data: b"\0" not in data and b"/" not in data))
def test_bash_reads_the_name_that_a_hint_quotes(name):
    path = Path(os.fsdecode(name))
    written = subprocess.run(
        ["bash", "-c", f"printf %s {quoted(path)}"], stdout=subprocess.PIPE, check=True
    ).stdout
    assert written in (name, b"./" + name) and not written.startswith(b"-")
    assert quoted(path).isprintable()


def test_names_that_no_file_can_have_are_quoted_in_one_line():
    assert quoted("\ud800\u200b\n") == r"$'\xed\xa0\x80\xe2\x80\x8b\x0a'"
