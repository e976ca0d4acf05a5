"""TPU slices by topology, as the providers' tables have them."""

import pytest

from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.hardware.tpus import (
    GENERATIONS,
    HOST_MACHINES,
    PCI_DEVICES,
    find_slice,
    ici_bytes_per_s,
    peak_flops_per_s,
    slice_of,
)


@pytest.mark.parametrize(
    ("topology", "accelerator_type", "chips", "hosts", "machine_type"),
    [
        ("v4:2x2x1", "v4-8", 4, 1, "ct4p-hightpu-4t"),
        ("v4:4x4x4", "v4-128", 64, 16, "ct4p-hightpu-4t"),
        ("v5e:1x1", "v5litepod-1", 1, 1, "ct5lp-hightpu-1t"),
        ("v5e:2x4", "v5litepod-8", 8, 1, "ct5lp-hightpu-8t"),
        ("v5e:16x16", "v5litepod-256", 256, 64, "ct5lp-hightpu-4t"),
        # The Cloud TPU API does not have it.
        ("tpu7x:2x2x1", "", 4, 1, "tpu7x-standard-4t"),
        ("tpu7x:4x4x4", "", 64, 16, "tpu7x-standard-4t"),
        ("v5p:2x2x1", "v5p-8", 4, 1, "ct5p-hightpu-4t"),
        ("v5p:2x2x4", "v5p-32", 16, 4, "ct5p-hightpu-4t"),
        ("v5p:4x4x4", "v5p-128", 64, 16, "ct5p-hightpu-4t"),
        ("v5p:16x16x24", "v5p-12288", 6144, 1536, "ct5p-hightpu-4t"),
        ("v5p:4x4x12", "", 192, 48, "ct5p-hightpu-4t"),
        ("v6e:1x1", "v6e-1", 1, 1, "ct6e-standard-1t"),
        ("v6e:2x2", "v6e-4", 4, 1, "ct6e-standard-4t"),
        # One host of eight chips, not two of four.
        ("v6e:2x4", "v6e-8", 8, 1, "ct6e-standard-8t"),
        ("v6e:4x4", "v6e-16", 16, 4, "ct6e-standard-4t"),
        ("v6e:16x16", "v6e-256", 256, 64, "ct6e-standard-4t"),
    ],
)
def test_a_slice_is_what_its_topology_says(
    topology, accelerator_type, chips, hosts, machine_type
):
    found = find_slice(topology, "topology")
    assert found.topology == topology
    assert (found.accelerator_type, found.chips) == (accelerator_type, chips)
    assert (found.hosts, found.machine_type) == (hosts, machine_type)


def test_every_listed_shape_is_a_whole_number_of_hosts():
    for generation in GENERATIONS.values():
        for shape in generation.shapes:
            found = find_slice(f"{generation.name}:{shape}", "topology")
            assert found.hosts * found.chips_per_host == found.chips
            assert found.chips <= generation.max_chips


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ("v5p:3x4x4", "nearest v5p topologies are v5p:4x4x4"),
        ("v5p:8x4x4", "nearest v5p topologies are v5p:4x4x8"),
        ("v5p:4x4", "nearest v5p topologies are v5p:2x2x4"),
        ("v5p:16x24x24", "nearest v5p topologies are v5p:16x16x24"),
        ("v5p:0x0x0", "nearest v5p topologies are v5p:2x2x1"),
        ("v6e:16x32", "nearest v6e topologies are v6e:16x16, v6e:8x16"),
        ("v6e:big", "nearest v6e topologies are v6e:1x1"),
        ("v6e-16", "write 'v6e:4x4'"),
        ("v5p-16", "write 'v5p:2x2x2'"),
        ("v5litepod-16", "write 'v5e:4x4'"),
        ("v9:4x4", "a generation of v4, v5e, v5p, v6e, tpu7x"),
        ("v6f:4x4", "did you mean 'v6e:4x4'"),
        ("", "a generation of v4, v5e, v5p, v6e, tpu7x"),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_with_the_nearest(topology, said):
    with pytest.raises(ConfigError, match=r"islands\.a\.topology") as error:
        find_slice(topology, "islands.a.topology")
    assert repr(topology) in str(error.value)
    assert said in str(error.value)


def test_all_facts_of_a_chip_follow_its_devices():
    """A TPU7x is two devices, which share its HBM, its FLOP/s and its links."""
    two = find_slice("tpu7x:2x2x1", "topology")
    assert (two.chips, two.devices) == (4, 8)
    assert two.hbm_bytes == int(94.75 * 2**30)
    assert two.hbm_bytes_per_s == 7380e9 / 2
    assert two.flops_per_s == 4 * 2307e12
    assert peak_flops_per_s("TPU7x") == 2307e12 / 2
    assert ici_bytes_per_s(two) == pytest.approx(600e9 * 2 / 6 / 2)
    one = find_slice("v4:2x2x1", "topology")
    assert (one.chips, one.devices, one.hbm_bytes) == (4, 4, int(30.75 * 2**30))
    with pytest.raises(
        ConfigError, match=r"4 chips, two devices each; .* product is 8"
    ):
        slice_of("a", IslandConfig(topology="tpu7x:2x2x1", mesh_fsdp=4, batch_size=4))
    slice_of("a", IslandConfig(topology="tpu7x:2x2x1", mesh_fsdp=8, batch_size=8))


def test_every_generation_is_in_every_table():
    machines = {m for g in GENERATIONS.values() for m in g.machine_types.values()}
    assert machines == set(HOST_MACHINES)
    assert sorted(PCI_DEVICES.values()) == sorted(GENERATIONS)
