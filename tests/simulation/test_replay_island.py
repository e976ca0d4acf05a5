"""A repeated incarnation sends the same bytes, whatever became of its takes."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from diloco_jax.config import Config, IslandConfig, ModelConfig, RunConfig, SyncConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import get_piece
from diloco_jax.data.batches import BatchReader, LeasedPositions
from diloco_jax.data.corpus import Windows
from diloco_jax.data.loading import GlobalIndex
from diloco_jax.island.device.build import build_exchange, build_trainer, join
from diloco_jax.island.mailbox import Arrival, Arrivals
from diloco_jax.island.pace import Pace, goal_of
from diloco_jax.models.build import build_plan
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.island.boundary import Adoption, Boundary, Decision
from diloco_jax.protocol.messages import TakeRequest, TakeVerdict
from diloco_jax.protocol.records import Merged
from diloco_jax.protocol.values import Record, Span, Version
from diloco_jax.simulation.replay.recording import (
    Life,
    RecordedMerge,
    Recording,
    Recovery,
    TapedRecord,
    Who,
)
from diloco_jax.simulation.replay.replay import ReplayedIsland, UsedVersions
from diloco_jax.simulation.replay.worker import Copies, pack, unpack

ISLAND = IslandConfig(batch_size=2)
RUN = RunConfig(
    model=ModelConfig(
        d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16
    ),
    sync=SyncConfig(fragments=2, adopt="keep"),
    sequence_length=16,
    total_tokens=100_000,
)
TEXT = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
ROWS = GlobalIndex(Windows(TEXT, RUN.sequence_length), seed=0)
READER = BatchReader(ROWS, ROWS.fields, RUN.sequence_length)
V = [Version(1, n) for n in range(9)]


class Publishes:
    """Random ones, instead of a coordinator's."""

    def __init__(self, run):
        self.model, self.trainer = build_trainer(run, ISLAND)
        self.plan = build_plan(run, self.model)
        self.exchange, _ = build_exchange(run, self.model, self.trainer)
        self.params = jax.device_get(jax.jit(self.model.init)(jax.random.key(0)))

    def anchor(self, fragment, version):
        if version > V[0]:
            raise KeyError(version)
        pieces = self.plan.fragments[fragment]
        return b"".join(get_piece(self.params, p).tobytes() for p in pieces)

    def chain(self, fragment, have, want):
        return [self.publish(fragment, n) for n in range(have.number + 1, want[1] + 1)]

    def publish(self, fragment, number):
        random = np.random.default_rng((fragment, number))
        codec = get_codec("int8")
        pieces = self.plan.fragments[fragment]
        changes = [random.normal(size=p.shape).astype(np.float32) / 99 for p in pieces]
        layout = self.exchange.layouts_down[fragment]
        return bytes(layout.pack([codec.encode(change) for change in changes]))


class Lived:
    """One incarnation as it was: its records, and what it sent."""

    def __init__(self, run):
        self.published = published = Publishes(run)
        anchors = {
            f: published.exchange.put_anchor(f, published.anchor(f, V[0]))
            for f in range(2)
        }
        self.replica = join(
            published.plan, published.trainer, published.exchange, anchors
        )
        self.books = Books([V[0]] * 2, ADOPT_RULES.find(run.sync.adopt))
        self.books.begin()
        self.positions, self.sent, self.steps = LeasedPositions(), {}, 0
        self.arrivals = Arrivals()
        goal = goal_of(run, ISLAND.batch_size)
        self.boundary = Boundary(
            self.books,
            goal,
            arrays=self.replica,
            incoming=self.arrivals,
            outgoing=self,
            data=self.positions,
        )
        self.pace = Pace(run, goal)
        self.others = 0

    def put(self, fragment, tick, encoded):
        layout = self.published.exchange.layouts_up[fragment]
        arrays = [np.asarray(a) for a in encoded]
        self.sent[fragment, tick] = bytes(layout.pack(arrays))

    def forget(self, fragment, tick):
        """Kept, to compare."""

    def train(self, steps):
        for _ in range(steps):
            batch = READER.batch(self.positions.draw(ISLAND.batch_size))
            rate = self.pace.learning_rate(self.steps, self.boundary.others_tokens)
            self.books.stepped(rate)
            self.replica.step(batch, rate)
            self.steps += 1

    def act(self, others=None, takes=None, arrivals=(), **decided):
        self.others = self.others if others is None else others
        for arrival in arrivals:
            self.arrivals.put(arrival)
        decision = Decision(
            takes=tuple(
                TakeRequest(fragment=fragment, tick=tick)
                for fragment, tick in (takes or {}).items()
            ),
            adoptions=tuple(Adoption(a.fragment, a.version) for a in arrivals),
            others_tokens=self.others,
            **decided,
        )
        self.boundary.act(decision, self.steps)

    def arrival(self, fragment, version):
        payloads = self.published.chain(fragment, self.books.version(fragment), version)
        put = self.published.exchange.put_publish
        publishes = tuple(put(fragment, payload) for payload in payloads)
        return Arrival(fragment=fragment, version=version, publishes=publishes)

    def life(self):
        return Life(
            who=Who("a", 1),
            config=dataclasses.replace(ISLAND, step_seconds=0.3),
            environment={},
            total_tokens=RUN.total_tokens,
            records=[
                TapedRecord(n, record) for n, record in enumerate(self.records, start=1)
            ],
        )


class Here:
    """A worker that is this process; calls and answers go through bytes."""

    def __init__(self, run):
        self._copies = Copies(run)

    def ask(self, *call):
        who, method, *arguments = unpack(pack(call))
        return unpack(pack(self._copies.carry_out(Who(*who), method, arguments)))

    send = ask


def judged(fragment, tick, verdict, reason="", version=V[0]):
    return TakeVerdict(
        fragment=fragment, tick=tick, verdict=verdict, reason=reason, version=version
    )


@functools.cache
def live(run):
    """Takes that are merged, reopened, dropped and reset; adoptions in chains, and two
    beside pending takes, of which one becomes too old; changes of progress; a grant in
    the middle."""
    lived = Lived(run)
    lived.act(grants=(Span(0, 9),))
    lived.train(3)
    lived.act(takes={0: 1, 1: 2})
    lived.train(1)
    lived.act(others=3000, verdicts=(judged(1, 2, "refused", "stale"),))
    lived.act(grants=(Span(50, 99),))
    lived.train(2)
    arrivals = (lived.arrival(0, V[2]), lived.arrival(1, V[1]))
    lived.act(verdicts=(judged(0, 1, "merged"),), arrivals=arrivals)
    lived.act(takes={0: 3, 1: 4})
    lived.train(1)
    lived.act(arrivals=(lived.arrival(0, V[3]),), others=70_000)
    lived.act(verdicts=(judged(0, 3, "refused", "stale"),))
    lived.act(verdicts=(judged(1, 4, "refused", "non_finite"),))
    lived.train(2)
    lived.act(takes={0: 7, 1: 8})
    lived.train(1)
    pending = judged(0, 7, "pending", version=V[4])
    too_late = judged(1, 8, "pending", version=V[2])
    arrivals = (lived.arrival(0, V[4]), lived.arrival(1, V[2]))
    lived.act(verdicts=(pending, too_late), arrivals=arrivals)
    lived.train(1)
    merged = judged(0, 7, "merged", version=V[5])
    stale = judged(1, 8, "refused", "stale", version=V[3])
    arrivals = (lived.arrival(0, V[5]), lived.arrival(1, V[3]))
    lived.act(verdicts=(merged, stale), arrivals=arrivals)
    lived.train(1)
    lived.act(takes={0: 5, 1: 6})
    lived.records = lived.books.drain()
    return lived


OTHERS = [
    dataclasses.replace(RUN, sync=dataclasses.replace(RUN.sync, adopt=rule))
    for rule in ("rebase", "overwrite")
]
here = functools.cache(Here)


def repeated(life, run):
    return ReplayedIsland(life, run, READER, live(run).published, here(run))


@pytest.mark.parametrize("run", [RUN, *OTHERS], ids=lambda run: run.sync.adopt)
def test_every_delta_has_the_same_bytes(run):
    lived = live(run)
    life = lived.life()
    kinds = [w.record.kind for w in life.records]
    assert {"reopened", "dropped", "reset", "progress"} < set(kinds)
    kept = [w.record.tick for w in life.records if w.record.kind == "adopted"][2:]
    assert [tick for tick in kept if tick >= 0] == [7, 8] * (run is RUN)
    island = repeated(life, run)
    assert island.delta(0, 1).tobytes() == lived.sent[0, 1]
    assert island.steps == 3, "no further than was asked for"
    island.merged(0, 1)
    assert island.delta(0, 7).tobytes() == lived.sent[0, 7]
    island.merged(0, 7)
    assert island.steps < lived.steps - 1, "before it adopts beside it"
    for take in [(0, 5), (1, 6)]:
        assert island.delta(*take).tobytes() == lived.sent[take], take
    assert island.steps == lived.steps


FIRST_GRANT, SECOND_TAKE = 2, 3


@pytest.mark.parametrize(
    ("number", "change", "bad"),
    [
        (FIRST_GRANT, {"stop": 5}, "line 4: .*step 2 without data.* 5 sequences"),
        (SECOND_TAKE, {"start": 1}, "line 4: .*start=1.*start=0"),
        (SECOND_TAKE, {"version": V[1]}, "line 4: .*number=1.*number=0"),
        (0, {"version": V[1]}, r"line 1: .*version \(1, 1\) of fragment 0 before"),
    ],
)
def test_a_record_that_does_not_fit_is_named(number, change, bad):
    life = live(RUN).life()
    line, record = life.records[number]
    life.records[number] = TapedRecord(line, replace(record, **change))
    with pytest.raises(TapeError, match=bad):
        repeated(life, RUN).delta(0, 1)


def life(name, *adopted):
    records = [
        Record(seq=n, kind="adopted", step=n - 1, fragment=0, version=version)
        for n, version in enumerate(adopted, start=1)
    ]
    return dataclasses.replace(
        live(RUN).life(),
        who=Who(name, 1),
        records=[TapedRecord(record.seq, record) for record in records],
    )


def anchor(number):
    return (np.full(2, number, np.float32), np.full(1, number, np.float32))


def made(number):
    return Merged(
        fragment=0,
        version=V[number],
        tick=number,
        final=False,
        contributions=(),
        share=1.0,
        verdicts={},
        digest="",
        payload_bytes=0,
    )


def test_each_use_on_the_tape_is_served_once():
    """One fragment, four versions; one island begins with the first and adopts the
    others, one begins with the third; a coordinator came back with the second."""
    lives = [life("a", V[0], V[1], V[3]), life("b", V[2])]
    recording = Recording(
        workdir=Path(),
        config=Config(),
        plan_digest="",
        coordinators=(),
        merges=tuple(RecordedMerge(n, n, made(n)) for n in (1, 2, 3)),
        merges_on_tape=3,
        between=(Recovery(1, (V[0],)),),
        lives={life.who: life for life in lives},
    )
    used = UsedVersions(recording)
    for n in range(4):
        used.keep(("anchor", 0, V[n]), anchor(n))
        used.keep(("publish", 0, V[n]), b"%d" % n)
        used.keep(("snapshot", 0, V[n]), n)
    for version in (V[1], V[3]):
        with pytest.raises(KeyError):
            used.anchor(0, version)
    assert used.anchor(0, V[0]) == np.zeros(3, np.float32).tobytes()
    assert used.anchor(0, V[2]) == np.full(3, 2, np.float32).tobytes()
    assert used.take(("snapshot", 0, V[0])) == 0
    assert used.take(("publish", 0, V[1])) == b"1"
    assert used.chain(0, V[0], V[1]) == [b"1"]
    assert used.chain(0, V[1], V[3]) == [b"2", b"3"]
    for version in V[:4]:
        for kind in ("anchor", "publish", "snapshot"):
            with pytest.raises(KeyError):
                used.take((kind, 0, version))
