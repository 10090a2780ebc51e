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
from ipucnn.hardware import get_ipu
from ipucnn.sessions.group import Popdist, ProcessGroup
from ipucnn.sessions.poplar.checks import check_selected
from ipucnn.sessions.poplar.errors import ErrorContext, poplar_errors
from ipucnn.sessions.poplar.options import SystemLayout, make_ipu_config
from ipucnn.sessions.poplar.sdk_environment import gives_nothing_back
from ipucnn.sessions.session import DeviceInfo
from ipucnn.text import counted
from ipucnn.training.program import BuiltProgram

# Generation whose tiles and memory are reported; Bow has the same.
_IPU = "mk2"


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


class Exchange:
    """Exchanges numbers among the instances of ``poprun``, on the host.

    Every instance must make each call, in the same order as other collective calls.

    Args:
        api: the SDK's modules.
        instances: the instances, and which one this process is.
    """

    def __init__(self, api: Api, instances: ProcessGroup) -> None:
        self._api, self.instances = api, instances

    def _sum(self, values: np.ndarray) -> np.ndarray:
        with poplar_errors():
            return np.asarray(self._api.sum_over_instances(values))

    def mean_over_instances(self, values: Sequence[float]) -> np.ndarray:
        """Returns float64 means of numbers, the same on each instance.  NaN on one is NaN on all."""
        mine: np.ndarray = np.asarray(values, np.float64)
        if self.instances.size == 1:
            return mine
        # The collective has 32 bits, and so had the computation of these numbers.
        return np.asarray(self._sum(mine.astype(np.float32)), np.float64) / self.instances.size

    def gather_over_instances(self, array: np.ndarray) -> np.ndarray:
        """Returns float32 (instances, ...): the arrays of all instances, which have one shape."""
        count, index = self.instances.size, self.instances.rank
        # As a sum with zeros: only some versions from 3.0 to 3.4 can gather.
        rows = np.zeros((count, *array.shape), np.float32)
        rows[index] = array
        return rows if count == 1 else np.asarray(self._sum(rows), np.float32)

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set on any instance."""
        return bool(self.mean_over_instances([float(flag)])[0] > 0)

    def of_first_instance(self, value: float) -> float:
        """Returns the value of the first instance, to the last bit, on every instance."""
        number: np.ndarray = np.array([value], np.float64)
        # Collectives have 32 bits, so the float64 travels byte by byte.
        sent: np.ndarray = self.gather_over_instances(number.view(np.uint8).astype(np.float32))[0]
        return float(sent.astype(np.uint8).view(np.float64)[0])


class Ipus:
    """The IPUs of this process, configured for a network.

    Args:
        api: the SDK's modules.
        exchange: the exchange with other instances of ``poprun``.
        config: the options of the run.
        preprocess: how images get to the IPUs.
        num_ipus: the IPUs of this process.
        program: the Program to train, or None.
        memory_advice, kept_remotely: the facts that hints about memory need; see ``ErrorContext``.

    Attributes:
        instances: the instances of ``poprun``, and which one this process is.
        info: the IPUs, for reports.
        rounds_stochastically: whether the system is configured to round 16-bit results stochastically.

    Raises:
        MissingError: there are no such IPUs, or others use them.
    """

    def __init__(
        self,
        api: Api,
        exchange: Exchange,
        config: RunConfig,
        preprocess: Transfer,
        num_ipus: int,
        program: Optional[BuiltProgram] = None,
        memory_advice: Optional[MemoryAdvice] = None,
        kept_remotely: Sequence[str] = (),
    ) -> None:
        self.api, self.exchange, self.config, self.preprocess = api, exchange, config, preprocess
        self.instances = instances = exchange.instances
        self._num_ipus, self._would_fit, self._kept_remotely = num_ipus, memory_advice, kept_remotely
        self.rounds_stochastically = program is not None and config.stochastic_rounding != "OFF"
        # Compilation needs only the number of IPUs; poprun's choice would open the devices.
        selects = config.compile_only or not instances.under_poprun
        proportions = config.available_memory_proportion
        layout = SystemLayout(
            num_ipus,
            # otherwise each stage has its own
            available_memory_proportion=proportions[0] / 100 if len(proportions) == 1 else None,
            recomputation=program is not None and program.recomputation,
            dbn_replica_group_size=1 if program is None else program.dbn_replica_group_size,
            selects=selects,
            trains=program is not None,
        )
        ipu_config = make_ipu_config(api.ipu, config, layout)
        with self._errors(training=True):
            if isinstance(instances, Popdist):
                api.start_instances()
                per_replica = num_ipus // instances.local_replicas
                api.join_instances(ipu_config, per_replica, selects_device=not selects)
            ipu_config.configure_ipu_system()
            if selects and config.select_ipu is not None:
                ipus = int(api.ipu.utils.get_num_of_ipus_in_device("/device:IPU:0"))
                check_selected(config.select_ipu, ipus, num_ipus)
            make = api.ipu.ipu_strategy.IPUStrategy
            self._strategy = api.popdist_strategy()() if instances.under_poprun else make()
        ipu = get_ipu(_IPU)
        memory_bytes = num_ipus * ipu.num_tiles * ipu.sram_per_tile_bytes
        self.info = DeviceInfo("ipu", counted(num_ipus, "IPU"), num_ipus * ipu.num_tiles, memory_bytes)

    @property
    def gives_zeros(self) -> bool:
        """Whether IPUs return zeros, for fewer images than were sent: they generate their data, or run nothing."""
        return gives_nothing_back() or self.config.compile_only

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
            ErrorContext(training, self._num_ipus, fp_exceptions, self._would_fit, self._kept_remotely)
        )

    def reset_seed(self, seed: int) -> None:
        """Seeds the IPUs' random numbers."""
        self.api.ipu.utils.reset_ipu_seed(int(seed))

    def mean_over_replicas(self, value: Tensor) -> Tensor:
        """Returns the mean of a tensor over replicas, on the IPUs."""
        return self.api.ipu.cross_replica_ops.cross_replica_mean(value)
