"""Images per second of the host session against Keras ``fit``, interleaved.

Usage: python benchmarks/host_session.py [--rounds 5] [--only MODEL] [--micro-batch 8] [--json FILE]

For each network (32x32, gradient accumulation 16) and micro-batch size three processes are kept: the host
session, Keras' fit with the same micro-batch and accumulation, and Keras' fit with one batch as large as what
the session computes at a time, in one chunk or in two side by side.  They take turns; only one computes at a time.
Each side runs in the environment that suits it: the session switches oneDNN on, Keras is measured with TensorFlow's
default and with oneDNN, and the faster of the two is what the ratio is taken with.  Printed are medians over the rounds
and, for the ratios, medians of the ratios within a round: by the clock, and by processor time, which other programs
disturb less.  "2x8" is two chunks of 8 fused micro-batches side by side.  The share of the peak is what the session's
multiplications and additions (three forward passes) are of those of the fastest large matrix product on the machine.
Memory is the largest of the session's process.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

ACCUMULATE, SIZE, CLASSES = 16, 32, 10
CASES = [(model, b) for model in ("efficientnet-b0", "cifar_resnet8") for b in (1, 8, 64)]
ROUND_S = 2.5


def build(name, micro_batch):
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model

    record = get_model(name)
    norm = "none" if record.default_norm == "none" else "group" if micro_batch == 1 else "batch"
    return build_model(record, BuildOptions((SIZE, SIZE, 3), CLASSES, norm=norm, seed=1))


def random_data(batch):
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    images = rng.normal(size=(2048, SIZE, SIZE, 3)).astype("float32")
    labels = rng.integers(0, CLASSES, 2048).astype("int32")
    both = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
    return both.batch(batch, drop_remainder=True).prefetch(2)


def session_runner(name, micro_batch):
    """run(weight updates) of the host session, the micro-batches it fuses, and how often it does that side by side."""
    import dataclasses

    import numpy as np

    from ipucnn.config.options import RunConfig
    from ipucnn.machine import fix_threads
    from ipucnn.sessions.factory import create_session
    from ipucnn.sessions.host.workers import threads_of_training
    from ipucnn.training.losses import make_loss
    from ipucnn.training.optimizers import make_settings
    from ipucnn.training.program import make_program

    config = dataclasses.replace(
        RunConfig(), micro_batch_size=micro_batch, gradient_accumulation_count=ACCUMULATE, validation=False
    )
    program = make_program(config, micro_batch * ACCUMULATE * 1000, seed=0)
    fix_threads(threads_of_training(config, program))
    session = create_session("cpu")
    optimizer = make_settings("sgd", {"momentum": 0.9}, global_batch_size=program.global_batch_size)
    session.compile(
        build(name, micro_batch), program, optimizer, make_loss("cross_entropy"),
        lambda updates: np.full(np.shape(updates), 1e-3, np.float32),
    )  # fmt: skip
    import tensorflow as tf

    data = iter(random_data(session.samples_per_element))
    done = 0

    def run(updates):
        nonlocal done
        rates = tf.fill([updates], 1e-3)
        session._loop.run(data, rates, tf.constant(done, tf.int64))[0].numpy()
        done += updates

    return run, session.program.fused_micro_batches, session.lanes


def session_extras(name, micro_batch):
    """FLOP of an image in training, of the best product per second, and the process's peak memory in MiB."""
    from ipucnn.benchmarking.machine import MatmulPeak
    from ipucnn.machine import peak_memory_bytes
    from ipucnn.models.counts import count_macs

    memory = peak_memory_bytes() or 0
    return 6 * count_macs(build(name, micro_batch)), MatmulPeak().measure().flop_per_s, memory / 2**20


def keras_runner(name, batch, accumulate, norm_batch):
    """run(steps of ``batch`` samples) of Keras' fit."""
    from ipucnn.sessions.host.environment import _quiet_import

    _quiet_import()
    from tensorflow import keras

    from ipucnn.benchmarking.contenders import stock_copy

    model = stock_copy(build(name, norm_batch))
    steps = accumulate if accumulate > 1 else None
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9, gradient_accumulation_steps=steps),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    data = random_data(batch)
    return lambda n: model.fit(data, epochs=1, steps_per_epoch=n, verbose=0)


def worker(kind, name, micro_batch, fused):
    """Reads numbers of weight updates (0 ends), runs them, and prints the seconds they took."""
    lanes = 1
    if kind == "session":
        run, fused, lanes = session_runner(name, micro_batch)
        per_update = 1
    elif kind == "keras":
        run, per_update = keras_runner(name, micro_batch, ACCUMULATE, micro_batch), ACCUMULATE
    else:
        run = keras_runner(name, micro_batch * fused, 1, micro_batch)
        per_update = ACCUMULATE // fused
    run(per_update)
    print(f"ready {lanes} {fused}", flush=True)
    for line in sys.stdin:
        updates = int(line)
        if updates < 0:
            print(*session_extras(name, micro_batch), flush=True)
            continue
        if not updates:
            return
        started, processor = time.perf_counter(), time.process_time()
        run(updates * per_update)
        print(time.perf_counter() - started, time.process_time() - processor, flush=True)


class Worker:
    """A worker process; ``rate`` is its images per second over one round."""

    def __init__(self, kind, name, micro_batch, fused, onednn):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        environment.pop("TF_ENABLE_ONEDNN_OPTS", None)
        if onednn is not None:
            environment["TF_ENABLE_ONEDNN_OPTS"] = onednn
        command = [sys.executable, __file__, "--worker", kind, name, str(micro_batch), str(fused)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lanes, self.fused = map(int, self._line().split()[1:])
        self.samples = micro_batch * ACCUMULATE
        self.updates = 1
        seconds, _ = self._run(1)
        self.updates = max(1, round(ROUND_S / seconds))

    def _line(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker died; its messages are above")
        return line

    def _run(self, updates):
        self.process.stdin.write(f"{updates}\n")
        self.process.stdin.flush()
        return tuple(float(part) for part in self._line().split())

    def rates(self):
        """Images per second, and per second of processor time."""
        return [self.updates * self.samples / seconds for seconds in self._run(self.updates)]

    def extras(self):
        return self._run(-1)

    def close(self):
        self.process.stdin.write("0\n")
        self.process.stdin.close()
        self.process.wait()


def measure(name, micro_batch, rounds):
    session = Worker("session", name, micro_batch, 0, None)
    rivals = {
        (kind, onednn): Worker(kind, name, micro_batch, session.lanes * session.fused, onednn)
        for kind in ("keras", "keras-fused")
        for onednn in (None, "1")
    }
    ours, theirs = [], {key: [] for key in rivals}
    for _ in range(rounds):
        ours.append(session.rates())
        for key, rival in rivals.items():
            theirs[key].append(rival.rates())
    flop, peak, memory = session.extras()
    for process in (session, *rivals.values()):
        process.close()
    row = {
        "model": name,
        "micro_batch": micro_batch,
        "fused": session.fused,
        "side by side": session.lanes,
        "session": statistics.median(wall for wall, _ in ours),
        "memory_mib": memory,
    }
    row["share of peak"] = row["session"] * flop / peak
    for kind in ("keras", "keras-fused"):
        best = max(
            (key for key in rivals if key[0] == kind),
            key=lambda key: statistics.median(w for w, _ in theirs[key]),
        )
        row[kind] = statistics.median(wall for wall, _ in theirs[best])
        row[f"{kind} onednn"] = best[1] == "1"
        for i, clock in enumerate(("", " cpu")):
            row[f"vs {kind}{clock}"] = statistics.median(o[i] / t[i] for o, t in zip(ours, theirs[best]))
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--json")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, name, micro_batch, fused = arguments.worker
        worker(kind, name, int(micro_batch), int(fused))
        return
    from importlib.metadata import version

    from ipucnn.machine import cpu_name

    print(f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
          f"TensorFlow {version('tensorflow')}, Keras {version('keras')}")  # fmt: skip
    print(f"training, {SIZE}x{SIZE}, gradient accumulation {ACCUMULATE}, {arguments.rounds} rounds, images/s")
    print(f"load {os.getloadavg()[0]:.1f}; ratios by the clock, and by processor time")
    print(f"{'network':16} {'batch':>5} {'norm':>5} {'fused':>5} {'session':>8} {'keras':>6} {'ratio':>12} "
          f"{'keras, fused':>12} {'ratio':>12} {'of peak':>8} {'MiB':>6}")  # fmt: skip
    rows = []
    cases = CASES
    if arguments.only not in (None, *(name for name, _ in CASES)):
        cases = [(arguments.only, 8)]
    for name, micro_batch in cases:
        if arguments.only not in (None, name) or arguments.micro_batch not in (None, micro_batch):
            continue
        row = measure(name, micro_batch, arguments.rounds)
        rows.append(row)
        norm = "group" if micro_batch == 1 else "batch"
        fused = f"{row['side by side']}x{row['fused']}" if row["side by side"] > 1 else str(row["fused"])
        ratios = [
            f"{row[f'vs {kind}']:.2f}, {row[f'vs {kind} cpu']:.2f}" for kind in ("keras", "keras-fused")
        ]
        print(f"{name:16} {micro_batch:5} {norm:>5} {fused:>5} {row['session']:8.0f} {row['keras']:6.0f} "
              f"{ratios[0]:>12} {row['keras-fused']:12.0f} {ratios[1]:>12} {row['share of peak']:8.1%} "
              f"{row['memory_mib']:6.0f}", flush=True)  # fmt: skip
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as handle:
            json.dump(rows, handle, indent=2)


if __name__ == "__main__":
    main()
