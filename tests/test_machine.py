"""Resources of this machine that are available to this process."""

import gc
import os
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from ipucnn import machine
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.machine import cpu_quotas, group_memories
from ipucnn.sessions.host import environment


def test_memory_equals_the_files_of_linux():
    facts = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                facts[name] = int(rest.split()[0]) * 1024
    except OSError:
        pytest.skip("this system has no /proc/meminfo")
    assert machine.host_memory_bytes() == facts["MemTotal"]
    assert 0 < machine.available_bytes() <= min(2 * facts["MemAvailable"], machine.host_memory_bytes())


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_off_while_tensorflow_is_imported(monkeypatch, was_enabled):
    meanwhile = []

    class NotThere:
        @staticmethod
        def find_spec(name, *_):
            if name == "tensorflow":
                meanwhile.append(gc.isenabled())
                raise ImportError("no TensorFlow")

    monkeypatch.setattr(sys, "meta_path", [NotThere, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(MissingError, match="no TensorFlow"):
            environment.import_tensorflow()
        assert (meanwhile, gc.isenabled()) == ([False], was_enabled)
    finally:
        gc.enable()


VERSIONS = [
    ("0::/a/b", "", ("memory.max", "memory.current"), "anon 5\ninactive_file 600\n"),
    (
        "5:cpu:/x\n4:memory:/a/b",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        "inactive_file 1\ntotal_inactive_file 600\n",
    ),
]


@pytest.fixture(params=VERSIONS, ids=["version 2", "version 1"])
def group(request, tmp_path):
    """Returns a function that writes a group's files (folder, limit, used), and one that reads a process's groups."""
    line, top, (limit, used), stat = request.param
    process = tmp_path / "cgroup"
    process.write_text(line + "\n")

    def write(folder, limit_text, used_bytes):
        place = tmp_path / "sys" / top / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / limit).write_text(limit_text)
        (place / used).write_text(f"{used_bytes}\n")
        (place / "memory.stat").write_text(stat)

    return write, lambda: list(group_memories(process, tmp_path / "sys"))


def test_pages_of_files_count_as_free_memory_of_a_control_group(group):
    """A container that has read much data is full of such pages, which the system can free."""
    write, ask = group
    assert ask() == []
    write(".", "1000\n", 900)
    assert ask() == [700]
    write(".", "max\n", 900)
    assert ask() == []


def test_nested_groups_all_limit_memory(group, monkeypatch):
    """The tightest group decides the free memory; the topmost group of the file system is not enough."""
    write, ask = group
    write("a/b", "5000", 700)
    write("a", "2000", 1000)
    write(".", "9000", 600)
    assert ask() == [4900, 1600, 9000]
    monkeypatch.setattr(machine, "group_memories", ask)
    free = SimpleNamespace(available=8000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert machine.available_bytes() == 1600
    free.available = 900
    assert machine.available_bytes() == 900


def test_a_process_in_no_group_has_no_limit(tmp_path):
    assert list(group_memories(tmp_path / "absent", tmp_path)) == []
    (tmp_path / "cgroup").write_text("no colons\n\n")
    assert list(group_memories(tmp_path / "cgroup", tmp_path)) == []


@pytest.fixture(params=["version 2", "version 1", "version 1, one controller"])
def quota_of_group(request, tmp_path):
    """Returns a function that writes a group's quota and period in us, and one that reads a process's quotas."""
    line, top = {
        "version 2": ("0::/a/b", ""),
        "version 1": ("4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/", "cpu"),
        "version 1, one controller": ("3:cpuset:/a\n2:cpuacct:/a\n1:cpu:/a/b", "cpu"),
    }[request.param]
    process = tmp_path / "cgroup"
    process.write_text(line + "\n")

    def write(folder, quota, period):
        place = tmp_path / "sys" / top / folder
        place.mkdir(parents=True, exist_ok=True)
        if top:
            (place / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
            (place / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (place / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")

    return write, lambda: list(cpu_quotas(process, tmp_path / "sys"))


def test_cores_follow_the_tightest_quota_of_the_control_groups(quota_of_group, monkeypatch):
    write, ask = quota_of_group
    monkeypatch.setattr(machine, "cpu_quotas", ask)
    monkeypatch.setattr(machine, "schedulable_cores", lambda: 8)
    assert (ask(), machine.cpu_quota(), machine.num_cores()) == ([], None, 8)
    write("a/b", None, 100000)
    assert (machine.cpu_quota(), machine.num_cores()) == (None, 8)
    write(".", 1600000, 100000)
    assert (machine.cpu_quota(), machine.num_cores()) == (16, 8)
    write("a", 250000, 100000)
    write("a/b", 400000, 100000)
    assert (ask(), machine.num_cores()) == ([4, 2.5, 16], 3)
    write("a/b", 25000, 50000)
    assert (machine.cpu_quota(), machine.num_cores()) == (0.5, 1)
    machine.fix_threads(None)
    assert (machine.operation_threads(), machine.operations_at_once()) == (1, 1)


def test_doctor_shows_the_quota_of_a_container(tmp_path, monkeypatch, report):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    quotas = list(cpu_quotas(tmp_path / "cgroup", tmp_path))
    monkeypatch.setattr(machine, "cpu_quotas", lambda: quotas)
    monkeypatch.setattr(machine, "schedulable_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    host = report("doctor")["host"]
    assert (host["num_cores"], host["num_cores_present"], host["cpu_quota"]) == (1, 8, 0.5)


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_parallel_results_come_in_order(at_once):
    at_work, most, lock = 0, 0, threading.Lock()

    def square(number):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.002 * (number % 3))
        with lock:
            at_work -= 1
        return number * number

    given = ((number,) for number in range(12))
    assert list(machine.parallel_map(square, given, at_once)) == [n * n for n in range(12)]
    assert most <= at_once and (most > 1) == (at_once > 1)
    assert list(machine.parallel_map(square, (), at_once)) == []
    with pytest.raises(ZeroDivisionError):
        list(machine.parallel_map(lambda number: 1 // number, [(2,), (1,), (0,), (1,)], at_once))


def test_operations_at_once(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    for threads, at_once in ((None, 1), (1, 8), (3, 2), (4, 2), (8, 1), (16, 1)):
        machine.fix_threads(threads, required=False)
        assert machine.operations_at_once() == at_once and not machine.are_threads_required()
    machine.fix_threads(3)
    assert machine.are_threads_required()


def import_with(monkeypatch, threading_, gpus=(), **options):
    """Imports a TensorFlow that has these threads and GPUs."""
    tf = mock.MagicMock(config=SimpleNamespace(threading=threading_, get_visible_devices=lambda kind: gpus))
    tf.keras.backend.backend.return_value = "tensorflow"
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    assert environment.import_tensorflow(deterministic=False, **options) is tf


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
@pytest.mark.parametrize("works_already", [True, False])
def test_threads_of_tensorflow(monkeypatch, required, gpus, works_already):
    """Half of the cores apply to a CPU that TensorFlow does not use yet; a requested number always applies."""
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    monkeypatch.setattr(environment, "schedulable_cores", lambda: 8)
    calls = []

    def set_threads(number):
        if works_already:
            raise RuntimeError("Intra op parallelism cannot be modified after initialization.")
        calls.append(number)

    threading_ = SimpleNamespace(
        get_intra_op_parallelism_threads=lambda: 0, set_intra_op_parallelism_threads=set_threads
    )
    machine.fix_threads(4, required)
    options = {"start": lambda: calls.append("started"), "may_use_gpus": True}
    if required and works_already:
        with pytest.raises(ConfigurationError, match="--threads 4: TensorFlow works with 8"):
            import_with(monkeypatch, threading_, gpus, **options)
        return
    import_with(monkeypatch, threading_, gpus, **options)
    all_cores = not required and (gpus or works_already)
    assert machine.operation_threads() == (8 if all_cores else 4)
    assert calls == [*([] if all_cores else [4]), "started"]


def test_tensorflow_gets_no_more_threads_than_the_quota_has_cores(monkeypatch):
    monkeypatch.setattr(environment, "num_cores", lambda: 2)
    monkeypatch.setattr(environment, "schedulable_cores", lambda: 8)
    numbers = []
    for configured in (0, 5):
        threading_ = SimpleNamespace(
            get_intra_op_parallelism_threads=lambda configured=configured: configured,
            set_intra_op_parallelism_threads=numbers.append,
        )
        machine.fix_threads(None)
        import_with(monkeypatch, threading_)
    assert numbers == [2]  # a number that the user gave TensorFlow stays


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ConfigurationError("there is no GPU", "x"), ""), (ImportError("a library"), "noise\n")],
)
def test_output_of_a_failed_import_is_shown_and_that_before_a_refusal_is_not(capfd, error, shown):
    with pytest.raises(type(error)), environment.stderr_aside(shown_if_failed=True):
        os.write(2, b"noise\n")
        raise error
    assert capfd.readouterr().err == shown
