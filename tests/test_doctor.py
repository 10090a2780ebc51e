"""`ipucnn doctor` on machines that consist of fake tools on PATH, a fake SDK, and environment variables."""

import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.refusals import check_raises

from ipucnn.command_table import COMMANDS
from ipucnn.diagnosis.decision import Machine, choose
from ipucnn.diagnosis.ipus import Device, find_ipus, parse_devices, parse_info
from ipucnn.diagnosis.look import Probe, find_disk, probe_tensorflow
from ipucnn.errors import MissingError
from ipucnn.sessions.factory import check_device
from ipucnn.sessions.host.gpus import Gpu, find_gpus
from ipucnn.sessions.poplar import sdk_environment
from ipucnn.sessions.poplar.sdk_environment import SdkEnvironment
from ipucnn.system_programs import run_program

# Output formats of Graphcore's command line tools, for made-up machines.
POD = """\
Graphcore device listing:
Partition: p7 [active]
-+- Id: [0], target: [Fabric], IPU-M host: [10.0.0.1], IPU#: [3]
-+- Id: [1], target: [Fabric], IPU-M host: [10.0.0.1], IPU#: [2]
-+- Id: [2], target: [Fabric], IPU-M host: [10.0.0.1], IPU#: [1]
-+- Id: [3], target: [Fabric], IPU-M host: [10.0.0.1], IPU#: [0]
-+- Id: [4], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [10.0.0.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [10.0.0.1], IPU#: [2]
-+- Id: [5], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [10.0.0.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [10.0.0.1], IPU#: [2]
 |--- Id: [2], DNC Id: [2], IPU-M host: [10.0.0.1], IPU#: [1]
 |--- Id: [3], DNC Id: [3], IPU-M host: [10.0.0.1], IPU#: [0]
Partition: other
-+- Id: [0], target: [Fabric], IPU-M host: [10.0.0.2], IPU#: [3]
-+- Id: [9], target: [Fabric], IPU-M host: [10.0.0.2], IPU#: [2]
"""
CARDS = """\
Graphcore device listing:

-+- Id:  [0], type:      [PCIe], PCI Domain: [0000:1a:00.0]
-+- Id:  [1], type:      [PCIe], PCI Domain: [0000:1b:00.0]
-+- Id:  [2], type: [Multi IPU]
 |--- PCIe Id: [0], DNC Id: [0], PCI Domain: [0000:1a:00.0]
 |--- PCIe Id: [1], DNC Id: [1], PCI Domain: [0000:1b:00.0]
"""
INFO = """\
Device Info:
  id: 0
  target: Fabric
  board type: M2000
  clock: 1330MHz
  driver version: 1.3.0
  firmware major version: 2
  firmware version: 2.4.4
  gateway software version: 2.4.2
  ipu architecture: ipu2
  ipu power: N/A
  ipuof partition id: p7
  ipuof server version: 1.9.0
  partition sync type: c2-compatible
  reconfigurable partition: true
  remote buffers supported: 1
  user name:
"""


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """Provides a machine without tools and variables; ``tmp_path / "bin"`` is the whole PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in list(os.environ):
        if name.startswith(("IPUOF_", "POPDIST_", "POPLAR_", "TF_POPLAR_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tool(tmp_path):
    """Puts a program on PATH that prints a text, chosen by its arguments."""

    def make(name, text="", code=0, script="", **by_argument):
        lines = ["#!/bin/sh", 'case "$*" in']
        for number, (argument, output) in enumerate(by_argument.items()):
            (tmp_path / f"{name}.{number}").write_text(output)
            lines.append(
                f"*{argument.replace('_', '-')}*) /bin/cat '{tmp_path / f'{name}.{number}'}'; exit 0;;"
            )
        (tmp_path / f"{name}.text").write_text(text)
        lines += ["esac", script, f"/bin/cat '{tmp_path / f'{name}.text'}'", f"exit {code}"]
        path = tmp_path / "bin" / name
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    return make


@pytest.fixture
def pod(tool):
    """Provides the tool of a partition of four IPUs."""
    tool("gc-info", list_devices=POD, device_info=INFO)


@pytest.fixture
def sdk(tmp_path, monkeypatch):
    """Provides an enabled SDK 3.3, as far as it is visible without an import."""
    site = tmp_path / "site"
    (site / "tensorflow" / "python" / "ipu").mkdir(parents=True)
    (site / "keras" / "ipu").mkdir(parents=True)
    for name in ("tensorflow", "keras"):
        (site / name / "__init__.py").write_text("raise SystemExit('imported')")
    for name, version in (
        ("tensorflow", "2.6.3+gc3.3.0+251580+08d96978c7f+amd_znver1"),
        ("keras", "2.6.0+gc3.3.0+251582+a3785372"),
        ("numpy", "1.19.5"),
    ):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for name in sdk_environment.SDK_MODULES:
        (site / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(site))
    # Imported modules would be found before those on the path.
    for name in ("tensorflow", "keras"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(
        "POPLAR_SDK_ENABLED", "/opt/poplar_sdk-ubuntu_20_04-3.3.0+1403-2/poplar-ubuntu_20_04-3.3.0+7857-b"
    )
    monkeypatch.setattr(sdk_environment, "SDK_PYTHON", sys.version_info[:2])
    return site


def answer(run, *args):
    code, out, _ = run("doctor", "--json", *args)
    return code, json.loads(out)


def words(text):
    return " ".join(text.split())


KEYS = {
    "schema_version", "ipucnn", "asked", "device", "usable", "reason", "commands", "python", "platform",
    "packages", "sdk", "ipus", "gpus", "gpu_problem", "host", "disk", "dataset_path", "datasets", "variables",
    "probe", "findings", "next_steps",
}  # fmt: skip


def test_a_machine_without_ipus(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "none: gc-info is not on PATH" in out
    assert "no IPU is used: runs compute on the CPU with the IPU's semantics" in words(out)
    assert "figures of IPUs are predicted" in words(out)
    assert "train, evaluate, infer" in out


@pytest.mark.parametrize("value", ["fifo", "loop", "", "~nouser", "x" * 300, None])
@pytest.mark.parametrize("name", ["HOME", "TMPDIR", "IPUCNN_CUSTOM_OPS"])
def test_hostile_variables_end_in_no_traceback(run, tmp_path, monkeypatch, name, value):
    """Nothing waits for the other end of a FIFO."""
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    code, _, err = run("doctor", "--dataset-path", "~/data")
    assert code in (0, 2, 3, 6)
    assert code == 0 or re.search(r"^hint: \S", err, re.MULTILINE), err


def test_json_has_the_same_keys_on_every_machine(report, tool, request):
    plain = report("doctor")
    assert (set(plain), plain["device"], plain["usable"]) == (KEYS, "cpu", True)
    assert {row["command"] for row in plain["commands"]} == set(COMMANDS) - {"doctor"}
    request.getfixturevalue("sdk")
    request.getfixturevalue("pod")
    with_ipus = report("doctor")
    assert set(with_ipus) == KEYS
    for name in ("sdk", "ipus", "host", "disk", "datasets"):
        assert with_ipus[name].keys() == plain[name].keys()


def test_requested_ipus_that_are_absent(run):
    code, out, err = run("doctor", "--device", "ipu")
    assert code == 6
    assert "IPU, not usable" in out
    assert err.startswith("error: --device ipu cannot be used: ")
    assert "hint: " in err
    check_raises(MissingError, "", "", check_device, "ipu")


def test_an_sdk_with_ipus(succeeds, report, sdk, pod):
    full = report("doctor")
    assert (full["device"], full["usable"]) == ("ipu", True)
    assert full["sdk"]["version"] == "3.3.0"
    assert full["sdk"]["enabled"]
    ipus = full["ipus"]
    assert (ipus["num_ipus"], ipus["device_sizes"], ipus["partition"]) == (4, [1, 2, 4], "p7")
    assert (ipus["board"], ipus["architecture"], ipus["driver"]) == ("M2000", "ipu2", "1.3.0")
    by_command = {row["command"]: row["device"] for row in full["commands"]}
    assert by_command["train"] == by_command["benchmark"] == "ipu"
    assert by_command["plan-splits"] == "cpu"
    assert [f for f in full["findings"] if f["level"] == "problem"] == []
    assert any("--ipus 4" in step for step in full["next_steps"])
    out, _ = succeeds("doctor", "--device", "ipu")
    assert "4 M2000 ipu2, driver 1.3.0, firmware 2.4.4" in words(out)
    # The host can be chosen as well.
    assert report("doctor", "--device", "cpu")["device"] == "cpu"


@pytest.mark.parametrize(
    ("listing", "code", "message"),
    [("Graphcore device listing:\n", 0, "lists no IPU"), ("", 1, "exit code 1: Partition gone")],
)
def test_an_sdk_without_ipus(run, sdk, tool, listing, code, message):
    tool("gc-info", listing, code, script=f"test {code} = 0 || echo 'Partition gone' >&2")
    result, out, err = run("doctor")
    assert result == 6
    assert message in words(out)
    assert message in err
    assert "IPUOF_VIPU_API_PARTITION_ID" in err
    assert "--device cpu computes on the host" in words(out)


def test_a_tool_that_hangs_is_ended(tool):
    tool("gc-info", script="/bin/sleep 30 & wait")
    ipus = find_ipus(timeout_s=0.3)
    assert ipus.tool_found
    assert "did not answer within 0.3 s" in ipus.problem


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda site, patch: patch.delenv("POPLAR_SDK_ENABLED"), "not enabled in this shell"),
        (lambda site, patch: (site / "popdist.py").unlink(), "finds no popdist"),
        (lambda site, patch: patch.setattr(sdk_environment, "SDK_PYTHON", (3, 5)), "built for Python 3.5"),
        (lambda site, patch: patch.setenv("TF_POPLAR_FLAGS", "--use_modle"), "knows no --use_modle"),
        (lambda site, patch: (site / "tensorflow" / "python" / "ipu").rmdir(), "installed over it"),
        (lambda site, patch: (site / "keras" / "ipu").rmdir(), "it has no keras.ipu"),
    ],
)
def test_a_broken_sdk(run, sdk, pod, monkeypatch, break_it, message):
    break_it(sdk, monkeypatch)
    code, out, err = run("doctor", "--device", "ipu")
    assert code == 6
    assert message in words(out)
    assert message in words(err)


def test_ipus_with_another_tensorflow(report, pod):
    full = report("doctor")
    assert full["device"] == "cpu"
    assert any("there is hardware (4 IPUs), but TensorFlow" in f["message"] for f in full["findings"])


def test_variables_are_shown_and_checked(report, sdk, pod, monkeypatch):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p7")
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "8")
    variables = report("doctor")["variables"]
    assert variables["IPUOF_VIPU_API_PARTITION_ID"] == "p7"
    assert variables["POPDIST_NUM_TOTAL_REPLICAS"] == "8"
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_ipu_model")
    assert any("software model" in f["message"] for f in report("doctor")["findings"])


GPUS = "0, GPU-aaaa1111, NVIDIA H200, 143771, 550.54\n1, GPU-bbbb2222, NVIDIA GB10, [N/A], 550.54\n"


def test_gpus(run, report, tool, monkeypatch):
    tool("nvidia-smi", GPUS)
    both, problem = find_gpus()
    assert problem is None
    assert both == [Gpu("NVIDIA H200", 143771 * 2**20, "550.54"), Gpu("NVIDIA GB10", 0, "550.54")]
    assert [gpu.uuid for gpu in both] == ["GPU-aaaa1111", "GPU-bbbb2222"]
    assert "NVIDIA H200, NVIDIA GB10; if TensorFlow can use them" in report("doctor")["reason"]
    for value, names in (
        ("0", ["NVIDIA H200"]),
        ("GPU-bbbb", ["NVIDIA GB10"]),
        ("1,0", ["NVIDIA GB10", "NVIDIA H200"]),
        ("1,7,0", ["NVIDIA GB10"]),
        ("-1", []),
        ("", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        visible, problem = find_gpus()
        assert [gpu.name for gpu in visible] == names
        assert (problem is None) == bool(names)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    full = report("doctor", "--device", "gpu")
    assert full["device"] == "gpu" and "H200" in full["reason"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert answer(run, "--device", "gpu")[0] == 6
    assert report("doctor")["device"] == "cpu"
    tool("nvidia-smi", "", 9)
    assert find_gpus() == ([], "nvidia-smi ended with exit code 9")


HERE = SdkEnvironment(
    python=(3, 12),
    versions={"tensorflow": "2.21.0", "keras": "3.1.0", "numpy": "2.0.0"},
    has_ipu_package=False,
    has_keras_ipu=False,
    modules=(),
    variables={},
)


def test_devices_of_tensorflow_override_those_of_the_driver():
    one = (Gpu("NVIDIA H200", 1, "550"),)
    blind = Machine(HERE, gpus=one, probe=Probe({"gpus": 0}, None))
    choice, findings = choose("auto", blind)
    assert choice.device == "cpu"
    assert any("sees none of the driver's GPUs" in f.message for f in findings)
    assert not choose("gpu", blind)[0].usable
    choice, findings = choose("auto", Machine(HERE, gpus=one * 2, probe=Probe({"gpus": 2}, None)))
    assert (choice.device, choice.usable) == ("gpu", True)
    assert choice.reason == "NVIDIA H200, NVIDIA H200; TensorFlow sees them"
    assert not any("none of the driver's GPUs" in f.message for f in findings)


@pytest.mark.parametrize("asked", ["auto", "ipu", "gpu", "cpu"])
def test_without_tensorflow_nothing_runs(asked):
    choice, findings = choose(asked, Machine(replace(HERE, versions={})))
    assert not choice.usable and not choice.cpu_usable
    assert findings[0].message == "TensorFlow is not installed here"


def test_control_characters_in_names_are_escaped(run):
    _, printed, _ = run("doctor", "--dataset-path", "\x1b[31m")
    assert "\x1b" not in printed and "\\x1b[31m" in printed.replace("\n", "")


def test_data_sets_disk_and_cores(report, tmp_path):
    (tmp_path / "DATA" / "cifar-10-batches-py").mkdir(parents=True)
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (tmp_path / "DATA" / "cifar-10-batches-py" / name).write_bytes(b"")
    full = report("doctor", "--dataset-path", "DATA")
    assert full["datasets"]["cifar10"].endswith("cifar-10-batches-py")
    assert full["datasets"]["mnist"] is None
    assert full["datasets"]["digits"] == "embedded"
    assert full["host"]["num_cores"] == len(os.sched_getaffinity(0))
    assert full["host"]["memory_bytes"] >= full["host"]["available_bytes"] > 0
    assert full["disk"]["folder"] == str(tmp_path)
    deep = find_disk(tmp_path / "a" / "b" / "c")
    assert deep.folder == str(tmp_path)
    assert deep.writable


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_reported(run, tmp_path):
    tmp_path.chmod(0o555)
    try:
        _, full = answer(run)
    finally:
        tmp_path.chmod(0o755)
    assert full["disk"]["writable"] is False
    assert f"runs cannot be written to {tmp_path}" in words(run("doctor")[1])


@pytest.fixture
def tensorflow(tmp_path, monkeypatch):
    """Makes ``import tensorflow`` in other processes run the given code."""

    def make(code):
        package = tmp_path / "fake" / "tensorflow"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(code)
        (tmp_path / "fake" / "numpy.py").write_text("__version__ = '1.19.5'")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        monkeypatch.setenv("PATH", "/bin")

    return make


WORKS = """\
import sys, types
__version__ = "2.6.3"
print("a library says hello")
keras = types.ModuleType("keras"); keras.__version__ = "2.6.0"
sys.modules["tensorflow.keras"] = keras
class _Linalg:
    def matmul(self, a, b): return self
    def numpy(self): return None
linalg = _Linalg()
ones = lambda shape: shape
class config:
    list_physical_devices = staticmethod(lambda kind: ["a", "b"])
"""


@pytest.mark.parametrize(
    ("code", "timeout_s", "message", "hint"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 60, "illegal instruction", "amd_znver1"),
        ("import os; os.abort()", 60, "died of SIGABRT", "import tensorflow"),
        ("raise ImportError('libpoplar.so: cannot open shared object file: No such file')", 60,
         "libpoplar.so is not found", "source"),
        ("raise RuntimeError('broken wheel')", 60, "RuntimeError: broken wheel", "import tensorflow"),
        ("raise SystemExit(0)", 60, "without an error", "install TensorFlow again"),
        ("import time; time.sleep(60)", 1, "did not answer within 1 s", "import tensorflow"),
    ],
)  # fmt: skip
def test_the_probe_explains_a_broken_tensorflow(tensorflow, code, timeout_s, message, hint):
    tensorflow(code)
    probe = probe_tensorflow(timeout_s)
    assert probe.answer == {} and message in probe.error.message and hint in probe.error.hint


def test_the_probe_reports_a_working_tensorflow(tensorflow):
    tensorflow(WORKS)
    probe = probe_tensorflow(timeout_s=60)
    assert probe.error is None
    assert (probe.answer["tensorflow"], probe.answer["gpus"], probe.answer["ipu"]) == ("2.6.3", 2, False)


def test_a_full_diagnosis_finds_a_broken_tensorflow(tensorflow, run):
    tensorflow("raise RuntimeError('broken wheel')")
    code, out, err = run("doctor", "--full")
    assert (code, "broken wheel" in words(out)) == (6, True)
    assert "importing TensorFlow in another process" in err
    plain = answer(run, "--full")[1]
    assert "broken wheel" in plain["probe"]["error"] and not plain["usable"]


def test_parsers_of_device_lists_and_of_noise():
    assert parse_devices(CARDS) == (None, (Device(0, (0,)), Device(1, (1,)), Device(2, (0, 1))))
    partition, devices = parse_devices(POD)
    assert partition == "p7"
    assert {device.id: device.ipus for device in devices} == {
        **{single: (single,) for single in range(4)},
        4: (0, 1),
        5: (0, 1, 2, 3),
    }
    assert parse_devices("nonsense\n|---\n |--- Id: [0], DNC Id: [0]\n") == (None, ())
    assert parse_info(INFO)["board type"] == "M2000"
    assert not {"user name", "ipu power"} & set(parse_info(INFO))


def test_tools_never_raise(tool):
    assert run_program(["absent-tool"]).problem == "not found"
    tool("bytes", script="printf '\\377\\376ok'")
    assert "ok" in run_program(["bytes"]).output
    tool("dies", script="kill -9 $$")
    assert run_program(["dies"]).signal_name == "SIGKILL"
    Path(os.environ["PATH"], "no-interpreter").write_text("#!/nowhere/at/all\n")
    Path(os.environ["PATH"], "no-interpreter").chmod(0o755)
    assert "cannot be run" in run_program(["no-interpreter"]).problem


@pytest.mark.parametrize("width", [60, 80, 160])
def test_lines_are_no_wider_than_the_terminal(run, monkeypatch, sdk, pod, width):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "' + "x" * 90 + '"}')
    for args in ((), ("--device", "gpu")):
        _, out, _ = run("doctor", *args, columns=width)
        assert max(map(len, out.splitlines())) <= width
        assert "\x1b" not in out
