"""Hardware facts against the vendor's own headline numbers, and looking systems up."""

import pytest

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import IPUS, SYSTEMS, get_ipu, get_system

# TFLOP/s that the vendor states for a chip: Mk1 and Mk2 from the product descriptions, Bow 350, C600 280.
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
def test_peaks_are_the_vendors(ipu: str, arithmetic: str, tflops: float) -> None:
    assert get_ipu(ipu).peak_flops_per_s(arithmetic) == pytest.approx(tflops * 1e12, rel=0.01)


@pytest.mark.parametrize(("ipu", "mebibytes"), [("mk1", 304), ("mk2", 897), ("bow", 897), ("c600", 897)])
def test_memory_of_a_chip(ipu: str, mebibytes: int) -> None:
    assert get_ipu(ipu).sram_bytes == mebibytes * 2**20


def test_exchange_of_a_chip_is_the_vendors_8_terabytes_per_second() -> None:
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
    found = get_system(system)
    assert (found.ipu.name, found.num_ipus) == (ipu, num_ipus)


def test_host_bandwidth_grows_with_the_machines_and_gateways_slow_the_all_reduce() -> None:
    assert get_system("pod64").host_bytes_per_s == 16 * get_system("m2000").host_bytes_per_s
    speeds = [get_system(f"pod{n}").all_reduce_bytes_per_s for n in (64, 128, 256)]
    assert speeds[0] > speeds[1] > speeds[2]


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
    with pytest.raises(ConfigurationError, match="unknown system 'pod61'") as caught:
        get_system("pod61")
    assert "pod16" in str(caught.value.hint)
    with pytest.raises(ConfigurationError, match="unknown IPU generation 'tpu'") as other:
        get_ipu("tpu")
    assert "known: mk1, mk2, bow, c600" in str(other.value.hint)
