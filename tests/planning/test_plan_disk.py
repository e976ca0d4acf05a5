"""The disk that is planned is what snapshots, publishes and lines take."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import plan_support
import pytest
from etils import epath

from diloco_jax.checkpoint import whose
from diloco_jax.config import Placement
from diloco_jax.coordinator import journal, service, snapshots
from diloco_jax.coordinator.holding import inbox
from diloco_jax.coordinator.holding.fragment_snapshots import (
    SPARED_BYTES,
    FragmentSnapshots,
    Publishes,
)
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import RecordLog
from diloco_jax.coordinator.settings import payload_bytes, policy_config
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.hardware.machines import MeasuredValue, Measurements
from diloco_jax.models.build import build
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.planning import coordinator
from diloco_jax.planning.coordinator import plan_disk
from diloco_jax.planning.plan import fragments_of
from diloco_jax.planning.terms import terms_of
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.messages import Contribution, Record, Version

CONFIG = plan_support.CONFIG.replace(
    {"outer.optimizer": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.9}
)
RUN = CONFIG.run
PLAN = fragments_of(CONFIG)
FRAGMENTS = len(PLAN.fragments)
RATE = MeasuredValue(value=1e9, origin="a fast disk")


def terms(placement, cycle_s, cycles=1.0, islands=2, run=RUN):
    """Terms of a run of so many cycles."""
    (one, *_) = CONFIG.islands.values()
    named = {f"island-{number}": one for number in range(islands)}
    config = dataclasses.replace(CONFIG, islands=named, placement=placement, run=run)
    tokens = config.run.total_tokens * cycles / config.merges_per_fragment()
    config = config.replace("total_tokens", max(1, round(tokens)))
    steps = dict.fromkeys(named, cycle_s / run.sync.cycle)
    measured = Measurements(disk_write_bytes_per_s=RATE)
    return terms_of(config, PLAN, steps, measured=measured)


def planned(*given, **changes):
    return plan_disk(terms(*given, **changes))


class Clocked:
    """A coordinator's writing by a clock of its own: merges in turns, and snapshots as
    they fall due."""

    def __init__(self, folder, placement, monkeypatch):
        self.now, self.folder = 0.0, folder
        self.most = self.most_log = 0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(snapshots, "time", clock)
        policy = policy_config(RUN, placement, "r", PLAN.sizes)
        where, of_run = epath.Path(folder / "checkpoints"), whose(RUN, "r", PLAN)
        self.states = StateSnapshots(where, placement, policy, of_run)
        self.snapshots = FragmentSnapshots(where, placement, range(FRAGMENTS), of_run)
        model = build(RUN)
        self.store = Store(RUN, PLAN, model.init(jax.random.key(0)), 60.0)
        self.publishes = Publishes(folder / "publishes")
        self.log = RecordLog(folder / "log")
        self.state = initial(policy)
        for fragment in range(FRAGMENTS):
            current = self.store.current(fragment)
            self.snapshots.begin(fragment, *current, self.publishes)
        self.states.save(self.log.rotate(), self.state)
        self.payloads = payload_bytes(RUN.sync.codec_down, PLAN)
        for kind in (self.states, self.snapshots):
            kind._remove = functools.partial(self._look_and_remove, kind._remove)

    def _look_and_remove(self, remove, path):
        """The new snapshot lies beside the old one."""
        self.look()
        remove(path)

    def merge(self, fragment):
        version = self.store.versions()[fragment].next()
        self.store.load(fragment, self.store.arrays(fragment), version)
        payload = bytes(self.payloads[fragment])
        self.publishes.write(fragment, version, payload, final=False)

    def keep_house(self):
        self.states.write_due(self.now, self.state, self.log)
        assert self.states.writer.wait(lambda: 1e9)
        self.snapshots.write_due(self.now, self.store, self.publishes)
        assert self.snapshots.writer.wait(lambda: 1e9)

    def look(self):
        self.most = max(self.most, size_of(self.folder))
        self.most_log = max(self.most_log, size_of(self.folder / "publishes"))


def size_of(folder):
    files = folder.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


@pytest.mark.parametrize(
    "owner", [("coordinator",), ("lead",), ("worker", PLAN.total // 2, 3)]
)
@pytest.mark.parametrize("cycle_s", [0.01, 1.0, 1e7])
def test_the_least_that_a_disk_has_is_the_same_for_every_step(owner, cycle_s):
    placement = Placement(
        snapshots_kept=3, snapshot_every_s=60.0, merge_buffer_bytes=1000
    )
    one, other = (plan_disk(terms(placement, s), *owner) for s in (cycle_s, 60.0))
    assert one.least == other.least <= one.bytes
    # With a round of snapshots a cycle, and no time for reports, it is everything.
    slow = plan_disk(terms(placement, 60.0), *owner)
    reports = slow.lines - plan_disk(terms(placement, 1e-9), *owner).lines
    assert slow.least == pytest.approx(slow.bytes - reports, abs=FRAGMENTS)


@pytest.mark.parametrize(
    ("kept", "round_s", "cycle_s", "within"),
    [
        (2, 40.0, 10.0, 0.1),
        (3, 31.0, 9.0, 0.1),
        # Publishes are few here, and whole: one more or less counts.
        (2, 15.0, 14.0, 0.4),
        (2, 10.0, 24.0, 0.4),
    ],
)
def test_a_run_of_expected_course_holds_what_was_expected(
    kept, round_s, cycle_s, within, tmp_path, monkeypatch
):
    """The most that it holds is what was expected, and less than there is room for."""
    placement = Placement(snapshots_kept=kept, snapshot_every_s=round_s)
    run = Clocked(tmp_path, placement, monkeypatch)
    step = cycle_s / FRAGMENTS / 4
    for tick in range(round((2 + kept) * max(round_s, cycle_s) / step)):
        run.now = tick * step
        if tick % 4 == 0:
            run.merge(tick // 4 % FRAGMENTS)
        run.keep_house()
        run.look()
    run.log.close()
    plan = planned(placement, cycle_s)
    assert run.most == pytest.approx(plan.expected - plan.lines, rel=0.05)
    assert run.most_log == pytest.approx(plan.log, rel=within)
    assert run.most < plan.bytes


ISLAND = {"island": "v5p-a", "incarnation": 1}
CONTRIBUTION = Contribution(
    **ISLAND,
    tick=51_000,
    start=100_000,
    end=100_096,
    tokens=25_165_824,
    base=Version(1, 1000),
)
MEASURES = {
    "pairwise_cosine": 0.3353194659715229,
    "cosine_to_last": 0.7892327355368601,
    "length_ratio": 0.9998254292251044,
    "step_ratio": 0.9999999869346607,
}


def directions(islands):
    return (0.3353194659715229,) * islands if islands > 2 else ()


def fact_of(kind):
    """An island's line on the tape."""
    fact = Record(
        seq=300_000,
        kind=kind,
        step=100_096,
        fragment=47,
        tick=51_000,
        version=Version(1, 1001),
        start=100_000,
        value=250_000_000_000,
    )
    return records.Fact(**ISLAND, record=fact)


def lines_of_merge(islands):
    """The lines on the tape that one merge leaves, with its islands' facts."""
    common = {"fragment": 47, "version": Version(1, 1001)}
    yield records.Tick(
        tick=51_000, fragment=47, asked=("v5p-a",) * islands, final=False
    )
    for kind in ("took", "adopted"):
        yield from (fact_of(kind),) * islands
    yield records.Merged(
        **common,
        tick=51_000,
        final=False,
        contributions=(CONTRIBUTION,) * islands,
        share=1.0,
        verdicts={f"v5p-{i}": (51_000, "merged", "") for i in range(islands)},
        digest="94abd4745a2f4f5c39dcecc84a61994e",
        payload_bytes=250_000_000,
    )
    yield journal.Measured(**common, **MEASURES, directions=directions(islands))
    yield journal.Digested(**common, digest=f"xxh3-128:{16 * 'bf'}")


@pytest.mark.parametrize(("islands", "sources"), [(2, 0), (16, 0), (2, 12)])
def test_lines_take_the_bytes_that_the_product_writes(islands, sources, tmp_path):
    paths = tuple(f"/data/rows/source-{number:02}" for number in range(sources))
    data = dataclasses.replace(RUN.data, paths=paths, weights=(1.0,) * sources)
    by_source = dict.fromkeys(paths, 2.1481712758541107)
    tape, metrics = Tape(tmp_path / "tape.jsonl"), Metrics(tmp_path)
    merges, reports = 40, 30
    for _ in range(merges):
        for line in lines_of_merge(islands):
            tape.append(journal.dated(line))
        metrics.append(
            {
                **{"kind": "merge", "time": 1795590681.0450268, "fragment": 47},
                **{"version": 1001, "islands": ["v5p-a"] * islands},
                **{"tokens": 25_165_824 * islands, "share": 1.0},
                **{"norm": 0.035832011776876185, **MEASURES},
                "cosine_to_others": directions(islands) or None,
                **{"experts": None, "expert_loads": None},
                "seconds": 0.008956749000049058,
            }
        )
    cycles = merges / FRAGMENTS
    for _ in range(round(cycles * RUN.sync.cycle * islands)):
        tape.append(journal.dated(fact_of("progress")))
    for _ in range(reports * islands):
        metrics.append(
            {
                **{"kind": "island", "time": 1795590680.8126788, "island": "v5p-a"},
                **{"phase": "training", "step": 100_096, "loss": 2.1481712758541107},
                "loss_by_source": by_source or None,
                "adoption_loss": 0.0129465243812755,
                **{"eval_loss": None, "learning_rate": 0.0006012713003641744},
                "median_step_seconds": 0.4033285509999587,
                "stalled_seconds": 0.6065373460000956,
                **{"data_seconds": 0.0021348509999587, "skipped_steps": 0},
                **{"tokens_predicted": 1_048_576, "bytes_up": 10**13},
                **{"bytes_down": 10**13, "microseconds_up": 10**9},
                "transfers_failed": 0,
            }
        )
    tape.close()
    metrics.close()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    written = sum(file.stat().st_size for file in files)
    seconds = reports * coordinator.REPORTS_EVERY_S
    mixed = dataclasses.replace(RUN, data=data)
    plan = planned(Placement(), seconds / cycles, cycles, islands, mixed)
    assert plan.lines == pytest.approx(written, rel=0.08)
    assert coordinator.REPORTS_EVERY_S >= service.METRICS_EVERY_S


def test_deltas_wait_on_the_disk_only_where_memory_is_full():
    """Then the inbox leaves room for two snapshots of everything besides."""
    up = sum(payload_bytes(RUN.sync.codec_up, PLAN))
    most = 2 * 2 * up
    roomy = planned(Placement(merge_buffer_bytes=most), 10.0)
    assert (roomy.deltas, roomy.spared) == (0, SPARED_BYTES)
    tight = planned(Placement(merge_buffer_bytes=most - 1000), 10.0)
    assert tight.deltas == 1000
    spared = inbox.SPARED_BYTES_EACH * PLAN.total
    assert tight.spared == max(SPARED_BYTES, spared)
    assert tight.expected == roomy.expected
    assert tight.reserve == tight.late_log + 1000 + tight.spared
    assert tight.bytes == tight.expected + tight.reserve
