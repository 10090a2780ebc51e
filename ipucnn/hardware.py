"""Graphcore IPU generations and the systems built from them; all hardware numbers are here.

Sources, cited at each number:
  [Jia]      Jia et al. 2019, Dissecting the Graphcore IPU, arXiv:1912.03413.
  [DS]       Graphcore product descriptions of M2000, IPU-POD16/64/128/256, Bow-2000 and Bow Pod64 (docs.graphcore.ai).
  [poplibs]  Graphcore's public poplibs sources: convolution planner, codelets and cycle estimates.
  [MLPerf]   system descriptions and logs of MLPerf training 1.0, 1.1 and 2.0 (mlcommons/training_results_*).
  [popliner] Graphcore's popliner: 638976 bytes per Mk2 tile.
  [Blake]    thecharlieblake.co.uk/ipus, notes by a Graphcore engineer.
  [ByteMLPerf] vendor file of the C600 in bytedance/ByteMLPerf, and the PopRT documentation.
  [AutoPipe] readme of Graphcore's experimental pipeline planner in ipu_tensorflow_addons.
  [examples] READMEs of graphcore/examples.

Bandwidths are in decimal bytes, per direction; one MAC is two FLOP.
"""

from dataclasses import dataclass, replace
from typing import Dict, Mapping, Tuple

from ipucnn.errors import ConfigurationError, did_you_mean


@dataclass(frozen=True)
class AmpUnit:
    """The work of a tile's matrix unit (Accumulating Matrix Product) in one pass over a block of a kernel.

    Attributes:
        input_channels, output_channels: channels that it reads and writes at a time; fewer are padded.
        cycles_per_position: cycles for one output position of such a block.
    """

    input_channels: int
    output_channels: int
    cycles_per_position: int

    @property
    def macs_per_cycle(self) -> float:
        return self.input_channels * self.output_channels / self.cycles_per_position


@dataclass(frozen=True, eq=False)
class IPU:
    """One processor.

    Attributes:
        num_tiles: number of tiles, which are cores with their own memory.
        num_workers: hardware threads of a tile, issuing in rotation.
        sram_per_tile_bytes: memory of a tile; the chip has no other memory.
        clock_hz: clock frequency.
        amp: matrix unit by arithmetic: "half_half" (fp16 input, fp16 partials), "half_float", "float_float".
        slic_macs_per_channel: MACs per cycle and tile of the short convolution unit, for each input channel of a
            group, up to ``slic_max_channels``; fp16 only; 0 without such a unit.
        slic_kernel_width: width to a multiple of which that unit pads the kernel.
        vector_macs_per_cycle: MACs per cycle and tile of the plain vector unit, by bytes of an element.
        weight_load_bytes_per_cycle: speed of loading a weight block into the matrix unit.
        exchange_bytes_per_cycle: bytes that a tile can receive (and send) per cycle.
        link_bytes_per_s: bandwidth to a neighbour IPU, one direction.
        link_idle_cycles: cycles that an IPU waits before it sends to or receives from another IPU.
        compute_factor: time of computing over the cost model's, see ``Calibration``.
    """

    name: str
    title: str
    num_tiles: int
    num_workers: int
    sram_per_tile_bytes: int
    clock_hz: float
    amp: Mapping[str, AmpUnit]
    slic_macs_per_channel: int
    slic_max_channels: int
    slic_kernel_width: int
    vector_macs_per_cycle: Mapping[int, float]
    weight_load_bytes_per_cycle: int
    exchange_bytes_per_cycle: float
    link_bytes_per_s: float
    link_idle_cycles: int = 3000  # [AutoPipe] its example machine, Bow clock
    compute_factor: float = 1.0

    @property
    def sram_bytes(self) -> int:
        """Memory of the chip in bytes."""
        return self.num_tiles * self.sram_per_tile_bytes

    @property
    def computing_hz(self) -> float:
        """Cycles of the cost model per second: the clock frequency over ``compute_factor``."""
        return self.clock_hz / self.compute_factor

    def peak_flops_per_s(self, arithmetic: str) -> float:
        """Peak FLOP/s of the chip's matrix units for an arithmetic of ``amp``."""
        return 2 * self.amp[arithmetic].macs_per_cycle * self.num_tiles * self.clock_hz


@dataclass(frozen=True)
class Calibration:
    """Factors on the cost model's times, from measurements of a system; 1 leaves the package's values.

    Attributes:
        compute: factor on computing, weight updates included.
        fixed: factor on the feeds and the loop around a micro-batch.
        collective: factor on the sum of gradients over replicas.
        band_factor: factor within which 80 of 100 predictions with these factors agree with the measurement.
    """

    compute: float = 1.0
    fixed: float = 1.0
    collective: float = 1.0
    band_factor: float = 1.0


@dataclass(frozen=True)
class System:
    """A machine with IPUs, and its connections between IPUs and to the host.

    Attributes:
        num_ipus: processors that a job can use.
        host_bytes_per_s: largest rate of input from the host to the whole system.
        all_reduce_bytes_per_s: gradient bytes of one replica divided by the measured time to sum them over all
            replicas, without the steps of the ring.
        remote_bytes_per_s: bandwidth of streaming memory to one IPU; 0 for a system without it.
        calibration: factors from measurements of such a system.
    """

    name: str
    title: str
    ipu: IPU
    num_ipus: int
    host_bytes_per_s: float
    all_reduce_bytes_per_s: float
    remote_bytes_per_s: float
    calibration: Calibration = Calibration()

    def calibrated(self, calibration: Calibration) -> "System":
        """The same system with other calibration factors."""
        return replace(
            self, ipu=replace(self.ipu, compute_factor=calibration.compute), calibration=calibration
        )

    def all_reduce_s(self, num_bytes: float, num_replicas: int) -> float:
        """Seconds to sum ``num_bytes`` of each replica over all replicas."""
        if num_replicas < 2:
            return 0.0
        seconds = num_bytes / self.all_reduce_bytes_per_s + collective_latency_s(num_replicas)
        return self.calibration.collective * seconds


# Fixed time of a step of a collective, independent of the bytes sent.  Sharing batch norm's statistics between two
# replicas, a ring of two steps, costs 3 us per norm and pass: the difference between logs with and without it [MLPerf].
# [AutoPipe] counts 3000 cycles before an IPU sends to another, 1.6 us on a Bow.
_COLLECTIVE_STEP_S = 1.5e-6


def collective_latency_s(num_members: int) -> float:
    """Seconds for the steps of a sum over a ring, independent of its size: each member's part goes round twice."""
    return 2 * (num_members - 1) * _COLLECTIVE_STEP_S


_VECTOR_MACS = {2: 4.0, 4: 2.0}  # [poplibs] HMAC and VMAC: at most 4 fp16 MACs per cycle; fp32 half

_MK1 = IPU(
    name="mk1",
    title="IPU Mk1 (GC2)",
    num_tiles=1216,  # [Jia]
    num_workers=6,  # [Jia]
    sram_per_tile_bytes=256 * 1024,  # [Jia]; 304 MiB in all
    clock_hz=1.6e9,  # [Jia]
    # [poplibs] 16 input channels by 8 partials in 4 cycles, fp32 an eighth by eight; 124.5 and 31.1 TFLOP/s [Jia].
    amp={"half_half": AmpUnit(16, 8, 4), "half_float": AmpUnit(16, 8, 4), "float_float": AmpUnit(8, 8, 8)},
    slic_macs_per_channel=0,  # [poplibs] the unit came with Mk2
    slic_max_channels=0,
    slic_kernel_width=1,
    vector_macs_per_cycle=_VECTOR_MACS,
    weight_load_bytes_per_cycle=8,  # [poplibs]
    exchange_bytes_per_cycle=4.0,  # [poplibs]; 7.8 TB/s over 1216 tiles
    link_bytes_per_s=32e9,  # C2 card: 128 GB/s card to card, both directions and both IPUs (legacy Graphcore README)
)

_MK2_AMP = {  # [poplibs]; 250, 125 and 62.4 TFLOP/s [DS]
    "half_half": AmpUnit(16, 16, 4),
    "half_float": AmpUnit(16, 8, 4),
    "float_float": AmpUnit(8, 16, 8),
}


def _mk2_die(name: str, title: str, clock_hz: float, link_bytes_per_s: float) -> IPU:
    return IPU(
        name=name,
        title=title,
        num_tiles=1472,  # [DS] [Blake]
        num_workers=6,  # [DS] 8832 threads
        sram_per_tile_bytes=638_976,  # [popliner] 624 KiB; 897 MiB in all
        clock_hz=clock_hz,
        amp=_MK2_AMP,
        slic_macs_per_channel=8,  # [poplibs] min(4, channels of a group) x 8 MACs per cycle
        slic_max_channels=4,
        slic_kernel_width=4,
        vector_macs_per_cycle=_VECTOR_MACS,
        weight_load_bytes_per_cycle=8,  # [poplibs] 16 with the 128-bit load, which is off by default
        exchange_bytes_per_cycle=4.0,  # [poplibs]; 8 TB/s [DS]
        link_bytes_per_s=link_bytes_per_s,
    )


_MK2 = _mk2_die(
    "mk2", "IPU Mk2 (GC200)", 1.33e9, 64e9
)  # clock [MLPerf 1.x]; 4 of 10 links of 16 GB/s [Blake]
_BOW = _mk2_die("bow", "Bow IPU", 1.85e9, 64e9)  # clock [MLPerf 2.0]; links as Mk2 [DS]
_C600 = _mk2_die("c600", "C600", 280e12 / (1472 * 128), 64e9)  # 280 TFLOP/s; 128 GB/s both ways [ByteMLPerf]

IPUS: Dict[str, IPU] = {ipu.name: ipu for ipu in (_MK1, _MK2, _BOW, _C600)}

# [examples] EfficientDet's README measures 5.5 GB/s of input per M2000.  A host serves them through one 100 GbE
# link each, so a POD's hosts scale with its machines [DS].
_HOST_PER_MACHINE = 5.5e9
_IPUS_PER_MACHINE = 4  # [DS] M2000 and Bow-2000

# Summing ResNet-50's 51 MB of fp16 gradients takes about 4 ms in POD16 and POD64, 7 ms in POD128 and 10 ms in POD256,
# whose POD64s are connected by gateway links: the difference between two accumulation counts in the logs [MLPerf].
# The steps of the ring are subtracted, because they are counted separately.
_ALL_REDUCE_INSIDE = 51e6 / (4e-3 - collective_latency_s(16))
_ALL_REDUCE_POD128 = 51e6 / (7e-3 - collective_latency_s(128))
_ALL_REDUCE_POD256 = 51e6 / (10e-3 - collective_latency_s(256))

# The streaming memory is said to give 20 GB/s per M2000, for four IPUs; no public measurement was found.
_REMOTE = 5e9


def _pod(
    name: str, title: str, ipu: IPU, num_machines: int, all_reduce: float = _ALL_REDUCE_INSIDE
) -> System:
    num_ipus = num_machines * _IPUS_PER_MACHINE
    return System(name, title, ipu, num_ipus, num_machines * _HOST_PER_MACHINE, all_reduce, _REMOTE)


def _systems() -> Tuple[System, ...]:
    systems = [
        _pod("m2000", "IPU-M2000", _MK2, 1),
        _pod("bow-2000", "Bow-2000", _BOW, 1),
    ]
    for prefix, title, ipu in (("", "IPU-POD", _MK2), ("bow-", "Bow Pod", _BOW)):
        for size, all_reduce in (
            (16, _ALL_REDUCE_INSIDE),
            (64, _ALL_REDUCE_INSIDE),
            (128, _ALL_REDUCE_POD128),
            (256, _ALL_REDUCE_POD256),
        ):
            machines = size // _IPUS_PER_MACHINE  # [DS]
            systems.append(_pod(f"{prefix}pod{size}", f"{title}{size}", ipu, machines, all_reduce))
    # One PCIe card, Gen4, two x8 slots, no streaming memory [ByteMLPerf]; input was not measured: the M2000's is used.
    systems.append(System("c600", "C600 card", _C600, 1, _HOST_PER_MACHINE, _ALL_REDUCE_INSIDE, 0.0))
    # Eight C2 cards of two IPUs each in one server (legacy Graphcore README); input as of one M2000 for 4 IPUs.
    systems.append(System("mk1-16", "16 Mk1 IPUs (8 C2 cards)", _MK1, 16, 4 * _HOST_PER_MACHINE, 12e9, 0.0))
    return tuple(systems)


SYSTEMS: Dict[str, System] = {system.name: system for system in _systems()}


def get_ipu(name: str) -> IPU:
    """The IPU generation of a name.

    Raises:
        ConfigurationError: the name is unknown.
    """
    return _get(name, IPUS, "IPU generation")  # type: ignore[return-value]


def get_system(name: str) -> System:
    """The system of a name; ``_`` and ``-`` are the same, and case does not matter.

    Raises:
        ConfigurationError: the name is unknown.
    """
    return _get(name, SYSTEMS, "system")  # type: ignore[return-value]


def smallest_system(num_ipus: int, first: str = "pod16") -> System:
    """The smallest system of Mk2 IPUs with at least ``num_ipus``; the largest one if none has as many.

    Args:
        first: name of the smallest system to consider.
    """
    machines = sorted((s for s in SYSTEMS.values() if s.ipu is _MK2), key=lambda system: system.num_ipus)
    machines = [system for system in machines if system.num_ipus >= get_system(first).num_ipus]
    return next((system for system in machines if system.num_ipus >= num_ipus), machines[-1])


def _get(name: str, known: Mapping[str, object], kind: str) -> object:
    key = name.strip().lower().replace("_", "-")
    try:
        return known[key]
    except KeyError:
        hint = did_you_mean(name, known) or f"known: {', '.join(known)}"
        raise ConfigurationError(f"unknown {kind} '{name}'", hint) from None
