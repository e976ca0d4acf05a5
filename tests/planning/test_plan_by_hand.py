"""Plans of the shipped configs against arithmetic of this file's own.

Nothing here asks the package for a formula, a rate or a size: shapes, chips, codecs and
machines are written down again, so a term that a plan forgets or counts twice shows.
"""

import dataclasses
import math
from pathlib import Path

import pytest
from config_support import load_config

from diloco_jax.config import ConfigError
from diloco_jax.config.resolving import resolve_open
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import fragments_of, plan_run

CONFIGS = Path(__file__).parents[2] / "configs"
CHIPS = {
    "v4:2x2x1": (4, 275e12),
    "v5e:2x2": (4, 197e12),
    "v5p:2x2x1": (4, 459e12),
    "v5p:4x4x4": (64, 459e12),
    "v5p:8x16x16": (2048, 459e12),
    "v6e:2x2": (4, 918e12),
    "v6e:16x16": (256, 918e12),
    "tpu7x:2x2x1": (4, 2307e12),
}
"""Chips of a slice, and the peak of each."""
BYTES = {"int8": 1 + 2 / 256, "int4": 0.5 + 2 / 32}
"""Of a parameter: its integer, and its share of a scale of two bytes."""
MACHINES = {
    "n2-standard-2": (2, 240, 10),
    "n2-standard-8": (8, 800, 16),
    "n2-highmem-16": (16, 1200, 32),
    "n2-highmem-48": (48, 1200, 32),
    "m3-ultramem-128": (128, 1200, math.inf),
}
"""Cores, MiB/s of its disk at most, and Gbit/s that it sends."""
LINK = 5.0
PLANNED = {
    "four_regions": True,
    "mixed_12b": True,
    "mixed_five": True,
    "mixed_toy": True,
    "paper_1t": True,
    "sixty_four": True,
    "mixed_meshes": False,
    "quickstart": False,
}
"""Shipped configs, and whether their islands have slices that can be planned."""


def weights(model):
    """Parameters of matrix products; those of the logits are the embedding's."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    layer = model.d_model * (heads * model.head_dim + 3 * model.mlp_dim)
    return model.vocab_size * model.d_model + model.num_layers * layer


def steps(config, share):
    """Seconds of each island's step. share: of peak that the model's FLOPs reach; a
    layer that is computed again takes a third more than that at peak."""
    model, length, found = config.run.model, config.run.sequence_length, {}
    heads = model.num_layers * model.num_heads * model.head_dim
    of_a_token = 6 * weights(model) + 12 * heads * length
    for name, island in config.islands.items():
        chips, peak = CHIPS[island.topology]
        assert island.remat == "full"
        flops = island.batch_size * length * of_a_token * max(4 / 3, 1 / share)
        found[name] = max(flops / (chips * peak), island.step_seconds)
    return found


def test_every_shipped_config_is_here():
    assert {path.stem for path in CONFIGS.glob("*.py")} == set(PLANNED)


@pytest.fixture(scope="module", params=sorted(n for n in PLANNED if PLANNED[n]))
def case(request):
    """A config, its plan, and the sizes of its fragments."""
    config = load_config(CONFIGS / f"{request.param}.py")
    world, fragments = Assumptions(link_gbit_per_s=LINK), fragments_of(config)
    prices = {i.topology.partition(":")[0]: 1.0 for i in config.islands.values()}
    prices |= {"coordinator": 2.0, "traffic": 0.02}
    plan = plan_run("x.py", config, fragments, world, prices=prices)
    return resolve_open(config), plan, fragments.sizes


def test_speeds_and_links(case):
    config, plan, _ = case
    sync, params = config.run.sync, plan.run.params
    model = config.run.model
    # An embedding that is not that of the logits has no product, and norms have none.
    looked_up = (not model.tied_embeddings) * model.vocab_size * model.d_model
    assert params == pytest.approx(weights(model) + looked_up, rel=3e-3)
    at_peak, expected = steps(config, 1.0), steps(config, 0.5)
    for name, island in plan.islands.items():
        assert island.step_seconds == pytest.approx(at_peak[name], rel=1e-3)
        assert island.expected_step_seconds == pytest.approx(expected[name], rel=1e-3)
    # The K-th fastest island sets the pace.
    cycle = sync.steps_per_cycle * sorted(at_peak.values())[sync.quorum - 1]
    assert plan.run.cycle_seconds == pytest.approx(cycle, rel=1e-3)
    for island in plan.islands.values():
        for way, codec in (
            (island.network.up, sync.codec_up),
            (island.network.down, sync.codec_down),
        ):
            gbit = 8e-9 * params * BYTES[codec] / 0.99
            assert way.mean == pytest.approx(gbit / cycle, rel=0.01)
        assert island.network.join_seconds == pytest.approx(
            8e-9 * 4 * params / 0.99 / LINK
        )


def test_a_first_start(case):
    """All islands fetch together; drawing takes 22 core seconds per 1e9 parameters."""
    config, plan, sizes = case
    cores, _, egress = MACHINES[config.launch.coordinator_machine]
    share = share_of_largest_worker(config.placement.workers, sizes)
    rate = min(LINK, egress / len(config.islands) / share)
    first = plan.run.first_start
    assert first.fetch_seconds == pytest.approx(
        8e-9 * 4 * plan.run.params / 0.99 / rate, rel=1e-3
    )
    drawn = 22e-9 * plan.run.params * share / cores
    assert first.draw_seconds == pytest.approx(drawn, rel=1e-3)
    state = state_of(config, plan.run.params)
    written = share * state / disk_rate(config)
    assert first.write_seconds == pytest.approx(written, rel=0.01)
    compiled = dataclasses.replace(first, compile_seconds=first.fetch_seconds + 1)
    assert compiled.seconds == pytest.approx(first.seconds + 1), "beside the fetch"


def state_of(config, params):
    """Bytes of parameters, anchors and momentum."""
    return (8 + 4 * (config.run.outer.momentum > 0)) * params


def test_memory(case):
    config, plan, sizes = case
    sync, placement, params = config.run.sync, config.placement, plan.run.params
    cores, *_ = MACHINES[config.launch.coordinator_machine]
    islands, workers = len(config.islands), placement.workers
    state = state_of(config, params)
    share = max(sizes) / sum(sizes)
    largest = state * share
    merges = min(4, max(1, cores // 4))
    deltas = 2 * islands * params * BYTES[sync.codec_up]
    anchors = 2 * islands * 4 * params * share
    needed = (
        state
        + workers * (1 + merges) * largest
        + params * BYTES[sync.codec_down]
        + min(anchors, 8 * params)
        + min(deltas, placement.merge_buffer_bytes)
        + (256 << 20) * (1 if workers == 1 else 1 + workers)
    )
    assert plan.run.coordinator.memory == pytest.approx(needed, rel=0.03)


def share_of_largest_worker(workers, sizes):
    """The largest fragment first, each to the worker that has least."""
    held = [0] * workers
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held) / sum(held)


def disk_rate(config):
    _, most, _ = MACHINES[config.launch.coordinator_machine]
    by_size = 140 + 0.28 * config.launch.coordinator_disk_gb
    return min(by_size, most) * 2**20


def test_disk(case):
    config, plan, sizes = case
    sync, placement, params = config.run.sync, config.placement, plan.run.params
    cycle, state = plan.run.cycle_seconds, state_of(config, params)
    islands, publish = len(config.islands), params * BYTES[sync.codec_down]
    # A quarter of the disk's time for snapshots.
    round_s = max(placement.snapshot_every_s, 4 * state / disk_rate(config))
    disk = plan.run.coordinator.disk
    assert disk.round_seconds == pytest.approx(round_s, rel=1e-3)
    rounds = max(round_s / cycle, 1.0)
    cycles = config.run.total_tokens / sync.steps_per_cycle
    cycles /= sum(i.batch_size for i in config.islands.values())
    cycles /= config.run.sequence_length
    lines = cycles * sync.fragments * (1700 + 760 * islands)
    # The tokens of others at every step; a report at the first step a second later.
    step_s = cycle / sync.steps_per_cycle
    reports_a_step = 1 / math.ceil(1 / step_s)
    steps = cycles * sync.steps_per_cycle * islands
    lines += steps * (275 + 940 * reports_a_step)
    log = (placement.snapshots_kept - 0.5) * rounds * publish
    snapshots = state * (placement.snapshots_kept + max(sizes) / sum(sizes))
    assert disk.expected == pytest.approx(snapshots + log + lines, rel=0.02)
    wrote = publish / cycle + state / round_s
    assert disk.bytes_per_s == pytest.approx(wrote, rel=0.02)


def test_restart(case):
    config, plan, sizes = case
    params, codec = plan.run.params, config.run.sync.codec_down
    state, rate = state_of(config, params), disk_rate(config)
    share = share_of_largest_worker(config.placement.workers, sizes)
    round_s = max(config.placement.snapshot_every_s, 4 * share * state / rate)
    publishes = round_s / 2 / plan.run.cycle_seconds + 1
    read = state + publishes * params * BYTES[codec]
    # The process, then for the worker with most the longer one of what its disk reads,
    # and of what its cores check and decode; a quarter more is allowed for.
    native = config.placement.merge_route == "native" and codec == "int8"
    decode = publishes * params * (1.1 if native else 5.7)
    cores, *_ = MACHINES[config.launch.coordinator_machine]
    computed = share * (decode + read * 1.6) / 1e9 / cores
    seconds = 30 + 1.25 * max(share * read / rate, computed)
    assert plan.run.outage.restart_seconds == pytest.approx(seconds, rel=0.02)


def test_days_and_traffic(case):
    config, plan, _ = case
    sync, length = config.run.sync, config.run.sequence_length
    expected = steps(config, 0.5)
    rate = sum(i.batch_size * length / expected[n] for n, i in config.islands.items())
    lost = 1.0 - plan.run.goodput.goodput
    assert 0 <= lost < 0.6
    days = config.run.total_tokens / (rate * (1 - lost)) / 86400
    assert plan.run.days == pytest.approx(days, rel=1e-3)
    price = plan.run.price
    home = config.launch.coordinator_zone.rpartition("-")[0]
    zones = config.launch.zones
    far = [n for n in config.islands if home not in ("", zones[n].rpartition("-")[0])]
    cycle = sync.steps_per_cycle * sorted(expected.values())[sync.quorum - 1]
    # Each delta, and a publish once for each region.
    copies = len({zones[name].rpartition("-")[0] for name in far})
    octets = len(far) * BYTES[sync.codec_up] + copies * BYTES[sync.codec_down]
    crossing = plan.run.params * octets / cycle * 86400 / 1e9
    assert price.crossing_gb_per_day == pytest.approx(crossing, rel=0.01)
    chips = sum(CHIPS[i.topology][0] for i in config.islands.values())
    workers = config.placement.workers
    machines = 1 if workers == 1 else 1 + workers
    day = 24 * (chips + 2 * machines) + 0.02 * crossing
    assert price.per_day == pytest.approx(day, rel=0.01)
    tokens = plan.run.tokens_per_day
    assert price.per_1e9_tokens == pytest.approx(day / tokens * 1e9, rel=0.01)


def test_shipped_plans_pass_every_check(case):
    _, plan, _ = case
    assert plan.run.refusals == []
    assert plan.fits is None
    hosts = sum(island.hosts for island in plan.islands.values())
    waits = [note for note in plan.run.notes if "wait their turn" in note]
    assert bool(waits) == (2 * 4 * hosts > 4096)


@pytest.mark.parametrize("name", [n for n, planned in PLANNED.items() if not planned])
def test_configs_of_this_machine_have_no_slice_to_plan(name):
    config = load_config(CONFIGS / f"{name}.py")
    with pytest.raises(ConfigError, match="topology is empty"):
        plan_run("x.py", config, fragments_of(config), Assumptions())
