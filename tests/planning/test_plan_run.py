"""The plan of a run from islands whose compilation is known."""

import dataclasses
import json
import math

import numpy as np
import plan_support
import pytest
from plan_support import CONFIG, FLOPS, planned

from diloco_jax.coordinator.holding.inbox import DELTAS_AT_ONCE
from diloco_jax.coordinator.settings import payload_bytes
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.hardware.machines import CONSTANTS
from diloco_jax.planning.compiling import ExchangePlan
from diloco_jax.planning.coordinator import PROCESS_BYTES, plan_coordinator
from diloco_jax.planning.plan import fragments_of
from diloco_jax.planning.terms import terms_of
from diloco_jax.wire.bulk import chunks

REGIONS = ("islands.big.region", "islands.small.region")
MOMENTUM = {
    "outer.optimizer": "nesterov",
    "outer.learning_rate": 0.7,
    "outer.momentum": 0.9,
}


@pytest.fixture(scope="module")
def calm():
    return planned(share=(1.0,))


def coordinator(step_s=1.0, **changes):
    """What is planned of a coordinator whose outer optimizer has a momentum."""
    config = CONFIG.replace(MOMENTUM | changes)
    steps = dict.fromkeys(config.islands, step_s)
    return plan_coordinator(terms_of(config, fragments_of(config), steps))


def test_the_rates_are_those_of_the_bytes_that_are_sent():
    """Scales, parts of blocks and headers of chunks included."""
    codec, sent = get_codec("int2"), 0
    coded = {"sync.codec_up": codec.name, "sync.codec_down": codec.name}
    for pieces in fragments_of(CONFIG).fragments:
        encoded = [codec.encode(np.ones(p.shape, np.float32)) for p in pieces]
        payload = PayloadLayout.of(codec, pieces).pack(encoded)
        for header, part in chunks([payload], 0, len(payload)):
            sent += len(header) + len(part)
    network = planned(CONFIG.replace(coded)).islands["small"].network
    for way in (network.up, network.down):
        assert way.mean == pytest.approx(8e-9 * sent / 20 / 0.99, rel=0.02)


def test_counts_of_use_are_bytes_of_a_delta():
    config = CONFIG.replace("sync.weights_by_use", "rows")
    config = config.replace("model.tied_embeddings", False)
    codec, fragments = config.run.sync.codec_up, fragments_of(config)
    octets = sum(payload_bytes(codec, fragments)) + 2 * config.run.model.vocab_size
    network = planned(config).islands["small"].network
    assert network.up.mean == pytest.approx(8e-9 * octets / 20 / 0.99)
    assert network.up.mean > network.down.mean


def test_nothing_is_lost_where_nothing_happens(calm):
    assert calm.run.goodput.goodput == 1.0
    assert calm.run.tokens_per_day == pytest.approx(10_240 * 86400)
    assert calm.run.days == pytest.approx(CONFIG.run.total_tokens / 10_240 / 86400)
    assert calm.fits
    assert json.dumps(calm.as_json())


def test_an_island_with_more_chips_is_interrupted_more_often(calm):
    """An outage costs its time, the fetch of the parameters, and half a cycle."""
    found = planned(share=(1.0,), mtbi_years=0.01, return_minutes=30.0).run.goodput
    hours = {"big": 0.01 * 365.25 * 24 / 16, "small": 0.01 * 365.25 * 24 / 4}
    assert found.mean_hours_between == pytest.approx(hours)
    join_s = calm.islands["big"].network.join_seconds
    lost = dict.fromkeys(hours, 1800 + join_s + 10)
    assert found.lost_seconds == pytest.approx(lost)
    tokens = {"big": 16_000, "small": 4_000}
    kept = sum(n / (1 + lost[k] / 3600 / hours[k]) for k, n in tokens.items())
    assert found.goodput == pytest.approx(kept / 20_000)


def test_a_host_keeps_four_publishes_of_its_part_for_its_region(calm):
    assert calm.islands["big"].network.kept_bytes == 0
    plan = planned(CONFIG.replace(dict.fromkeys(REGIONS, "here")))
    largest = max(payload_bytes(CONFIG.run.sync.codec_down, fragments_of(CONFIG)))
    kept = {name: island.network.kept_bytes for name, island in plan.islands.items()}
    assert kept == {"big": 4 * math.ceil(largest / 4), "small": 4 * largest}
    assert repr(plan).startswith("<Plan of x.py on big, small: fits, refused: none; ex")


def test_takes_and_adoptions_hold_up_the_steps():
    """By their seconds at published rates, all pieces of a cycle."""
    cut = ExchangePlan(
        piece="layers/mlp/up/0", pieces=9, aligned=False, collectives={}, seconds=0.4
    )
    compiled = {
        name: plan_support.island(
            CONFIG.islands[name].topology, flops=flops, exchange=[cut]
        )
        for name, flops in FLOPS.items()
    }
    plan = planned(compiled=compiled)
    assert plan.islands["big"].exchange_seconds == pytest.approx(3.6)
    assert plan.run.cycle_seconds == pytest.approx(20.0 + 3.6)


def test_the_coordinator_holds_what_the_store_holds(calm):
    params, roomy = 4 * calm.run.params, calm.run.coordinator
    # This short run's outer optimizer has no momentum.
    assert roomy.outer_state < 1000
    heavy = coordinator(merge_buffer_bytes=1000)
    assert heavy.theta == heavy.anchors == params
    assert heavy.outer_state == pytest.approx(params, rel=0.01)
    assert heavy.merge_buffer == 1000 < roomy.merge_buffer
    up = sum(payload_bytes(CONFIG.run.sync.codec_up, fragments_of(CONFIG)))
    assert roomy.merge_buffer == DELTAS_AT_ONCE * len(CONFIG.islands) * up
    parts = dataclasses.asdict(heavy)
    fields = list(parts)
    assert heavy.memory == sum(parts[n] for n in fields[: fields.index("memory")])
    assert heavy.workers == ()
    # A slow disk may hold all of a kept cycle back.
    keeps = coordinator(merge_buffer_bytes=1000, export_every=10, exports_kept=3)
    assert (heavy.kept_cycle, keeps.kept_cycle) == (0, params)
    assert keeps.memory - heavy.memory == params
    assert keeps.disk.bytes - heavy.disk.bytes == keeps.disk.exports == 4 * params
    more = keeps.disk.bytes_per_s - heavy.disk.bytes_per_s
    assert more == pytest.approx(params / 200)
    # Twice as fast, twice the work.
    fast = coordinator(0.5, merge_buffer_bytes=1000)
    assert fast.wire_cores == pytest.approx(2 * heavy.wire_cores)


def test_each_worker_has_its_share_and_a_process():
    few = {"launch.coordinator_machine": "n2-standard-4"}
    alone, spread = (coordinator(5e-4, workers=n, **few) for n in (1, 2))
    params = sum(worker.params for worker in spread.workers)
    assert params == fragments_of(CONFIG).total
    assert sum(worker.fragments for worker in spread.workers) == 5
    own = sum(worker.memory for worker in spread.workers)
    assert own + PROCESS_BYTES == pytest.approx(spread.memory, abs=2)
    # Two merges and two snapshots at a time in place of one, and two processes more.
    more = alone.merging + alone.snapshots + 2 * PROCESS_BYTES
    assert spread.memory - alone.memory == more

    def busy_cores(plan):
        return plan.wire_cores + plan.merge_cores + plan.disk_cores

    busy = busy_cores(spread)
    # Workers digest anchors, too, that islands may be asked for.
    sha256 = 4 * params / 1e9 * CONSTANTS.sha256_core_seconds / 0.01
    assert busy - busy_cores(alone) == pytest.approx(sha256)
    assert sum(worker.cores for worker in spread.workers) == pytest.approx(busy)
    whole = sum(math.ceil(worker.cores) for worker in spread.workers)
    assert alone.cores == 1 + math.ceil(busy_cores(alone))
    assert spread.cores == 1 + whole
