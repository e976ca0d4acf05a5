"""The times and contents of an island's reports."""

from diloco_jax.protocol.island import reporting
from diloco_jax.protocol.island.reporting import Introduction, Reporting, Status, hello
from diloco_jax.protocol.messages import (
    MOST_POSITION,
    Measures,
    Outstanding,
    Record,
    Version,
)
from diloco_jax.wire import bulk


def records(*numbers):
    return tuple(Record(seq=n, kind="progress", step=0) for n in numbers)


def say(said, status, unsent, now):
    reports = said.reports(status, unsent)
    for report in reports:
        said.sent(report, now)
    return reports


AT_4 = Status(phase="training", steps=4, measures=Measures(median_step_seconds=0.5))


def test_the_first_report_of_a_connection_is_news():
    said = Reporting(6.0, 100.0)
    assert said.has_news(Status(), 0)
    assert said.news_due_at == 100.0


def test_news_are_phase_steps_and_records():
    said = Reporting(6.0, 0.0)
    say(said, AT_4, records(1), 0.0)
    assert not said.has_news(AT_4, 1)
    assert said.has_news(AT_4, 2)
    assert said.has_news(Status(phase="training", steps=5), 1)
    assert said.has_news(Status(phase="stopped", steps=4), 1)


def test_news_wait_for_the_interval_and_silence_for_a_sign_of_life():
    said = Reporting(6.0, 0.0)
    say(said, AT_4, (), 10.0)
    assert said.news_due_at == 10.0 + reporting.MIN_REPORT_INTERVAL_S
    assert said.alive_due_at == 16.0


def test_a_report_says_where_the_island_is():
    (report,) = Reporting(6.0, 0.0).reports(AT_4, records(3, 4))
    assert (report.phase, report.steps, report.step_seconds) == ("training", 4, 0.5)
    assert report.records == records(3, 4)
    assert report.measures is AT_4.measures


def test_many_records_go_in_several_reports(monkeypatch):
    monkeypatch.setattr(reporting, "MAX_RECORDS", 2)
    said = Reporting(6.0, 0.0)
    reports = say(said, AT_4, records(1, 2, 3), 0.0)
    assert [[r.seq for r in report.records] for report in reports] == [[1, 2], [3]]
    assert said.sent_through == 3
    assert [r.records for r in said.reports(AT_4, ())] == [()]


def test_what_was_not_sent_is_said_again():
    said = Reporting(6.0, 0.0)
    said.reports(AT_4, records(1))
    assert said.sent_through == 0
    assert said.has_news(AT_4, 1)


# ---- a hello says who an incarnation is, and where it is ----

WHO = Introduction(
    island="a",
    incarnation=3,
    session="s",
    fingerprint="f",
    tokens_per_step=64,
    sequences_per_step=4,
    lookahead=2,
    gives_at=("host:7079",),
    plan="p",
    run={"seed": 1},
    island_config={"batch_size": 4},
    environment={"jax": "0.1"},
)


def test_it_says_what_it_holds_and_what_is_acknowledged() -> None:
    status = Status(
        phase="training",
        steps=7,
        outstanding=(
            Outstanding(fragment=1, tick=9, start=3, end=7, base=Version(1, 2), seq=11),
        ),
        versions=(Version(1, 3),),
        measures=Measures(median_step_seconds=0.5),
        run_id="r",
        term=2,
        term_name="n",
        changes=(0.5,),
        sequences_granted=40,
        records_through=12,
        tokens=900,
        own_tokens=320,
        next_position=64,
    )
    said = hello(WHO, status)
    names = {*WHO.__struct_fields__, *status.__struct_fields__}
    for name in names - {"measures", "watches"}:
        theirs = WHO if name in WHO.__struct_fields__ else status
        assert getattr(said, name) == getattr(theirs, name)
    assert said.step_seconds == 0.5
    assert bulk.from_island(bulk.encode(said)) == said


def test_a_position_that_a_lie_put_far_away_keeps_no_island_out():
    far = Status(next_position=MOST_POSITION + 1000)
    said = bulk.from_island(bulk.encode(hello(WHO, far)))
    assert said.next_position == MOST_POSITION
