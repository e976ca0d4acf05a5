"""What a rehearsal says before it starts, how it judges records, and what it does with
an engine in the cloud, against fake commands."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.resolving import resolve_open
from diloco_jax.files import write_json
from diloco_jax.hardware.machines import MeasuredValue, Measurements
from diloco_jax.launch import command, findings, rehearse
from diloco_jax.launch.command import LaunchOptions
from diloco_jax.launch.command import run as launch
from diloco_jax.launch.findings import NOT_TRIED, Comparison
from diloco_jax.launch.rehearse import RehearseOptions
from diloco_jax.launch.submit import CommandError, Submitter
from diloco_jax.observability.tape import JsonLines, Tape
from diloco_jax.planning.plan import FirstStart

STEP_S, SECONDS, MB = 0.5, 20, 1e6
NAMES = ("a", "b", "c")
PLANNED = resolve_open(
    Config(islands={name: IslandConfig(step_seconds=STEP_S) for name in NAMES})
).validate()
HELD = MeasuredValue(value=16e9, origin="planned")
ASSUMED = Measurements(
    device_memory_bytes=dict.fromkeys(NAMES, HELD),
    disk_write_bytes_per_s=MeasuredValue(value=50 * MB, origin="planned"),
)
TRIAL = {
    "loss": 5.5,
    "gradient_length": 1.7,
    "memory_bytes": 4e9,
    "memory_limit_bytes": 16e9,
    "join_bytes": 40 * MB,
    "join_seconds": 4.0,
    "round_trip_seconds": 0.02,
}
BOOKS = {
    "tokens_computed": 100,
    "tokens_merged": 80,
    "tokens_lost": {"died": 15},
    "tokens_carried": 0,
    "tokens_in_flight": 5,
}


def recorded(
    folder: Path,
    of_a: dict[str, float] | None = None,
    trial_of_a: dict[str, float] | None = None,
    *,
    disk: float = 60 * MB,
    books: dict[str, Any] | None = None,
    returns: bool = True,
) -> list[dict[str, Any]]:
    """Write the records of a rehearsed run; return what was struck. of_a, trial_of_a:
    what differs on island a, by step and at its start."""
    tape, metrics = Tape(folder / run_files.TAPE), JsonLines(folder / run_files.METRICS)
    for name in NAMES:
        who = {"island": name, "incarnation": 1}
        here = {"platform": "cpu", "device_kind": "cpu", "devices": 1}
        tape.append({"kind": "hello", "time": 1.0, **who, "environment": here})
        tape.append({"kind": "joined", "time": 1.0, **who, "tokens_per_step": 8})
    for second in range(SECONDS):
        for name in NAMES:
            step = {"time": STEP_S, "stalled_seconds": 0.01, "data_seconds": 0.001}
            step |= {"bytes_up": MB, "microseconds_up": 1e6, "transfers_failed": 0}
            own = step | (of_a or {} if name == "a" else {})
            line = {key: value * second for key, value in own.items()}
            line |= {"kind": "island", "island": name, "phase": "training"}
            line |= {"step": second + 1, "time": 10.0 + line["time"], "loss": 2.0}
            line |= {"median_step_seconds": own["time"], "learning_rate": 0.1}
            line["trial"] = TRIAL | (trial_of_a or {} if name == "a" else {})
            metrics.append(line)
    struck = [
        {"time": t, "who": (who,), "kind": "kill", "seconds": 0.0, "missed": []}
        for t, who in ((100.0, "b"), (150.0, "coordinator"))
    ]
    if returns:
        part = {"island": "b", "incarnation": 2, "tokens": 1}
        merged = {"kind": "merged", "fragment": 0, "version": [1, 1], "final": False}
        merged |= {"contributions": [part], "share": 1.0, "digest": ""}
        who = {"island": "b", "incarnation": 2, "tokens_per_step": 8}
        tape.append({"kind": "joined", "time": 105.0, **who})
        tape.append({**merged, "time": 108.0})
        tape.append({"kind": "recovered", "time": 156.0})
        tape.append({**merged, "time": 157.0})
    tape.close()
    metrics.close()
    rate = {"value": disk, "origin": "run"}
    write_json({"disk_write_bytes_per_s": rate}, folder / run_files.MEASURED)
    whole = {**BOOKS, **(books or {})}
    write_json(
        {"phase": "stopped", **whole, "islands": dict.fromkeys(NAMES, BOOKS)},
        folder / run_files.SUMMARY,
    )
    return struck


def judge(folder: Path, struck: list[dict[str, Any]]) -> Comparison:
    return Comparison(folder, PLANNED, None, ASSUMED, 0.008, struck, "test")


def blamed(judged: Comparison) -> set[tuple[str, str]]:
    return {(r.cause, r.island) for r in judged.findings() if r.deviates}


CASES: dict[str, tuple[dict[str, Any], set[tuple[str, str]]]] = {
    "nothing": ({}, set()),
    "slow steps": ({"of_a": {"time": 2.0}}, {("step", "a")}),
    "slow data": (
        {"of_a": {"time": 0.8, "stalled_seconds": 0.31, "data_seconds": 0.3}},
        {("data", "a")},
    ),
    "less memory": ({"trial_of_a": {"memory_limit_bytes": 8e9}}, {("memory", "a")}),
    "a full memory": ({"trial_of_a": {"memory_bytes": 17e9}}, {("memory", "a")}),
    "a slow link down": ({"trial_of_a": {"join_seconds": 80.0}}, {("link", "a")}),
    "a slow link up": ({"of_a": {"microseconds_up": 4e6}}, {("link", "a")}),
    "a far link": (
        {
            "trial_of_a": {"round_trip_seconds": 0.5, "join_seconds": 4.5},
            "of_a": {"microseconds_up": 1.5e6},
        },
        {("latency", "a")},
    ),
    "a bad link": ({"of_a": {"transfers_failed": 1}}, {("loss", "a")}),
    "another loss": ({"trial_of_a": {"loss": 5.6}}, {("arithmetic", "a")}),
    "a loss that rounds": ({"trial_of_a": {"loss": 5.501}}, set()),
    "a slow disk": ({"disk": 4 * MB}, {("disk", "")}),
    "wrong books": ({"books": {"tokens_merged": 81}}, {("books", "")}),
    "no return": ({"returns": False}, {("return", ""), ("restart", "")}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_deviation_has_its_cause_alone(name, tmp_path):
    given, causes = CASES[name]
    assert blamed(judge(tmp_path, recorded(tmp_path, **given))) == causes


def test_a_loss_that_is_not_finite_is_wrong(tmp_path):
    struck = recorded(tmp_path)
    judged = judge(tmp_path, struck)
    del judged._trials["a"]["loss"]
    assert blamed(judged) == {("arithmetic", "a")}


def test_the_plan_gets_what_was_measured(tmp_path):
    struck = recorded(tmp_path, {"time": 2.0}, {"join_seconds": 80.0}, disk=4 * MB)
    judged = judge(tmp_path, struck)
    judged.findings()
    found = judged.measurements()
    origins = {value.origin for _, value in found.values()}
    assert origins == {"test, islands on CPUs", "run, islands on CPUs"}
    assert found.step_seconds["a"].value == 2.0
    assert found.link_down_gbit_per_s.value == pytest.approx(0.004, rel=0.01)
    assert found.disk_write_bytes_per_s.value == 4 * MB
    assert found.restart_seconds.value == 6.0
    assert found.device_memory_bytes["b"].value == 16e9


def test_the_quiet_time_ends_where_an_island_came_back():
    """Nobody knows of kills where records are read alone."""
    line = {"island": "a", "kind": "island", "phase": "training", "stalled_seconds": 0}
    times = [(1, 1.0), (2, 2.0), (3, 3.0), (1, 60.0), (9, 70.0)]
    own = {"a": [{**line, "step": step, "time": time} for step, time in times]}
    assert findings._quiet(own)["a"].per_step("time") == 1.0


def test_the_memory_of_a_cpu_is_not_that_of_a_slice(tmp_path):
    recorded(tmp_path)
    judged = judge(tmp_path, [])
    judged._config = PLANNED.replace("islands.a.topology", "v6e:1x1")
    assert judged.measurements().device_memory_bytes.keys() == {"b", "c"}


def test_what_was_not_tried_says_so(tmp_path):
    recorded(tmp_path)
    (tmp_path / run_files.METRICS).unlink()
    rows = judge(tmp_path, []).findings()
    kinds = {row.cause for row in rows if row.measured == NOT_TRIED}
    assert {"step", "link", "latency", "memory", "return", "restart"} <= kinds
    assert not any(row.deviates for row in rows)


@pytest.mark.parametrize(
    ("given", "limit_s", "said"),
    [
        ({}, 600.0, "nothing is paid; it ends after 10 minutes"),
        ({"on": "gke"}, 600.0, "unknown, give --price"),
        ({"on": "gke", "price": "v6e=3,v5p=3,coordinator=0"}, 600.0, "at most 12.00"),
        (
            {"on": "gke", "price": "v6e=3,v5p=3,coordinator=0", "max_price": 6.0},
            300.0,
            "at most 6.00 by then; it ends after 5 minutes; what deletes",
        ),
    ],
)
def test_it_says_what_it_will_cost(config, given, limit_s, said):
    options = RehearseOptions(max_minutes=10.0, **given)
    assert rehearse._stop_loss(config, options)[0] == pytest.approx(limit_s)
    assert said in rehearse._stop_loss(config, options)[1]


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        (
            {"max_price": 6.0},  # 5 minutes of 72 an hour.
            r"after 5 minutes by .*--max-price 6, and needs at least 21 minutes, "
            r"25.20, .* 600 s .* give at least --max-price 25.20$",
        ),
        (
            {"max_minutes": 20.0},
            "after 20 minutes by .* give at least --max-minutes 21$",
        ),
        (
            {"max_minutes": 20.0, "max_price": 6.0},
            "give at least --max-price 25.20 and --max-minutes 21$",
        ),
    ],
)
def test_a_stop_loss_below_the_first_start_is_refused(
    config, cloud, monkeypatch, stops, said
):
    """Drawn, written, fetched and compiled in 1215 s; the coordinator is back in 15."""
    first = FirstStart(
        draw_seconds=600.0, write_seconds=400.0, fetch_seconds=200.0, compile_seconds=15
    )
    back = Measurements(restart_seconds=MeasuredValue(value=15.0, origin="here"))
    plan = SimpleNamespace(run=SimpleNamespace(first_start=first, measured=back))
    monkeypatch.setattr(rehearse, "_planned", lambda *_: plan)
    prices = {"on": "gke", "yes": True, "price": "v6e=3,v5p=3,coordinator=0"}
    with pytest.raises(ConfigError, match=said):
        rehearsed(config, RehearseOptions(**prices, **stops))
    assert not cloud.calls
    assert not Path(config.placement.workdir).exists()
    enough = RehearseOptions(**prices, max_minutes=21.0, max_price=25.2)
    limit_s, _, each_s = rehearse._stop_loss(config, enough)
    needs = rehearse._least(plan, enough, limit_s, each_s)
    assert needs == "needs at least 21 minutes, 25.20"


def rehearsed(config, options) -> tuple[int, str]:
    shown = Console(file=io.StringIO(), width=400)
    code = rehearse.run(config, "two.py", options, shown)
    return code, (Path(config.placement.workdir) / rehearse.PAGE).read_text()


def test_tpu_vms_get_lines_to_type(config, cloud):
    config = config.replace("launch.max_hours", 3.0)
    code, page = rehearsed(config, RehearseOptions(on="tpu_vm", max_minutes=40))
    assert code == 1
    workdir = config.placement.workdir
    named = f"two.py --launch.name two-rehearsal --workdir {workdir} --on tpu_vm"
    (lines,) = re.findall(r"^```bash\n(.*?)\n```$", page, re.M | re.S)
    launch, *others, delete = lines.splitlines()
    assert launch == f"diloco launch {named} --rehearse --launch.max-hours=0.666"
    assert delete == f"diloco launch {named} --action delete"
    typed = [line.split()[0] for line in others if line[0] != "#"]
    assert typed == ["gcloud", "gcloud", "gcloud", "tar", "diloco"]
    assert "ssh two-rehearsal-coordinator --zone=us-east5-a" in lines
    assert page.count("docker kill") == 2
    assert "a kill, and a return | merged again | not tried | nothing |" in page
    assert "What is left: nobody can know" in page
    assert not cloud.things, "nothing was bought"


@pytest.fixture
def over(monkeypatch):
    """The time is over at the first look at the run."""
    look = rehearse.Launched.status

    def last_look(launched):
        launched.until = 0.0
        return look(launched)

    monkeypatch.setattr(rehearse.Launched, "status", last_look)


@pytest.fixture
def failing(monkeypatch):
    """`failing("delete", error, 2)`: so many of these actions fail."""

    def fail(action, error, times):
        act, failed = command._act, []

        def act_or_fail(submitter, options):
            if options.action == action and len(failed) < times:
                failed.append(options)
                raise error
            act(submitter, options)

        monkeypatch.setattr(command, "_act", act_or_fail)
        return failed

    return fail


def test_a_launch_is_made_under_another_name_and_deleted(config, cloud, over):
    options = RehearseOptions(on="gke", yes=True)
    code, page = rehearsed(config, options)
    assert code == 1
    assert "its time was over" in page
    lines = [" ".join(call) for call in cloud.calls]
    made = [line for line in lines if "node-pools create" in line]
    assert len(made) == 3
    assert all("two-rehearsal-" in line for line in made)
    assert "What is left: nothing, by the engine's list" in page


def test_a_coordinator_out_of_reach_is_told_at_once_and_awaited_for_a_while(
    config, cloud, monkeypatch
):
    monkeypatch.setattr(rehearse.Launched, "look_s", 0.01)
    monkeypatch.setattr(rehearse, "REACH_S", 0.1)
    cloud.fail("kubectl exec", 1, "no route to two-coordinator")
    shown = Console(file=io.StringIO(), width=1000)
    options = RehearseOptions(on="gke", yes=True)
    assert rehearse.run(config, "two.py", options, shown) == 1
    told = shown.file.getvalue().partition("does not answer")[2]
    assert "no route to two-coordinator" in told
    page = (Path(config.placement.workdir) / rehearse.PAGE).read_text()
    assert re.search("no coordinator answered for .*no route to", page, re.DOTALL)
    assert "What is left: nothing, by the engine's list" in page


class Clocked:
    """An engine, and its clock. Nobody answers before `first_s`, nor after `last_s`."""

    look_s, until, unheard = 15.0, 1e6, ""

    def __init__(self, first_s: float, last_s: float) -> None:
        self.first_s, self.last_s, self.now_s = first_s, last_s, 0.0

    def status(self) -> dict[str, Any]:
        heard = self.first_s <= self.now_s <= self.last_s
        self.unheard = "" if heard else "no route"
        return {"islands": {"a": {}}} if heard else {}

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("first_start", "first_s", "given_up_s"),
    [
        ((670.0, 500.0), 2055.0, None),
        ((670.0, 500.0), 2085.0, 2070.0),
        ((0.0, 0.0), 915.0, 900.0),
        (None, 1e5, None),  # There is no plan, so nobody knows.
    ],
)
def test_a_coordinator_is_awaited_for_as_long_as_it_draws_and_writes(
    first_start, first_s, given_up_s, monkeypatch
):
    plan = None
    if first_start:
        drawn, written = first_start
        first = SimpleNamespace(draw_seconds=drawn, write_seconds=written)
        plan = SimpleNamespace(run=SimpleNamespace(first_start=first))
    engine = Clocked(first_s, last_s=first_s + 60)
    monkeypatch.setattr(rehearse, "time", engine)
    drive = rehearse.Drive(engine, PLANNED, Console(file=io.StringIO()), plan)
    silent = pytest.raises(rehearse.RehearsalOverError, match=r"no coordinator .*route")
    if given_up_s is None:
        drive._wait(lambda _: True)
        engine.last_s = engine.now_s - 1  # It does not answer again.
        assert engine.now_s == pytest.approx(first_s, abs=engine.look_s)
        given_up_s = engine.last_s + rehearse.REACH_S  # Once it was heard.
    with silent:
        drive._wait(lambda _: False)
    assert engine.now_s == pytest.approx(given_up_s, abs=engine.look_s)


@pytest.mark.parametrize("late", ["node-pools create", "kubectl delete"])
def test_the_stop_loss_ends_what_makes_and_stops_and_nothing_that_deletes(
    config, cloud, monkeypatch, late
):
    """A command that goes on for too long, during a creation or a kill."""
    call, deadlines = cloud.call, []

    def slow(arguments, **given):
        deadlines.append(given["timeout"])
        if late in (line := " ".join(arguments)) and given["timeout"] < 60:
            raise subprocess.TimeoutExpired(line, given["timeout"])
        return call(arguments, **given)

    monkeypatch.setattr("diloco_jax.launch.submit.subprocess.run", slow)
    monkeypatch.setattr(rehearse.Launched, "look_s", 0.01)
    monkeypatch.setattr(rehearse, "QUIET_S", 0.0)
    training = {"state": "training", "steps": 10**6, "incarnation": 1}
    status = {"islands": dict.fromkeys(config.islands, training), "merges": 1}
    monkeypatch.setattr(Submitter, "status", lambda _: status)
    monkeypatch.setattr(rehearse, "QUIET_CYCLES", 0)
    code, page = rehearsed(config, RehearseOptions(on="gke", yes=True, max_minutes=0.9))
    assert code == 1
    assert (
        f"`diloco launch --action {'create' if 'create' in late else 'stop'}`" in page
    )
    assert "What is left: nothing, by the engine's list" in page
    assert max(deadlines) > 60


def test_what_is_there_already_is_neither_taken_nor_deleted(config, cloud):
    there = config.replace("launch.name", "two-rehearsal")
    options = LaunchOptions(on="gke", yes=True, unplanned=True)
    assert launch(there, "two.py", options) == 0
    own = config.replace("placement.workdir", f"{config.placement.workdir}-b")
    things = set(cloud.things)
    with pytest.raises(ConfigError, match=r"goes on, or has left.*--action delete"):
        rehearsed(own, RehearseOptions(on="gke", yes=True))
    assert set(cloud.things) == things


def test_without_a_yes_it_ends_at_once(config, cloud, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    code, page = rehearsed(config, RehearseOptions(on="gke"))
    assert code == 1
    assert "nobody said yes" in page
    assert "What is left: nothing, since nothing was made" in page
    assert not cloud.calls


@pytest.mark.parametrize("closed", [None, io.StringIO("y\n")])
def test_where_nobody_can_be_asked_nothing_is_done(config, cloud, monkeypatch, closed):
    monkeypatch.setattr("sys.stdin", closed)
    with pytest.raises(ConfigError, match="no terminal to ask on; give --yes"):
        rehearsed(config, RehearseOptions(on="gke"))
    assert not cloud.calls
    assert not Path(config.placement.workdir).exists()


@pytest.mark.parametrize("error", [KeyError("islands"), KeyboardInterrupt()])
def test_what_was_bought_is_given_back_whatever_happens(
    error, config, cloud, failing, monkeypatch
):
    """A deletion is broken off, too: by a second Ctrl-C, or a lost connection."""

    def fail(_):
        raise error

    broken = failing("delete", KeyboardInterrupt(), 1)
    monkeypatch.setattr(rehearse, "PAUSES_S", (0.0,))
    monkeypatch.setattr(rehearse.Launched, "status", fail)
    with contextlib.suppress(KeyError):
        _, page = rehearsed(config, RehearseOptions(on="gke", yes=True))
        assert "What is left: nothing, by the engine's list" in page
    assert broken
    assert not [thing for thing in cloud.things if "two-rehearsal" in str(thing)]


def test_a_deletion_is_tried_again_until_the_creation_in_the_cloud_is_over(
    config, cloud, over, failing, monkeypatch, caplog
):
    busy = CommandError("the cluster runs an operation; please try again")
    failing("delete", busy, 2)
    pauses = []
    clock = SimpleNamespace(**{n: getattr(time, n) for n in ("monotonic", "strftime")})
    clock.sleep = pauses.append
    monkeypatch.setattr(rehearse, "time", clock)
    _, page = rehearsed(config, RehearseOptions(on="gke", yes=True))
    assert pauses == list(rehearse.PAUSES_S[:2])
    assert "a creation that was broken off, is awaited; the next" in caplog.text
    assert "What is left: nothing, by the engine's list" in page


def test_a_cell_of_the_page_may_have_a_pipe():
    row = findings.Tried("step", "step", follows="type `a | b`")
    assert r"| type `a \| b` |" in findings.as_markdown([row])


def test_records_that_were_not_copied_stay_on_the_disk(
    config, cloud, over, failing, monkeypatch
):
    failing("results", CommandError("the connection was lost"), 1)
    monkeypatch.setattr(
        Submitter, "status", lambda _: {"phase": "running", "islands": {}}
    )
    options = RehearseOptions(on="gke", yes=True)
    code, page = rehearsed(config, options)
    assert code == 1
    assert re.search(r"What is left: .*persistentvolumeclaim.*--disk` deletes it", page)


def test_the_run_that_matters_keeps_its_checkpoints_and_its_workdir(config, cloud):
    own = config.replace("placement.checkpoints", "gs://mine/run")
    ours = rehearse._rehearsed(own, None, "two.py", 60.0, "w")
    assert ours.placement.checkpoints.startswith("gs://mine/run/rehearsal-")
    workdir = Path(config.placement.workdir)
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has config\.json of a run"):
        rehearsed(config, RehearseOptions(on="gke", yes=True))
    assert not cloud.things
    (workdir / "config.json").unlink()
    rehearsed(config, RehearseOptions(on="tpu_vm"))
    with pytest.raises(ConfigError, match="holds a rehearsal already"):
        rehearsed(config, RehearseOptions(on="tpu_vm"))


def test_the_page_is_there_for_programs(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    recorded(tmp_path / "there")
    config = PLANNED.replace("workdir", str(tmp_path / "w"))
    options = RehearseOptions(records=str(tmp_path / "there"), json=True)
    rehearse.run(config, "two.py", options, Console(file=io.StringIO()))
    told = json.loads(capsys.readouterr().out)
    assert told["measured"]["step_seconds"]["a"]["value"] == STEP_S
    assert {row["cause"] for row in told["findings"]} >= {"step", "books"}
