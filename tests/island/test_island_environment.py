"""The environment that jax finds when an island imports it."""

import pytest

from diloco_jax import before_jax
from diloco_jax.config import IslandConfig
from diloco_jax.island.options import prepare_island


@pytest.fixture
def told(monkeypatch):
    """The generations whose flags libtpu was told, in order."""
    generations = []
    monkeypatch.setattr(
        before_jax,
        "set_libtpu_flags",
        lambda generation, _: generations.append(generation),
    )
    return generations


def test_libtpu_is_told_the_flags_of_the_islands_topology(told, tmp_path):
    tpu(tmp_path, "0x006f")
    island = IslandConfig(topology="v5p:2x2x2", mesh_fsdp=8, batch_size=8, hosts=2)
    prepare_island(island, environment := {}, tmp_path)
    assert told == ["v5p"]
    assert environment["XLA_FLAGS"].endswith("device_count=4")


def test_without_a_topology_the_flags_are_those_of_the_tpus_here(told, tmp_path):
    prepare_island(IslandConfig(), {}, tmp_path)
    tpu(tmp_path, "0x006f")
    prepare_island(IslandConfig(), {}, tmp_path)
    tpu(tmp_path, "0x0042")
    prepare_island(IslandConfig(), {}, tmp_path)
    assert told == ["", "v6e", ""]


def tpu(root, device):
    """Has one card of Google's in a machine."""
    folder = root / "sys/bus/pci/devices/0000:00:05.0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vendor").write_text("0x1ae0\n")
    (folder / "device").write_text(f"{device}\n")
