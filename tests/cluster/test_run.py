"""`diloco run` from workdir to report, with children that only pretend."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from diloco_jax.cluster import cluster
from diloco_jax.cluster import run as run_module
from diloco_jax.cluster.cluster import ClusterError
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    OuterConfig,
    Placement,
    RunConfig,
)
from diloco_jax.config.placement import Deadlines
from diloco_jax.config.resolving import LONG
from diloco_jax.data.corpus import load_corpus
from diloco_jax.files import write_json
from diloco_jax.observability.tape import Tape
from diloco_jax.workdir import begin_run, read_summary

pytestmark = pytest.mark.dist

# Arguments of a pretended coordinator: WORKDIR BIND HOW; of an island: WORKDIR NAME
# ADDRESS INCARNATION; of an evaluation: WORKDIR.
COORDINATOR = """
import json, pathlib, signal, sys, time
workdir, bind, how = pathlib.Path(sys.argv[1]), *sys.argv[2:]
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
with (workdir / "starts").open("a") as file:
    print(bind, how, file=file)
(workdir / "coordinator.address").write_text("127.0.0.1:1234")
while not ended and len(list(workdir.glob("*.over"))) < 2:
    time.sleep(0.01)
(workdir / "order").open("a").write("coordinator ")
summary = {"phase": "stopped", "merges": 3, "islands": {}}
(workdir / "summary.json").write_text(json.dumps(summary))
"""
ISLAND = """
import os, pathlib, signal, sys, time
workdir, name, address, incarnation = pathlib.Path(sys.argv[1]), *sys.argv[2:]
with (workdir / f"{name}.starts").open("a") as file:
    print(address, incarnation, file=file)
"""
OVER = "(workdir / f'{name}.over').touch()\n"
UNTIL_TERM = """
def goodbye(*_):
    (workdir / "order").open("a").write("island ")
    sys.exit(0)
signal.signal(signal.SIGTERM, goodbye)
(workdir / f"{name}.ready").touch()
while len(list(workdir.glob("*.ready"))) < 2:
    time.sleep(0.01)
if name == "a":
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""
EVAL = """
import json, pathlib, sys
summary = pathlib.Path(sys.argv[1], "summary.json")
summary.write_text(json.dumps({**json.loads(summary.read_text()), "eval_loss": 1.5}))
"""


@pytest.fixture
def config(tmp_path):
    outer = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
    for name in ("b", "c"):  # one to train on, one held out
        (tmp_path / f"{name}.txt").write_text("text " * 100)
    paths = (str(tmp_path / "b.txt"), str(tmp_path / "c.txt"))
    digest = load_corpus(paths, 0.5).digest
    data = DataConfig(paths=paths, validation_fraction=0.5, digest=digest)
    return Config(
        run=RunConfig(data=data, outer=outer, sync=LONG),
        islands={"a": IslandConfig(), "b": IslandConfig()},
        placement=Placement(
            workdir=str(tmp_path / "run"), time_budget_s=60.0, restart_delay_s=0.01
        ),
    )


@pytest.fixture
def launch(config, monkeypatch):
    """Runs it with the given children; (exit code, summary, what people saw)."""

    def launch(
        coordinator=COORDINATOR,
        island=ISLAND + OVER,
        evaluate=EVAL,
        resume="",
        **fields,
    ):
        def command(code, *arguments):
            return [sys.executable, "-c", code, *map(str, arguments)]

        def coordinator_command(workdir, bind, how=""):
            return command(coordinator, workdir, bind, how)

        def island_commands(workdir, name, hosts, address, incarnation):
            return [command(island, workdir, name, address, incarnation)]

        monkeypatch.setattr(cluster, "coordinator_command", coordinator_command)
        monkeypatch.setattr(cluster, "island_commands", island_commands)
        monkeypatch.setattr(cluster, "eval_command", lambda w: command(evaluate, w))
        placement = dataclasses.replace(config.placement, **fields)
        console = Console(file=io.StringIO(), width=200)
        code, summary = run_module.run(
            dataclasses.replace(config, placement=placement),
            "configs/x.py",
            console,
            baseline=False,
            resume=str(resume),
        )
        return code, summary, console.file.getvalue()

    return launch


@pytest.fixture
def workdir(config):
    return Path(config.placement.workdir)


def test_a_run_ends_with_its_evaluation_in_the_summary(launch, workdir):
    code, summary, seen = launch()
    assert code == 0
    assert summary == {"phase": "stopped", "merges": 3, "islands": {}, "eval_loss": 1.5}
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert "validation loss 1.5000" in seen
    assert {p.stem for p in (workdir / "logs").iterdir()} == {
        "a",
        "b",
        "coordinator",
        "eval",
    }
    assert (workdir / "a.starts").read_text() == "127.0.0.1:1234 1\n"


def test_at_its_end_a_run_says_where_to_look(launch, workdir):
    begins = "(workdir / 'log').mkdir()\n"
    _, _, seen = launch(coordinator=COORDINATOR + begins)
    assert seen.endswith(f"look at it with: diloco dashboard {workdir}\n")


def test_islands_that_are_slow_to_end_are_not_cut_off(launch):
    """Hosts of an island leave together, while the coordinator is gone already."""
    code, summary, _ = launch(island=ISLAND + OVER + "time.sleep(1)\n")
    assert (code, summary["eval_loss"]) == (0, 1.5)


def test_a_crashed_island_comes_back_as_its_next_incarnation(launch, workdir):
    crash = "if name == 'a' and incarnation == '1': os.kill(os.getpid(), 9)\n"
    code, _, _ = launch(island=ISLAND + crash + OVER)
    assert code == 0
    assert (workdir / "a.starts").read_text().split()[1::2] == ["1", "2"]
    assert json.loads((workdir / "attempts.json").read_text()) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("before", "how"), [("(workdir / 'log').mkdir(); ", ""), ("", "--init")]
)
def test_a_crashed_coordinator_comes_back_on_its_port(launch, workdir, before, how):
    crash = (
        "if len((workdir / 'starts').read_text().splitlines()) == 1:\n"
        "    while not list(workdir.glob('*.starts')): time.sleep(0.01)\n"
        f"    import os; {before}os.kill(os.getpid(), 9)\n"
    )
    code, _, _ = launch(coordinator=COORDINATOR.replace("while", crash + "while", 1))
    assert code == 0
    starts = (workdir / "starts").read_text().splitlines()
    assert starts == ["127.0.0.1:0 --init", f"127.0.0.1:1234 {how}"]


REFUSES = """
import pathlib, sys
workdir = pathlib.Path(sys.argv[1])
(workdir / "run.json").write_text("{}")
(workdir / "log").mkdir()
print("error: model.head_dim = 15; choose an even number", file=sys.stderr)
print("Traceback: an executor was shut down", file=sys.stderr)
sys.exit(2)
"""
SILENT = "import sys; print('port 7 is in use'); sys.exit(2)"
SAID = "^model.head_dim = 15; choose an even number$"


@pytest.mark.parametrize(
    ("coordinator", "error", "said", "left"),
    [
        (REFUSES, ConfigError, SAID, []),
        (REFUSES.replace("exit(2)", "exit(1)"), ClusterError, "not start", ["logs"]),
        (SILENT, ClusterError, "(?s)did not start.*port 7 is in use", ["logs"]),
    ],
    ids=["refuses", "crashes", "refuses without a word"],
)
@pytest.mark.parametrize("notes", [[], ["notes"]], ids=["new", "of the user"])
def test_a_start_that_failed_says_why_and_leaves_no_run(
    launch, workdir, notes, coordinator, error, said, left
):
    for name in notes:
        workdir.mkdir()
        (workdir / name).write_text("of the user")
    with pytest.raises(error, match=said):
        launch(coordinator=coordinator, restarts=0)
    stays = {path.name for path in workdir.glob("*")}
    assert stays == {*notes, *left}
    assert workdir.exists() == bool(stays)
    assert launch()[0] == 0


INTERRUPTS = """
import os, pathlib, signal, sys, time
(pathlib.Path(sys.argv[1]) / "run.json").touch()
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""


def test_ctrl_c_before_the_start_leaves_its_log_alone(launch, workdir):
    code, summary, _ = launch(coordinator=INTERRUPTS)
    assert (code, summary) == (1, {})
    assert [path.name for path in workdir.iterdir()] == ["logs"]


def test_a_silent_coordinator_is_given_up(launch):
    with pytest.raises(ClusterError, match=r"compile_budget_s = 0\.2 s"):
        launch(coordinator="import time; time.sleep(600)", compile_budget_s=0.2)


class NoFlush(Deadlines):
    """Deadlines of a launcher that gives up a run without islands at once."""

    flush_s = 0.1


def test_a_run_whose_islands_are_all_refused_ends_with_code_3(launch, monkeypatch):
    monkeypatch.setattr(Placement, "deadlines", NoFlush(60.0))
    refused = "import sys; print('corpus differs'); sys.exit(3)"
    code, summary, seen = launch(island=refused)
    assert code == 3
    assert "a refused: corpus differs" in seen
    assert summary["merges"] == 3
    assert "eval_loss" not in summary


def test_an_island_that_cannot_go_on_does_not_end_the_run(launch):
    # b is over once the launcher has seen a's last attempt end.
    fail = """
if name == "a":
    if incarnation == "2":
        (workdir / "pid").write_text(str(os.getpid()))
    sys.exit(1)
while True:
    time.sleep(0.01)
    try:
        os.kill(int((workdir / "pid").read_text()), 0)
    except (FileNotFoundError, ValueError):
        continue
    except ProcessLookupError:
        break
(workdir / "a.over").touch()
"""
    code, _, seen = launch(island=ISLAND + fail + OVER, restarts=1)
    assert code == 0
    assert "a failed: exited 1 in attempt 2" in seen


def test_ctrl_c_ends_islands_then_coordinator_and_gives_the_summary(launch, workdir):
    code, summary, seen = launch(island=ISLAND + UNTIL_TERM)
    assert code == 1
    assert (workdir / "order").read_text() == "island island coordinator "
    assert summary["merges"] == 3
    assert "not evaluated" in seen


def test_a_second_ctrl_c_does_not_wait(launch, workdir):
    again = UNTIL_TERM.replace(
        "sys.exit(0)", "os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(600)"
    )
    code, summary, _ = launch(island=ISLAND + again, time_budget_s=600.0)
    assert (code, summary) == (1, {})


def test_a_failed_evaluation_is_told_and_the_summary_kept(launch, workdir):
    evaluate = "import sys; sys.exit('no checkpoint')"
    code, summary, seen = launch(evaluate=evaluate)
    assert code == 1
    assert "no checkpoint" in seen
    assert summary == {"phase": "stopped", "merges": 3, "islands": {}}


ENDED = """
import json, pathlib, sys
workdir, bind, how = pathlib.Path(sys.argv[1]), *sys.argv[2:]
assert how == "--resume"
summary = {"phase": "done", "tokens": 10**9, "merges": 4, "islands": {}}
(workdir / "summary.json").write_text(json.dumps(summary))
"""


@pytest.mark.parametrize("started", [False, True])
def test_a_run_that_only_had_to_end_is_done(launch, config, workdir, started):
    begin_run(config, workdir)
    tape = Tape(workdir / "tape.jsonl")
    recovered = {"snapshot": 0, "records": 4, "discarded": 0}
    recovered |= {"versions": [[1, 4]], "environment": {}}
    tape.append({"kind": "recovered", **recovered})
    tape.close()
    served = "(workdir / 'coordinator.address').write_text('127.0.0.1:1234')\n"
    wait = """
import time
while len(list(workdir.glob("*.starts"))) < 2:
    time.sleep(0.01)
"""
    code, summary, seen = launch(
        coordinator=ENDED + (served + wait if started else ""),
        island=ISLAND + "print('the run has its tokens'); sys.exit(3)",
        resume=workdir,
    )
    assert code == 0
    assert (summary["merges"], summary["eval_loss"]) == (4, 1.5)
    assert "goes on after 4 merges" in seen


def test_ctrl_c_before_a_run_goes_on_leaves_it_as_it_was(launch, config, workdir):
    begin_run(config, workdir)
    before = {"phase": "running", "merges": 4, "islands": {}}
    write_json(before, workdir / "summary.json")
    config_before = (workdir / "config.json").read_bytes()
    launch(coordinator=INTERRUPTS, resume=workdir, restarts=7)
    assert read_summary(workdir) == before
    assert (workdir / "config.json").read_bytes() == config_before
