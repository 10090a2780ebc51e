"""What the double knows: the IPUs that are there, what was configured, and a log of every call."""

import os
import shlex
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set, Tuple

import tensorflow as tf

from .distribution import components
from .exchange import make_exchange
from .facts import FACTS
from .sources import rule


class ProcessAborted(BaseException):
    """Where the SDK's driver ends the process (LOG(FATAL)); no ``except Exception`` may catch it."""


@dataclass
class Machine:
    """One process on a machine with IPUs.

    Attributes:
        sdk: version whose API is there.
        num_ipus: IPUs of the largest device group; 0: none.
        busy: every device is taken.
        surroundings: what differs around the SDK; see :func:`.surroundings.surroundings`.
        remote_memory: IPUs have memory besides their own, at the host or in their machine.
        gc_info: gc-info is there, which says so.
        tile_bytes: weights beyond this many bytes per IPU are out of memory; None: nothing is.
        config: what ``configure_ipu_system`` applied, by leaf; None before.
        log: (name of the call, arguments) in order.
        programs: keys of what was compiled.
        user_ops: what a user's library computes, by the name of its function: (tensors, attributes) -> tensors.
        unhashable_ops: those of them whose metadata says that a compiled program must not be kept.
        popdist_ready: ``popdist.init()`` was called.
        horovod_ready: ``distributed.init()`` was called, which SDK 3.0 has.
    """

    sdk: str = "3.4"
    num_ipus: int = 16
    busy: bool = False
    surroundings: Dict[str, Any] = field(default_factory=dict)
    remote_memory: bool = True
    gc_info: bool = True
    tile_bytes: Optional[int] = None
    config: Optional[Dict[str, Any]] = None
    log: List[Tuple[str, Dict[str, Any]]] = field(default_factory=list)
    programs: List[Any] = field(default_factory=list)
    strategies: List[Any] = field(default_factory=list)
    stage: Optional[int] = None
    placed: Dict[int, Any] = field(default_factory=dict)
    replicas: Optional[Any] = None
    user_ops: Dict[str, Any] = field(default_factory=dict)
    unhashable_ops: Set[str] = field(default_factory=set)
    popdist_ready: bool = False
    horovod_ready: bool = False
    _flags: Optional[Dict[str, str]] = None
    _generator: Any = None
    _exchange: Any = None

    def note(self, call: str, **arguments: Any) -> None:
        """Adds to the log."""
        self.log.append((call, arguments))

    def calls(self, name: str) -> List[Dict[str, Any]]:
        """The arguments of every call of a name, in order."""
        return [arguments for call, arguments in self.log if call == name]

    def place(self, next_creator: Any, **arguments: Any) -> Any:
        """Makes a variable on the IPUs, as the scope of a strategy does."""
        made = next_creator(**arguments)
        for part in components(made):
            self.placed[id(part.handle)] = part
        return made

    @rule("stock tensorflow/core/framework/resource_mgr.cc ValidateDevice")
    def check_placed(self, graph: Any) -> None:
        """What a program reads and writes has to lie on the IPUs.

        Raises:
            InvalidArgumentError: a variable was made outside of the strategy's scope.
        """
        own = self.generator.state.handle
        for outside, _ in graph.captures:
            if outside.dtype == tf.resource and outside is not own and id(outside) not in self.placed:
                raise tf.errors.InvalidArgumentError(
                    None, None, "Trying to access a resource located in device CPU:0 from device IPU:0"
                )

    @property
    def strategy(self) -> Any:
        """The innermost strategy whose scope is entered."""
        return self.strategies[-1] if self.strategies else None

    @property
    @rule("driver tools/flags.cc PoplarXlaFlags::PoplarXlaFlags")
    def flags(self) -> Dict[str, str]:
        """TF_POPLAR_FLAGS, parsed once, on the first access of the driver.

        Raises:
            ProcessAborted: an unknown flag or word, as the driver does.
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
        """Whether nothing goes through a feed, "infeed" or "outfeed", as TF_POPLAR_FLAGS has it."""
        words = self.flags.get("synthetic_data_categories", "").split(",")
        return "use_synthetic_data" in self.flags or feed in words

    @property
    @rule("driver poplar_executor.cc PoplarExecutor::ExecuteEngineImpl")
    def is_precompiling(self) -> bool:
        """Programs are compiled for a device that is not attached; what would have run on it gives zeros."""
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
    @rule("driver poplar_compiler.cc CompileEngine")
    def device_ipus(self) -> int:
        """IPUs of /device:IPU:0.

        Raises:
            FailedPreconditionError: the system was never configured.
        """
        if self.config is None:
            raise tf.errors.FailedPreconditionError(
                None, None, "No device target has been configured for virtual device 0"
            )
        return int(self.config["ipus"])

    @property
    def num_processes(self) -> int:
        """Instances that execute a program together, as configured; without ``process_count`` each is alone."""
        leaves = self.config["leaves"] if self.config is not None else {}
        return max(1, leaves.get("experimental.multi_replica_distribution.process_count", 0))

    @property
    def total_ipus(self) -> int:
        """IPUs of /device:IPU:0 in all instances: the driver counts them together."""
        return self.device_ipus * self.num_processes

    def gather(self, name: str, arrays: Any) -> Any:
        """The arrays of every instance of ``poprun``, by instance."""
        from .instances import instance_index, num_instances

        if self._exchange is None:
            self._exchange = make_exchange(instance_index(), num_instances())
        return self._exchange.gather(name, arrays)

    def gather_on_ipus(self, name: str, arrays: Any) -> Any:
        """The same for what IPUs exchange: among those that were configured to."""
        return self.gather(name, arrays) if self.num_processes > 1 else [arrays]
