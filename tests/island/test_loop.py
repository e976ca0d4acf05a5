"""The loop on a tiny model, with the test in the network's place; its learning rate
follows the run."""

import dataclasses
import math

import coordinator_says as says
import jax
import numpy as np
import pytest
from loop_support import Network
from pieces import to_pieces
from tiny import MODEL
from tiny import SEQUENCE_LENGTH as LENGTH

from diloco_jax import config as configs
from diloco_jax.config import InnerConfig, RunConfig
from diloco_jax.config.resolving import LONG
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.data.corpus import ValidationWindows, Windows
from diloco_jax.data.loading import GlobalIndex
from diloco_jax.data.reader import BatchReader, LeasedStream, ValidationBatches
from diloco_jax.faults import parse_faults
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.exchange import Exchange, Replica
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.loop import Evaluator, Loop
from diloco_jax.island.mailbox import Arrival, LiveDecisions, Mailbox
from diloco_jax.island.timing import Pace, Timing, goal_of
from diloco_jax.protocol.island.boundary import Books, Boundary, Goal
from diloco_jax.protocol.messages import Span, Version

STEPS, BATCH = 12, 2
TEXT = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)


@pytest.fixture(scope="module")
def built():
    config = configs.Config(
        run=configs.RunConfig(
            model=MODEL,
            inner=configs.InnerConfig(
                rewarm_steps=4, schedule="constant", warmup_fraction=0
            ),
            sync=dataclasses.replace(
                LONG, fragments=2, codec_up="f32", codec_down="f32"
            ),
            sequence_length=LENGTH,
            total_tokens=STEPS * BATCH * LENGTH,
        ),
        islands={"a": configs.IslandConfig(batch_size=BATCH, step_seconds=1.0)},
        placement=configs.Placement(outage_budget_s=1.0),
    )
    model, trainer = build_trainer(config.run, config.islands["a"])
    params = trainer.place_params(jax.jit(model.init)(jax.random.key(0)))
    plan = plan_fragments(model.shapes(), model.axes, 2)
    return config, trainer, jax.device_get(params), plan


def reader() -> BatchReader:
    rows = GlobalIndex(Windows(TEXT, LENGTH), seed=0)
    return BatchReader(rows, Windows.fields, LENGTH)


@pytest.fixture
def loop(built):
    config, trainer, host_params, plan = built
    params = trainer.place_params(host_params)
    exchange = Exchange(plan, config.run.sync, params)
    for fragment, pieces in enumerate(plan.fragments):
        raw = b"".join(get_piece(host_params, p).tobytes() for p in pieces)
        exchange.start({fragment: exchange.put_anchor(fragment, raw)})
    replica = Replica(trainer, exchange, TrainState(params, trainer.init_inner(params)))
    mailbox = Mailbox()
    says.welcome(mailbox)
    network = Network(mailbox)
    network.exchange = exchange
    data = LeasedStream(reader(), BATCH)
    held_out = ValidationWindows(TEXT[:200], LENGTH)
    validation = ValidationBatches(held_out, BATCH, Windows.fields, LENGTH)
    goal = goal_of(config.run, BATCH)
    loop = Loop(
        config=config,
        name="a",
        replica=replica,
        boundary=Boundary(
            Books([Version()] * 2, ADOPT_RULES.find("rebase")),
            goal,
            arrays=replica,
            incoming=mailbox.arrivals,
            outgoing=network,
            data=data,
        ),
        data=data,
        mailbox=mailbox,
        decisions=LiveDecisions(mailbox, lambda: False, last_s=1.0),
        pace=Pace(config.run, goal),
        timing=Timing(0.0, network.clock),
        evaluator=Evaluator(trainer, validation, 4, 2),
        send_anchor=network.send_anchor,
        patience_s=config.placement.patience_s,
        clock=network.clock,
        sleep=network.sleep,
    )
    data.grant(Span(0, 1000))
    yield loop, network
    data.close()


def records(mailbox):
    return mailbox.report(sent_through=0)[1]


def verdict(*facts):
    return says.verdict(0, *facts)


def test_it_steps_to_the_end_and_leaves_when_the_run_is_finished(loop):
    loop, network = loop
    network.at = {STEPS: lambda: says.finished(network.mailbox)}
    ending = loop.run()
    assert ending == (0, "the run is over", "finished")
    status = network.mailbox.status()
    assert (status.phase, status.steps) == ("stopped", STEPS)
    measures = status.measures
    assert measures.steps == STEPS
    assert measures.median_step_seconds == measures.max_step_gap_seconds == 1.0
    assert measures.stalled_seconds == 0
    assert measures.learning_rate == pytest.approx(1e-3)
    assert 4 < measures.loss < 7
    assert 4 < measures.eval_loss < 7


@pytest.mark.parametrize(
    ("fault", "sleeps", "median_s", "data_s"),
    [("a@0:slow3", 1, 3.0, 0.0), ("a@0:starve0.5", 2, 1.5, 0.5)],
)
def test_a_step_that_is_slowed_is_told_from_a_batch_that_is_late(
    fault, sleeps, median_s, data_s, loop
):
    loop, network = loop
    loop.faults = parse_faults([fault], ["a"])
    network.at = {sleeps * STEPS: lambda: says.finished(network.mailbox)}
    loop.run()
    measures = network.mailbox.status().measures
    assert measures.median_step_seconds == pytest.approx(median_s)
    assert measures.data_seconds == pytest.approx(data_s * measures.steps)


@pytest.mark.parametrize(("lived_s", "told"), [(599.0, 0), (601.0, 1)])
def test_that_steps_have_lasted_is_told_once(loop, lived_s, told):
    loop, network = loop
    lasted = []
    loop.lasts = lambda: lasted.append(loop.done)

    def later():
        network.now += lived_s - (STEPS - 1)

    network.at = {3: later, STEPS: lambda: says.finished(network.mailbox)}
    loop.run()
    # It counts from the end of the first step.
    assert len(lasted) == told


def test_take_verdict_adoption(loop, built):
    loop, network = loop
    _, _, start, plan = built
    mailbox = network.mailbox
    codec, pieces = get_codec("f32"), plan.fragments[0]
    before = {}

    def publish():
        """Theta - delta, as with one island and outer learning rate 1."""
        _, _, encoded = network.sent[0]
        changes = [
            -np.asarray(codec.decode(e, p.shape))
            for e, p in zip(encoded, pieces, strict=True)
        ]
        raw = network.exchange.layouts_down[0].pack(
            [np.asarray(codec.encode(c)) for c in changes]
        )
        before.update(jax.device_get(to_pieces(plan, loop.replica.params)))
        mailbox.receive(verdict(1, "merged"))
        mailbox.deliver(
            Arrival(
                fragment=0,
                version=Version(1, 1),
                publishes=(network.exchange.put_publish(0, raw),),
            ),
            0,
        )
        # Its end as soon as it is adopted, to look at the parameters.
        mailbox.end(0, "seen")

    network.at = {3: lambda: says.take(mailbox, 0, 1), 5: publish}
    assert loop.run().text == "seen"
    (sent,) = network.sent
    assert sent[:2] == (0, 1)
    assert network.forgotten == [(0, 1)]
    after = jax.device_get(to_pieces(plan, loop.replica.params))
    for piece in plan.pieces:
        # The island's own delta came back: nothing moves but by rounding.
        np.testing.assert_allclose(
            after[piece.name], before[piece.name], rtol=0, atol=1e-6
        )
        assert np.abs(after[piece.name] - get_piece(start, piece)).max() > 1e-4
    kinds = [(r.kind, r.step, r.start) for r in records(mailbox)]
    assert kinds == [("took", 3, 0), ("adopted", 5, 0)]


def test_an_island_that_is_about_to_leave_makes_no_steps_but_takes(loop):
    loop, network = loop
    mailbox = network.mailbox
    saved = []

    class Checkpoints:
        def save(self, trees, **facts):
            saved.append(facts)
            says.take(mailbox, 1, 7)

    def put(fragment, tick, encoded):
        network.sent.append((fragment, tick))
        if tick == 7:
            mailbox.end(1, "preempted (SIGTERM)", "preempted")

    loop.checkpoints, network.put = Checkpoints(), put
    network.at = {3: lambda: (says.take(mailbox, 0, 1), mailbox.leave())}
    assert loop.run() == (1, "preempted (SIGTERM)", "preempted")
    assert (mailbox.status().phase, mailbox.status().steps) == ("stopped", 3)
    assert network.sent == [(0, 1), (1, 7)]
    first = saved[0]
    assert [record.tick for record in first["unheard"]] == [1]
    assert (first["steps"], first["final"]) == (3, True)
    assert first["outstanding"] == [0, 1], "all may be taken after it"


def test_an_anchor_that_is_asked_for_is_sent_at_the_next_boundary(loop):
    loop, network = loop
    network.at = {
        4: lambda: says.anchor(network.mailbox, 0),
        STEPS: lambda: says.finished(network.mailbox),
    }
    loop.run()
    assert network.anchors == [(0, Version(), 4)]


def test_without_data_it_ends_with_an_error(loop):
    loop, network = loop
    loop.data = LeasedStream(reader(), BATCH)
    loop.data.grant(Span(0, 3 * BATCH))

    def wait(timeout_s):
        network.now += 0.5

    loop.decisions.wait = wait
    ending = loop.run()
    loop.data.close()
    assert ending.exit_code == 1
    assert "no data was granted for 3 s at step 3" in ending.text


def test_stopped_it_still_answers_takes(loop):
    loop, network = loop
    mailbox = network.mailbox
    real = mailbox.wait

    def wait(timeout_s):
        if not network.sent:
            says.take(mailbox, 1, 9)
        else:
            says.finished(mailbox)
        real(timeout_s)

    mailbox.wait = wait
    network.at = {4: lambda: says.stop(mailbox)}
    loop.run()
    assert [(f, t) for f, t, _ in network.sent] == [(1, 9)]
    assert mailbox.status().steps == 4


def test_each_thing_that_is_waited_for_has_its_own_deadline(loop):
    """Else a Stop after a long outage finds all overdue, before the last merges."""
    loop, network = loop
    patience_s = 3 * loop.config.placement.outage_budget_s
    assert loop._overdue("no end was announced") is None
    network.now = 0.9 * patience_s
    assert loop._overdue("the run did not finish") is None
    network.now = 1.8 * patience_s
    assert loop._overdue("the run did not finish") is None
    network.now = 2 * patience_s
    assert loop._overdue("the run did not finish").exit_code == 1


def test_who_waits_for_the_end_gives_up_only_where_nobody_answers(loop):
    """The last merges of a large model take longer than any fixed time."""
    loop, network = loop
    mailbox = network.mailbox
    patience_s = 3 * loop.config.placement.outage_budget_s
    answers = 3
    waits = []

    def wait(timeout_s):
        waits.append(network.now)
        network.now += 0.9 * patience_s
        if len(waits) <= answers:
            says.progress(mailbox)

    mailbox.wait = wait
    network.at = {4: lambda: says.stop(mailbox)}
    ending = loop.run()
    assert ending.exit_code == 1
    assert "the run did not finish" in ending.text
    assert len(waits) == answers + 3


def test_steps_that_changed_nothing_are_counted_and_told(loop, caplog):
    loop, network = loop
    step = loop.replica.step

    def skipping(batch, rate):
        return {**step(batch, rate), "skipped": np.float32(network.steps in (3, 4, 7))}

    loop.replica.step = skipping
    network.at = {STEPS: lambda: says.finished(network.mailbox)}
    loop.run()
    measures = network.mailbox.status().measures
    assert (measures.steps, measures.skipped_steps) == (STEPS, 3)
    assert math.isnan(measures.loss), "whatever the loss of these steps was"
    # Metrics are read one step late, and it ended without a wait.
    assert measures.tokens_predicted == (STEPS - 1) * BATCH * LENGTH
    told = [r.getMessage()[:10] for r in caplog.records if "not finite" in r.message]
    assert told == ["1 of 4 ste", "2 of 5 ste"], "not again at every one"


def pace(**inner):
    inner = InnerConfig(learning_rate=1.0, warmup_fraction=0.0, **inner)
    goal = Goal(total_tokens=1000, tokens_per_step=10, steps_per_cycle=4)
    return Pace(RunConfig(inner=inner), goal)


def test_tokens_that_others_lost_do_not_bring_an_earlier_rate_back():
    run = pace(schedule="cosine", rewarm_steps=0)
    rates = [run.learning_rate(*at) for at in enumerate([300, 500, 100, 600])]
    assert rates[0] > rates[1] == rates[2] > rates[3]


def test_fresh_moments_get_the_whole_rate_after_so_many_steps():
    run = pace(schedule="constant", rewarm_steps=3)
    rates = [run.learning_rate(step, 0) for step in range(5)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
