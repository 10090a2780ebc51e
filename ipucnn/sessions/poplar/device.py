"""The IPUs of this process, once TensorFlow is imported: the SDK's modules and the system.

Every version of the SDK from 3.0 to 3.4 is TensorFlow 2.6.3 with Keras 2.6.0; the big change is 3.0 to 3.1.  Only
:class:`Api` knows the differences.  It looks for attributes, because the SDK does not state its version in Python.
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import ContextManager, Iterator, Optional, Sequence, Type

import numpy as np

from ipucnn.aliases import MemoryAdvice, SdkModule, Tensor
from ipucnn.config.options import RunConfig
from ipucnn.datasets.pixels import Transfer
from ipucnn.sessions.group import Popdist, ProcessGroup
from ipucnn.sessions.poplar.checks import check_selected
from ipucnn.sessions.poplar.errors import ErrorContext, poplar_errors
from ipucnn.sessions.poplar.options import Layout, make_ipu_config
from ipucnn.training.program import Program


@dataclass(frozen=True)
class Api:
    """The SDK's modules.

    Attributes:
        ipu: ``tensorflow.python.ipu``; its operations are attributes (``ipu.pipelining_ops``).
        addons_layers: ``ipu_tensorflow_addons.keras.layers``.
        reduces_metrics: whether models have ``set_replication_options`` (3.1); before, a metric is the last replica's.
    """

    ipu: SdkModule
    addons_layers: SdkModule
    reduces_metrics: bool

    def start_instances(self) -> None:
        """Connects the processes of ``poprun``; must be the first call into the SDK."""
        import popdist
        from tensorflow.python.ipu import distributed

        if hasattr(distributed, "init"):
            distributed.init()  # 3.0: over Horovod
        if hasattr(popdist, "init"):
            popdist.init()

    def join_instances(self, config: SdkModule, ipus_per_replica: int, selects_device: bool) -> None:
        """Adds the instances and the IPUs of this one to an ``IPUConfig`` that is not applied yet."""
        import popdist.tensorflow

        popdist.tensorflow.set_ipu_config(
            config, ipus_per_replica=ipus_per_replica, configure_device=selects_device
        )

    def sum_over_instances(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of an array over instances, computed on the host."""
        import tensorflow as tf
        from tensorflow.python.ipu import distributed

        with tf.device("/CPU:0"):
            tensor = tf.constant(values)
            if hasattr(distributed, "Sum"):  # 3.0: over Horovod
                return distributed.allreduce(tensor, op=distributed.Sum).numpy()
            return distributed.allreduce(tensor, tf.distribute.ReduceOp.SUM).numpy()

    def popdist_strategy(self) -> Type[SdkModule]:
        """Returns the class ``PopDistStrategy``; the package does not bind it, only its module."""
        from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

        return PopDistStrategy


def load_api() -> Api:
    """Imports the SDK.

    Raises:
        MissingError: the SDK is not enabled, or this is not its Python, NumPy, TensorFlow or Keras.
    """
    with poplar_errors():
        # A bare ``import keras`` lacks optimizers on Keras 2.6; ``tensorflow.keras`` has ``ipu`` too.
        from ipu_tensorflow_addons.keras import layers
        from tensorflow import keras
        from tensorflow.python import ipu

        reduces_metrics = hasattr(keras.ipu, "ReplicatedMetricReductionMethod")
    return Api(ipu, layers, reduces_metrics)


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Redirects what C++ prints on stdout to stderr: the driver's progress bar must not mix with results."""
    try:
        sys.stdout.flush()
        saved = os.dup(1)
    except (OSError, ValueError):  # there is no stdout
        yield
        return
    try:
        with contextlib.suppress(OSError):  # there is no stderr
            os.dup2(2, 1)
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def compute_type(precision: str) -> str:
    """Returns the type of activations."""
    return "float16" if precision.startswith("16") else "float32"


class Device:
    """The IPUs of a Poplar session.

    Attributes:
        api: the SDK's modules.
        instances: the instances of ``poprun``, and which one this process is.
        config: the options of the run.
        num_ipus: the IPUs of this process; 0 before :meth:`configure`.
        rounds_stochastically: whether the system is configured to round 16-bit results stochastically.
        preprocess: how images get to the IPUs.
        would_fit, kept_remotely: the facts that hints about memory need; see ``ErrorContext``.
    """

    def __init__(self, api: Api, instances: ProcessGroup, config: RunConfig) -> None:
        self.api, self.instances, self.config = api, instances, config
        self.num_ipus = 0
        self.rounds_stochastically = False
        self.preprocess = Transfer(compute_type(config.precision))
        self.would_fit: Optional[MemoryAdvice] = None
        self.kept_remotely: Sequence[str] = ()
        self._strategy: SdkModule = None

    def configure(self, num_ipus: int, program: Optional[Program]) -> None:
        """Applies the system's configuration, and makes the strategy.

        Args:
            num_ipus: the IPUs of this process.
            program: the Program to train, or None.

        Raises:
            MissingError: there are no such IPUs, or others use them.
        """
        config = self.config
        # Compilation needs only the number of IPUs; poprun's choice would open the devices.
        selects = config.compile_only or not self.instances.under_poprun
        proportions = config.available_memory_proportion
        layout = Layout(
            num_ipus,
            # otherwise each stage has its own
            available_memory_proportion=proportions[0] / 100 if len(proportions) == 1 else None,
            recomputation=program is not None and program.recomputation,
            dbn_replica_group_size=1 if program is None else program.dbn_replica_group_size,
            selects=selects,
            trains=program is not None,
        )
        self.num_ipus = num_ipus
        self.rounds_stochastically = program is not None and config.stochastic_rounding != "OFF"
        ipu_config = make_ipu_config(self.api.ipu, config, layout)
        with self._errors(training=True):
            if isinstance(self.instances, Popdist):
                self.api.start_instances()
                per_replica = num_ipus // self.instances.local_replicas
                self.api.join_instances(ipu_config, per_replica, selects_device=not selects)
            ipu_config.configure_ipu_system()
            if selects and config.select_ipu is not None:
                ipus = int(self.api.ipu.utils.get_num_of_ipus_in_device("/device:IPU:0"))
                check_selected(config.select_ipu, ipus, num_ipus)
            make = self.api.ipu.ipu_strategy.IPUStrategy
            self._strategy = self.api.popdist_strategy()() if self.instances.under_poprun else make()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Places the models and variables of the block on the IPUs."""
        with self._errors(training=True), self._strategy.scope():
            yield

    @contextlib.contextmanager
    def running(self, training: bool) -> Iterator[None]:
        """Surrounds calls that run the IPUs (and compile, the first time).

        Raises:
            UserError: in place of the SDK's known errors.
        """
        with self._errors(training), stdout_on_stderr():
            yield

    def _errors(self, training: bool) -> ContextManager[None]:
        fp_exceptions = self.config.fp_exceptions
        return poplar_errors(
            ErrorContext(training, self.num_ipus, fp_exceptions, self.would_fit, self.kept_remotely)
        )

    def reset_seed(self, seed: int) -> None:
        """Seeds the IPUs' random numbers."""
        self.api.ipu.utils.reset_ipu_seed(int(seed))

    def mean_over_replicas(self, value: Tensor) -> Tensor:
        """Returns the mean of a tensor over replicas, on the IPUs."""
        return self.api.ipu.cross_replica_ops.cross_replica_mean(value)

    def mean_over_instances(self, values: Sequence[float]) -> np.ndarray:
        """Returns float64 means of numbers over the instances of ``poprun``, the same on each of them.

        Every instance must make this call, in the same order as other collective calls.  NaN on one is NaN on all.
        """
        mine: np.ndarray = np.asarray(values, np.float64)
        if self.instances.size == 1:
            return mine
        # The collective has 32 bits, and so had the computation of these numbers.
        with self._errors(training=True):
            total = self.api.sum_over_instances(mine.astype(np.float32))
        return np.asarray(total, np.float64) / self.instances.size

    def gather_over_instances(self, array: np.ndarray) -> np.ndarray:
        """Returns float32 (instances, ...): the arrays of all instances of ``poprun``, which have one shape.

        Every instance must make this call, in the same order as other collective calls.
        """
        count, index = self.instances.size, self.instances.rank
        # As a sum with zeros: only some versions from 3.0 to 3.4 can gather.
        rows = np.zeros((count, *array.shape), np.float32)
        rows[index] = array
        if count == 1:
            return rows
        with self._errors(training=False):
            return np.asarray(self.api.sum_over_instances(rows), np.float32)

    def of_first_instance(self, value: float) -> float:
        """Returns the value of the first instance, to the last bit, on every instance."""
        number: np.ndarray = np.array([value], np.float64)
        # Collectives have 32 bits, so the float64 travels byte by byte.
        sent: np.ndarray = self.gather_over_instances(number.view(np.uint8).astype(np.float32))[0]
        return float(sent.astype(np.uint8).view(np.float64)[0])
