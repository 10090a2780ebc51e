"""``ipucnn launch``: starts workers, passes on their output and exit codes, and ends with them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.refusals import Refusal, check_refused
from support.workers import FLAGS, PROGRAM, environment, with_values

import ipucnn
from ipucnn.commands import launch as launching
from ipucnn.diagnosis import look
from ipucnn.errors import WorkersError
from ipucnn.interrupts import Interrupted


def test_launch_divides_the_gpus_among_workers(run, monkeypatch):
    gpus = [look.Gpu("NVIDIA H200", 1, "550", f"GPU-{n}") for n in range(4)]
    monkeypatch.setattr(look, "find_gpus", lambda: (gpus, None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    note = "import json, os; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
    note += "open(f'worker-{rank}', 'w').write(os.environ.get('CUDA_VISIBLE_DEVICES', ''))"
    monkeypatch.setattr(launching, "_PROGRAM", note)

    def given(count, *words):
        """Returns the GPUs of each worker."""
        code, _, err = run("launch", "-n", count, "--", "train", "lenet", *words)
        assert code == 0, err
        return [Path(f"worker-{rank}").read_text() for rank in range(count)]

    assert given(2) == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    hint = "use -n 1 or 2 or 4,"
    check_refused(run, Refusal("launch -n 3 -- train lenet", "3 workers cannot share 4 GPUs", hint))
    for words in (["--device", "cpu"], ["--device=cpu"]):
        assert given(3, *words) == [""] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,1,9,4")
    assert given(4) == ["7", "1", "9", "4"]
    monkeypatch.setattr(look, "find_gpus", lambda: ([], "nvidia-smi is not on PATH"))
    assert given(3) == ["7,1,9,4"] * 3


LAUNCHED = """
import sys, json, os, signal, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
said, code, seconds = json.loads(sys.argv[sys.argv.index("as") + 1])[rank]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("\\n".join(said), file=sys.stderr, flush=True)
if sys.argv[3]:
    with open(int(sys.argv[3]), "w") as copy:
        copy.writelines(line + "\\n" for line in said if line.startswith(("error: ", "hint: ")))
time.sleep(seconds)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("workers", "code", "expected"),
    [
        # All workers report the same error: it is printed once.
        ([(["error: a", "hint: b"], 2, 0)] * 3, 2, ["error: a", "hint: b"]),
        # One worker fails with an error, and the others lose it.
        (
            [(["error: worker 1 left", "hint: c"], 7, 0), (["note", "error: a", "hint: b"], 3, 0)],
            None,
            [
                "error: worker 1 left",
                "hint: c",
                "[worker 1] note",
                "[worker 1] error: a",
                "[worker 1] hint: b",
            ],
        ),
        # Two workers have different errors of the same kind.
        (
            [(["error: a", "hint: b"], 3, 0), (["error: c", "hint: b"], 3, 0)],
            3,
            ["error: a", "hint: b", "[worker 1] error: c", "[worker 1] hint: b"],
        ),
        # One worker waits for a worker that will not come, and is ended by a signal.
        ([(["error: a"], 2, 0), (["error: interrupted"], 0, 100)], 2, ["error: a"]),
        ([([], 0, 0), (["error: x", "  detail"], 0, 0)], 0, []),
    ],
)
def test_launch_reports_errors_of_workers(monkeypatch, capfd, workers, code, expected):
    monkeypatch.setattr(launching, "_PROGRAM", LAUNCHED)
    waits = any(seconds for *_, seconds in workers)
    monkeypatch.setattr(launching, "_UNTIL_SIGTERM_S", 0.2 if waits else 100.0)
    monkeypatch.setattr(launching, "_UNTIL_SIGKILL_S", 100.0)
    command = ["train", "as", json.dumps(workers)]
    ended = launching._Processes(command, len(workers), [{}] * len(workers)).run()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip() and "detail" not in line]
    assert sorted(lines) == sorted(expected)
    assert ended == code if code is not None else ended in (3, 7)


@pytest.mark.parametrize(
    ("command", "hint"), [("train", "with --resume"), ("infer", "the same command again")]
)
def test_a_killed_worker_gives_a_hint_how_to_continue(monkeypatch, command, hint):
    monkeypatch.setattr(launching, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorkersError, match="was ended by SIGKILL") as raised:
        launching._Processes([command], 2, [{}] * 2).run()
    assert hint in raised.value.hint


@pytest.mark.parametrize("workers", [1, 3])
def test_launch_sets_its_variable_for_every_worker(monkeypatch, capfd, workers):
    monkeypatch.setattr(launching, "_PROGRAM", "import os, sys; print(os.environ['IPUCNN_LAUNCH'])")
    assert launching._Processes(["train"], workers, [{}] * workers).run() == 0
    streams = capfd.readouterr()
    assert [line.split()[-1] for line in (streams.out + streams.err).splitlines()] == [str(workers)] * workers


@pytest.mark.parametrize(
    ("launched", "command"), [(None, "ipucnn train"), ("2", "ipucnn launch -n 2 -- train")]
)
def test_the_hint_of_an_interrupted_run_continues_it(tmp_path, monkeypatch, launched, command):
    """The hint names the same number of workers if `ipucnn launch` started them."""
    if launched is not None:
        monkeypatch.setenv("IPUCNN_LAUNCH", launched)
    folder = tmp_path / "run"
    options = dict(dataset="digits", limit_train=64, limit_eval=10, num_epochs=50, run_dir=str(folder))
    with pytest.raises(Interrupted, match="checkpoint ") as ended:
        for event in ipucnn.train("toy_model", **options):
            if type(event).__name__ == "ExecutionFinished":
                os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.hint == f"continue it with: {command} --resume --run-dir {folder}"


def test_launch_refuses_other_commands(run):
    error, some = "`ipucnn launch` starts workers of", "type: ipucnn launch -n 3 -- train"
    check_refused(
        run,
        Refusal("launch -n 3 -- plan-splits lenet", error, "without launch: ipucnn plan-splits"),
        Refusal("launch -n 3 -- benchmark lenet", error, "without launch: ipucnn benchmark"),
        Refusal("launch -n 3 -- nonsense", error, some),
        Refusal("launch -n 3 --", error, some),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    flags = with_values(FLAGS, num_epochs=4000, run_dir="two")
    command = [sys.executable, "-c", PROGRAM, "launch", "-n", "2", "--", "train", *flags]
    log = tmp_path / "said"
    with log.open("wb") as stderr:
        parent = subprocess.Popen(
            command, cwd=str(tmp_path), env=environment(), stdout=subprocess.DEVNULL, stderr=stderr
        )
    workers = []
    while len(workers) < 2:
        assert parent.poll() is None
        workers = psutil.Process(parent.pid).children()
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    alive = psutil.wait_procs(workers, timeout=60)[1]
    for worker in alive:
        worker.kill()
    assert not alive and "Traceback" not in log.read_text(encoding="utf-8")
