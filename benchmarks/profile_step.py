"""What the host session's weight update spends its time on: the shares of TensorFlow's operations.

Usage: python benchmarks/profile_step.py [--model efficientnet-b0] [--micro-batch 8] [--updates 4] [--top 20]

The network of ``host_session.py`` (32x32, gradient accumulation 16) under TensorFlow's own profiler.  Times are those
of operations on all threads, without what they wait for others inside; ``PyFuncStateless`` is what Numba compiled.
"""

import argparse
import collections
import glob
import os
import platform
import resource
import tempfile
import time

import host_session


def self_times(folder):
    """(seconds, calls) by operation, of what the profiler wrote."""
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # TensorFlow 2.6
        from tensorflow.core.profiler.protobuf import xplane_pb2
    space = xplane_pb2.XSpace()
    (file,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    with open(file, "rb") as handle:
        space.ParseFromString(handle.read())
    seconds, calls = collections.Counter(), collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            events = sorted(
                (event.offset_ps, -event.duration_ps, plane.event_metadata[event.metadata_id].name)
                for event in line.events
            )
            inside = []
            for start, minus, name in events:
                # "model/conv/MatMul:_MklMatMul#id=1#" is one of "_MklMatMul".
                kind = name.split(":")[-1].split("#")[0]
                while inside and start >= inside[-1][0]:
                    inside.pop()
                if inside:
                    seconds[inside[-1][1]] += minus * 1e-12
                seconds[kind] -= minus * 1e-12
                calls[kind] += 1
                inside.append((start - minus, kind))
    return seconds, calls


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="efficientnet-b0")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--top", type=int, default=20)
    arguments = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    run, fused, lanes = host_session.session_runner(arguments.model, arguments.micro_batch)
    run(2)
    import tensorflow as tf

    started, processor = time.perf_counter(), time.process_time()
    run(arguments.updates)
    wall_s = (time.perf_counter() - started) / arguments.updates
    processor_s = (time.process_time() - processor) / arguments.updates
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=0
        )
        tf.profiler.experimental.start(folder, options)
        run(arguments.updates)
        tf.profiler.experimental.stop()
        seconds, calls = self_times(folder)
    # Threads of the pools that wait for work, and the frames around operations.
    for frame in ("Run", "Process", "ParallelFor", "FunctionRun", "_run", "EagerCopyToDevice"):
        seconds.pop(frame, None)
    total = sum(seconds.values())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
          f"TensorFlow {tf.__version__}")  # fmt: skip
    print(
        f"{arguments.model}, micro-batch {arguments.micro_batch}, {fused} of them computed as one"
        f"{f', {lanes} times side by side' if lanes > 1 else ''}"
    )
    print(f"a weight update: {1e3 * wall_s:.0f} ms, processor time {1e3 * processor_s:.0f} ms; "
          f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")  # fmt: skip
    print(f"{'operation':44} {'ms':>8} {'calls':>7} {'share':>7}")
    for name, own in seconds.most_common(arguments.top):
        print(f"{name[:44]:44} {1e3 * own / arguments.updates:8.2f} {calls[name] / arguments.updates:7.0f} "
              f"{100 * own / total:6.1f}%")  # fmt: skip


if __name__ == "__main__":
    main()
