"""Hardware facts against the vendor's published numbers, and look-up of systems."""

import dataclasses

import pytest
from support.refusals import check_raises

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import (
    IPUS,
    SYSTEMS,
    Calibration,
    collective_latency_s,
    get_ipu,
    get_system,
    smallest_system,
)

# TFLOP/s of a chip by the vendor: Mk1 and Mk2 from the product descriptions, Bow 350, C600 280.
PEAKS = [
    ("mk1", "half_float", 124.5),
    ("mk1", "float_float", 31.1),
    ("mk2", "half_half", 250),
    ("mk2", "half_float", 125),
    ("mk2", "float_float", 62.4),
    ("bow", "half_half", 350),
    ("bow", "float_float", 87),
    ("c600", "half_half", 280),
    ("c600", "float_float", 70),
]


@pytest.mark.parametrize(("ipu", "arithmetic", "tflops"), PEAKS)
def test_peaks_equal_those_of_the_vendor(ipu: str, arithmetic: str, tflops: float) -> None:
    assert get_ipu(ipu).peak_flops_per_s(arithmetic) == pytest.approx(tflops * 1e12, rel=0.01)


@pytest.mark.parametrize(("ipu", "mebibytes"), [("mk1", 304), ("mk2", 897), ("bow", 897), ("c600", 897)])
def test_memory_of_a_chip(ipu: str, mebibytes: int) -> None:
    assert get_ipu(ipu).sram_bytes == mebibytes * 2**20


def test_exchange_of_a_chip_equals_that_of_the_vendor() -> None:
    for name, terabytes in (("mk1", 7.8), ("mk2", 7.83), ("bow", 10.9)):
        ipu = get_ipu(name)
        total = ipu.num_tiles * ipu.exchange_bytes_per_cycle * ipu.clock_hz
        assert total == pytest.approx(terabytes * 1e12, rel=0.01)


@pytest.mark.parametrize(
    ("system", "ipu", "num_ipus"),
    [
        ("m2000", "mk2", 4),
        ("bow-2000", "bow", 4),
        ("pod16", "mk2", 16),
        ("pod64", "mk2", 64),
        ("pod128", "mk2", 128),
        ("pod256", "mk2", 256),
        ("bow-pod16", "bow", 16),
        ("bow-pod64", "bow", 64),
        ("bow-pod128", "bow", 128),
        ("bow-pod256", "bow", 256),
        ("c600", "c600", 1),
        ("mk1-16", "mk1", 16),
    ],
)
def test_systems(system: str, ipu: str, num_ipus: int) -> None:
    known = get_system(system)
    assert (known.ipu.name, known.num_ipus) == (ipu, num_ipus)


def test_host_bandwidth_grows_with_machines_and_gateways_slow_the_all_reduce() -> None:
    assert get_system("pod64").host_bytes_per_s == 16 * get_system("m2000").host_bytes_per_s
    speeds = [get_system(f"pod{n}").all_reduce_bytes_per_s for n in (64, 128, 256)]
    assert speeds[0] > speeds[1] > speeds[2]


def test_the_all_reduce_of_resnet50_takes_the_logged_time() -> None:
    """51 MB take 4 ms in a POD16, 7 ms in a POD128, and 10 ms in a POD256."""
    for prefix in ("", "bow-"):
        for num_ipus, milliseconds in ((16, 4), (128, 7), (256, 10)):
            system = get_system(f"{prefix}pod{num_ipus}")
            assert system.all_reduce_s(51e6, num_ipus) == pytest.approx(milliseconds / 1000)
            slower = system.calibrated(Calibration(compute=3.0, collective=2.0))
            assert slower.all_reduce_s(51e6, num_ipus) == pytest.approx(2 * milliseconds / 1000)
            assert slower.ipu.computing_hz * 3 == system.ipu.computing_hz == system.ipu.clock_hz
        assert (
            get_system(f"{prefix}pod64").all_reduce_bytes_per_s == get_system("pod16").all_reduce_bytes_per_s
        )
    assert get_system("pod16").all_reduce_s(51e6, 1) == 0


@pytest.mark.parametrize("num_members", [1, 2, 3, 16])
def test_a_ring_all_reduce_takes_two_rounds(num_members: int) -> None:
    """Along the ring, each part visits all other members while it is summed, and all others with the sum."""
    steps = sum(1 for _ in ("sum", "copy") for member in range(num_members) if member != 0)
    assert collective_latency_s(num_members) == pytest.approx(steps * 1.5e-6)


def test_bandwidths_between_machines_equal_the_sources() -> None:
    assert get_system("m2000").host_bytes_per_s == get_system("c600").host_bytes_per_s == 5.5e9
    assert get_system("mk1-16").host_bytes_per_s == 4 * 5.5e9
    for name, system in SYSTEMS.items():
        # The four IPUs of a machine share 20 GB/s of streaming memory; cards have none.
        assert system.remote_bytes_per_s * 4 == (0 if name in ("c600", "mk1-16") else 20e9)
    # Mk2: 4 of 10 links of 16 GB/s.  C2 card: 128 GB/s in both directions, for two IPUs.  A send waits 1.6 us on a Bow.
    assert {ipu.name: ipu.link_bytes_per_s for ipu in IPUS.values()} == {
        **dict.fromkeys(("mk2", "bow", "c600"), 4 * 16e9),
        "mk1": 128e9 / 4,
    }
    assert get_ipu("bow").link_idle_cycles / get_ipu("bow").clock_hz == pytest.approx(1.6e-6, rel=0.02)


def test_operations_of_a_tile_per_cycle_equal_the_sources() -> None:
    for ipu in IPUS.values():
        assert (
            ipu.num_tiles * ipu.num_workers == {"mk1": 7296, "mk2": 8832, "bow": 8832, "c600": 8832}[ipu.name]
        )
        assert ipu.vector_macs_per_cycle == {2: 4, 4: 2}  # HMAC of four halves, or of two single floats
        assert ipu.weight_load_bytes_per_cycle * 8 == 64  # bits
        slic = (ipu.slic_macs_per_channel, ipu.slic_max_channels, ipu.slic_kernel_width)
        assert slic == ((0, 0, 1) if ipu.name == "mk1" else (8, 4, 4))


@pytest.mark.parametrize("first", ["m2000", "pod16", "pod64"])
def test_the_smallest_system_equals_a_search_of_all(first: str) -> None:
    sizes = {"m2000": 4, "pod16": 16, "pod64": 64, "pod128": 128, "pod256": 256}
    for num_ipus in (1, 4, 5, 16, 17, 64, 65, 128, 129, 256, 257, 10_000):
        fitting = [size for size in sizes.values() if size >= max(num_ipus, sizes[first])] or [256]
        smallest = smallest_system(num_ipus, first)
        assert sizes[smallest.name] == min(fitting)
    assert smallest_system(5).name == "pod16"


def test_facts_are_uncalibrated_and_immutable() -> None:
    system = get_system("pod16")
    assert {item.calibration for item in SYSTEMS.values()} == {Calibration()}
    assert dataclasses.astuple(Calibration()) == (1, 1, 1, 1)
    assert dataclasses.asdict(system.calibrated(Calibration())) == dataclasses.asdict(system)
    for fact, name in (
        (system, "num_ipus"),
        (system.ipu, "num_tiles"),
        (system.ipu.amp["half_half"], dataclasses.fields(system.ipu.amp["half_half"])[0].name),
        (system.calibration, "compute"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(fact, name, 2)


def test_every_number_is_positive() -> None:
    for system in SYSTEMS.values():
        assert min(system.num_ipus, system.host_bytes_per_s, system.all_reduce_bytes_per_s) > 0
        assert system.remote_bytes_per_s >= 0
    for ipu in IPUS.values():
        assert min(ipu.num_tiles, ipu.sram_per_tile_bytes, ipu.clock_hz, ipu.link_bytes_per_s) > 0
        assert set(ipu.amp) == {"half_half", "half_float", "float_float"}


def test_names_are_found_in_any_case_and_spelling() -> None:
    assert get_system("BOW_POD16") is get_system("bow-pod16")
    assert get_ipu("MK2") is get_ipu("mk2")


def test_unknown_names_get_a_hint() -> None:
    check_raises(ConfigurationError, "unknown system 'pod61'", "pod16", get_system, "pod61")
    error, hint = "unknown IPU generation 'tpu'", "known: mk1, mk2, bow, c600"
    check_raises(ConfigurationError, error, hint, get_ipu, "tpu")
