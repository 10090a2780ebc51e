"""What an execution on IPUs waits for at its beginning: the first micro-batches of a pipeline that is started anew,
and of one that goes on.

    python benchmarks/execution_gap.py [--model NAME] [--dataset NAME] [--micro-batch-size N]

The input pipeline is the real one; IPUs are not there, and neither is the network: micro-batches are taken as fast as
they come, after a pause in which IPUs would compute.  Prints milliseconds, medians over executions.
"""

import argparse
import sys
import time
from statistics import median
from typing import Any, Callable, Iterator, List

from ipucnn.config.request import RunRequest
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.host.environment import import_tensorflow


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cifar_resnet8")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--micro-batch-size", default="16")
    parser.add_argument("--micro-batches", type=int, default=32, help="of an execution")
    parser.add_argument("--executions", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds in which IPUs compute")
    told = parser.parse_args()
    flags = {"dataset": told.dataset, "micro_batch_size": told.micro_batch_size, "augment": "true"}
    resolved = RunRequest("train", flags, told.model).resolve()
    import_tensorflow()
    from ipucnn.sessions.poplar.popdist import Instances
    from ipucnn.sessions.poplar.training import Stream, training_batches
    from ipucnn.training.program import make_program

    setup = run_setup.prepare(resolved, 1)
    program = make_program(resolved.config, setup.source.info.num_train, seed=1)

    def batches(first: int) -> Any:
        own = run_setup.training_batches(setup, program, first, program.micro_batch_size, shard=(1, 0))
        return training_batches(own, program, first, False, "float32", Instances())

    def measure(make: Callable[[int], Any]) -> None:
        firsts: List[float] = []
        whole: List[float] = []
        for number in range(told.executions):
            started = time.perf_counter()
            elements: Iterator[Any] = iter(make(number * told.micro_batches))
            next(elements)
            firsts.append(time.perf_counter() - started)
            for _ in range(told.micro_batches - 1):
                next(elements)
            whole.append(time.perf_counter() - started)
            time.sleep(told.pause)
        # The first execution starts the pipeline either way.
        print(
            f"first {1e3 * median(firsts[1:]):8.1f} ms, all {told.micro_batches} {1e3 * median(whole[1:]):8.1f} ms"
        )

    print("anew for each execution: ", end="", flush=True)
    measure(batches)
    stream = Stream(batches(0))
    print("one iterator:            ", end="", flush=True)
    measure(lambda first: stream.take(told.micro_batches))


if __name__ == "__main__":
    sys.exit(main())
