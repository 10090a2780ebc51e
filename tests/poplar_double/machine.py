"""The state of the test double: the machine's IPUs, the configuration, and a log of every call."""

import os
import shlex
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set, Tuple

import tensorflow as tf

from .distribution import components
from .errors import failed, invalid
from .exchange import make_exchange
from .facts import FACTS


class ProcessAborted(BaseException):
    """Raised where the SDK's driver ends the process (LOG(FATAL)); no ``except Exception`` may catch it."""


@dataclass
class Machine:
    """One process on a machine with IPUs.

    Attributes:
        sdk: version whose API is there.
        num_ipus: IPUs of the largest device group; 0: none.
        busy: whether every device is taken.
        environment: differences from a sound environment; see :func:`.sdk_environment.environment_of`.
        remote_memory: whether IPUs have memory besides their own, at the host or in their machine.
        gc_info: whether gc-info is there, which reports it.
        tile_bytes: weights beyond this many bytes per IPU are out of memory; None: no limit.
        config: the configuration that ``configure_ipu_system`` applied, by leaf; None before.
        log: (name of the call, arguments) in order.
        programs: keys of the compiled programs.
        user_ops: a user's library, by the name of its function: (tensors, attributes) -> tensors.
        unhashable_ops: those of them whose metadata forbids keeping a compiled program.
        rounded_at_random: by model and step (forward, train1, apply, ...), its operations that round stochastically.
        popdist_ready: whether ``popdist.init()`` was called.
        horovod_ready: whether ``distributed.init()`` was called, which SDK 3.0 has.
    """

    sdk: str = "3.4"
    num_ipus: int = 16
    busy: bool = False
    environment: Dict[str, Any] = field(default_factory=dict)
    remote_memory: bool = True
    gc_info: bool = True
    tile_bytes: Optional[int] = None
    config: Optional[Dict[str, Any]] = None
    log: List[Tuple[str, Dict[str, Any]]] = field(default_factory=list)
    programs: List[Any] = field(default_factory=list)
    strategies: List[Any] = field(default_factory=list)
    placed: Dict[int, Any] = field(default_factory=dict)
    replicas: Optional[Any] = None
    user_ops: Dict[str, Any] = field(default_factory=dict)
    unhashable_ops: Set[str] = field(default_factory=set)
    rounded_at_random: Dict[Tuple[str, str], List[str]] = field(default_factory=dict)
    popdist_ready: bool = False
    horovod_ready: bool = False
    _flags: Optional[Dict[str, str]] = None
    _generator: Any = None
    _exchange: Any = None

    def note(self, call: str, **arguments: Any) -> None:
        """Adds a call to the log."""
        self.log.append((call, arguments))

    def calls(self, name: str) -> List[Dict[str, Any]]:
        """Returns the arguments of every call of a name, in order."""
        return [arguments for call, arguments in self.log if call == name]

    def place(self, next_creator: Any, **arguments: Any) -> Any:
        """Makes a variable on the IPUs, as the scope of a strategy does."""
        variable = next_creator(**arguments)
        for part in components(variable):
            self.placed[id(part.handle)] = part
        return variable

    def check_placed(self, graph: Any) -> None:
        """Checks that variables that a program reads or writes are on the IPUs.

        Raises:
            InvalidArgumentError: a variable was made outside of the strategy's scope.
        """
        generator_handle = self.generator.state.handle
        for outside, _ in graph.captures:
            if (
                outside.dtype == tf.resource
                and outside is not generator_handle
                and id(outside) not in self.placed
            ):
                raise invalid("Trying to access a resource located in device CPU:0 from device IPU:0")

    @property
    def strategy(self) -> Any:
        """Returns the innermost strategy whose scope is entered."""
        return self.strategies[-1] if self.strategies else None

    @property
    def flags(self) -> Dict[str, str]:
        """TF_POPLAR_FLAGS, parsed once, on the first access of the driver.

        Raises:
            ProcessAborted: a flag or word is unknown, where the driver aborts, too.
        """
        if self._flags is None:
            absent = FACTS["absent_in"].get(self.sdk, {}).get("flags", ())
            flags: Dict[str, str] = {}
            for word in shlex.split(os.environ.get("TF_POPLAR_FLAGS", "")):
                name, _, value = word.partition("=")
                name = name[2:] if name.startswith("--") else ""
                if name not in FACTS["flags"] or name in absent:
                    raise ProcessAborted(f"unknown TF_POPLAR_FLAGS: {word}")
                flags[name] = value or "true"
            if flags.get("show_progress_bar", "auto") not in ("true", "false", "auto"):
                raise ProcessAborted("show_progress_bar")
            if "synthetic_data_initializer" in flags and not (
                "use_synthetic_data" in flags or "synthetic_data_categories" in flags
            ):
                raise ProcessAborted("synthetic_data_initializer without synthetic data")
            self._flags = flags
        return self._flags

    def is_synthetic(self, feed: str) -> bool:
        """Says whether TF_POPLAR_FLAGS make the data of a feed, "infeed" or "outfeed", synthetic."""
        words = self.flags.get("synthetic_data_categories", "").split(",")
        return "use_synthetic_data" in self.flags or feed in words

    @property
    def is_precompiling(self) -> bool:
        """Whether programs are compiled for a device that is not attached; running them gives zeros."""
        leaves = self.config["leaves"] if self.config is not None else {}
        return bool(leaves) and leaves["device_connection.type"].name == "PRE_COMPILE"

    @property
    def generator(self) -> Any:
        """The IPUs' random numbers: one generator, reset by ``reset_ipu_seed``."""
        if self._generator is None:
            with tf.init_scope():
                self._generator = tf.random.Generator.from_seed(0)
        return self._generator

    @property
    def device_ipus(self) -> int:
        """IPUs of /device:IPU:0.

        Raises:
            FailedPreconditionError: the system was never configured.
        """
        if self.config is None:
            raise failed("No device target has been configured for virtual device 0")
        return int(self.config["ipus"])

    @property
    def num_processes(self) -> int:
        """Instances that execute a program together, by the configuration; without ``process_count`` each is alone."""
        leaves = self.config["leaves"] if self.config is not None else {}
        return max(1, leaves.get("experimental.multi_replica_distribution.process_count", 0))

    @property
    def total_ipus(self) -> int:
        """IPUs of /device:IPU:0 in all instances: the driver counts them together."""
        return self.device_ipus * self.num_processes

    def gather(self, name: str, arrays: Any) -> Any:
        """Returns the arrays of every instance of ``poprun``, by instance."""
        from .instances import instance_index, num_instances

        if self._exchange is None:
            self._exchange = make_exchange(instance_index(), num_instances())
        return self._exchange.gather(name, arrays)

    def gather_on_ipus(self, name: str, arrays: Any) -> Any:
        """Returns the same for exchanges between IPUs: among the instances that were configured for it."""
        return self.gather(name, arrays) if self.num_processes > 1 else [arrays]
