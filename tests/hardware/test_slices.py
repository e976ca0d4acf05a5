"""TPU slices by topology, as the providers' tables have them."""

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.hardware.tpus import GENERATIONS, find_slice


@pytest.mark.parametrize(
    ("topology", "accelerator_type", "chips", "hosts", "machine_type"),
    [
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
        ("v9:4x4", "a generation of v5p, v6e"),
        ("v6f:4x4", "did you mean 'v6e:4x4'"),
        ("", "a generation of v5p, v6e"),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_with_the_nearest(topology, said):
    with pytest.raises(ConfigError, match=r"islands\.a\.topology") as error:
        find_slice(topology, "islands.a.topology")
    assert repr(topology) in str(error.value)
    assert said in str(error.value)
