"""The IPUs of this process: the SDK's modules, the system's configuration, the strategy and its scope."""

import contextlib
from dataclasses import replace
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.sessions.poplar.config import Layout, make_ipu_config
from ipucnn.sessions.poplar.environment import captured_stdout
from ipucnn.sessions.poplar.errors import ErrorContext, poplar_errors
from ipucnn.sessions.poplar.pipelining import proportions
from ipucnn.sessions.poplar.popdist import Instances
from ipucnn.sessions.poplar.progress import CompiledModule, parse_progress
from ipucnn.sessions.poplar.selection import check_selected
from ipucnn.sessions.poplar.versions import Api


class Device:
    """Where a Poplar session runs.

    Attributes:
        api: the SDK's modules.
        instances: of this process among those of ``poprun``.
        num_ipus: of this process; 0 before :meth:`configure`.
        preprocess: (``ChannelAffine``, fused operation or None, transfer type) of preprocessing on the IPU, or None.
        compiled: every program that was compiled so far.
        would_fit: what to suggest when memory runs out; see ``ErrorContext``.
    """

    def __init__(self, api: Api, instances: Instances) -> None:
        self.api, self.instances = api, instances
        self.num_ipus = 0
        self.compiled: List[CompiledModule] = []
        self.preprocess: Optional[Tuple[Any, Any, str]] = None
        self.would_fit: Optional[Callable[[Optional[float]], Optional[str]]] = None
        self._strategy: Any = None
        self._fp_exceptions = False

    def configure(self, num_ipus: int, config: Any, program: Any) -> None:
        """Applies the system's configuration, and makes the strategy.

        Args:
            num_ipus: of this process.
            config: ``RunConfig``.
            program: to be trained, or None.

        Raises:
            MissingError: there are no such IPUs, or others use them.
        """
        # To compile, a number of IPUs is enough; poprun's own choice would ask for the devices.
        selects = config.compile_only or not self.instances.is_distributed
        layout = Layout(num_ipus, selects=selects)
        if program is not None:
            values = program.available_memory_proportion
            per_stage = bool(proportions(program)[0])
            layout = replace(
                layout,
                available_memory_proportion=values[0] / 100 if values and not per_stage else None,
                recomputation=program.recomputation,
                dbn_replica_group_size=program.dbn_replica_group_size,
            )
        elif len(config.available_memory_proportion) == 1:
            layout = replace(layout, available_memory_proportion=config.available_memory_proportion[0] / 100)
        self._fp_exceptions = config.fp_exceptions
        self.num_ipus = num_ipus
        made = make_ipu_config(self.api.ipu, config, layout)
        with self._errors(training=True):
            if self.instances.is_distributed:
                self.api.start_instances()
                per_replica = num_ipus // self.instances.local_replicas
                self.api.join_instances(made, per_replica, selects_device=not layout.selects)
            made.configure_ipu_system()
            if layout.selects:
                check_selected(self.api, config.select_ipu, num_ipus)
            make = self.api.popdist_strategy() if self.instances.is_distributed else self.api.ipu_strategy()
            self._strategy = make()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Models and variables made here are the IPUs'."""
        with self._errors(training=True), self._strategy.scope():
            yield

    @contextlib.contextmanager
    def running(self, training: bool) -> Iterator[List[CompiledModule]]:
        """While the IPUs run (and compile, the first time).

        Yields:
            A list that holds what was compiled once the context has ended.

        Raises:
            UserError: for what the SDK is known to raise.
        """
        modules: List[CompiledModule] = []
        printed: List[bytes] = []
        try:
            with self._errors(training), captured_stdout() as printed:
                yield modules
        finally:
            modules += parse_progress(b"".join(printed).decode("utf-8", "replace"))
            self.compiled += modules

    def _errors(self, training: bool) -> Any:
        return poplar_errors(ErrorContext(training, self.num_ipus, self._fp_exceptions, self.would_fit))

    def reset_seed(self, seed: int) -> None:
        """Seeds the IPUs' random numbers."""
        self.api.ipu.utils.reset_ipu_seed(int(seed))

    def mean_over_replicas(self, value: Any) -> Any:
        """The mean of a tensor over replicas, on the IPUs."""
        return self.api.ipu.cross_replica_ops.cross_replica_mean(value)

    def mean_over_instances(self, values: Sequence[float]) -> Any:
        """float64 means over the instances of ``poprun`` of some numbers, the same on each of them.

        Every instance has to call this at the same places.  NaN on one is NaN on all.
        """
        own: Any = np.asarray(values, np.float64)
        if self.instances.count == 1:
            return own
        # 32 bits, as TensorFlow's numbers are here; what is averaged was computed in no more.
        with self._errors(training=True):
            together = self.api.sum_over_instances(own.astype(np.float32))
        return np.asarray(together, np.float64) / self.instances.count
