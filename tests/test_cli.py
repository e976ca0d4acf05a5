"""The `diloco` command: exit codes, what goes where, what is imported when, and the
words that a shell is offered."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from diloco_jax import before_jax, cli, commands
from diloco_jax.cluster.cluster import ClusterError
from diloco_jax.config import (
    Config,
    DataConfig,
    OuterConfig,
    Placement,
    RunConfig,
)
from diloco_jax.config.loading import write_config_json
from diloco_jax.files import write_json
from diloco_jax.island.world import WorldAddress
from diloco_jax.wire.errors import ConnectionLost, Refused
from diloco_jax.workdir import held, read_summary

FILE = """
from diloco_jax.island.world import WorldAddress
from diloco_jax.config import *
def config():
    outer = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
    return Config(run=RunConfig(data=DataConfig(digest="d"), outer=outer),
                  islands={"v6e": IslandConfig(), "v5p": IslandConfig()})
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "two.py").write_text(FILE)
    return str(tmp_path / "two.py")


@pytest.fixture
def fake(monkeypatch):
    """Puts a pretended module with a function `run` in place; gives its calls."""

    def fake(module, result=0):
        calls = []

        def run(*arguments, **options):
            calls.append((*arguments, *options.values()))
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(run=run))
        return calls

    return fake


HEAVY = "{'jax', 'grpc', 'tyro', 'numpy', 'rich'} & set(sys.modules)"
QUICK = {
    "help": "from diloco_jax.cli import main; code = main(['--help']); of = set()",
    "package": "import diloco_jax; code = 0; of = {name for name in sys.modules "
    "if name.startswith('diloco_jax.')}",
}


def said_by_python(code, *arguments):
    """Standard output of code that ends well and says nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("what", QUICK)
def test_help_and_package_are_quick_to_import(what):
    ends = f"sys.exit(code or ' '.join(of | {HEAVY}) or None)"
    said = said_by_python(f"import sys\n{QUICK[what]}\n{ends}")
    assert all((f"diloco {name} " in said) == (what == "help") for name in cli.COMMANDS)


def test_every_command_has_help_without_jax():
    code = (
        "import sys\nfrom diloco_jax.cli import main\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        main([name, '--help'])\n"
        "    except SystemExit as end:\n"
        "        if end.code or 'jax' in sys.modules:\n"
        "            sys.exit(f'{name}: {end.code}, or jax')"
    )
    said = said_by_python(code, *cli.COMMANDS)
    assert [name for name in cli.COMMANDS if f"diloco {name}" not in said] == []


def test_run_with_json_prints_the_summary_and_nothing_else(path, fake, capsys):
    calls = fake("diloco_jax.cluster.run", (0, {"merges": 3}))
    words = ["--json", "--baseline", "--sync.quorum", "2"]
    assert cli.main(["run", path, *words]) == 0
    assert json.loads(capsys.readouterr().out) == {"merges": 3}
    ((config, given, console, baseline, resume, dashboard),) = calls
    assert (given, baseline, resume) == (path, True, "")
    assert not dashboard
    assert config.run.sync.quorum == 2
    assert console.stderr


@pytest.mark.parametrize(("asked", "set_to"), [("", "cpu"), ("cuda", "cuda")])
def test_run_computes_on_what_its_islands_compute_on(
    path, fake, monkeypatch, asked, set_to
):
    fake("diloco_jax.cluster.run", (0, {}))
    monkeypatch.setattr(before_jax, "_plugins", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    assert cli.main(["run", path]) == 0
    assert os.environ["JAX_PLATFORMS"] == set_to


def test_coordinator_gets_config_workdir_and_init(path, fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = fake("diloco_jax.coordinator.main")
    arguments = ["coordinator", path, "--workdir", "w", "--bind", "127.0.0.1:7"]
    assert cli.main([*arguments, "--init"]) == 0
    assert cli.main(arguments) == 0
    assert [call[1:] for call in calls] == [
        (tmp_path / "w", True, False, "", ""),
        (tmp_path / "w", False, False, "", ""),
    ]
    assert calls[0][0].placement.bind == "127.0.0.1:7"


def test_island_counts_its_attempts_unless_told(path, fake, tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr("diloco_jax.before_jax.prepare_island", prepared.append)
    calls = fake("diloco_jax.island.main")
    monkeypatch.setattr(
        sys.modules["diloco_jax.island.main"],
        "with_model_of_run",
        lambda config, name, address: config,
        raising=False,
    )
    workdir = str(tmp_path / "w")
    arguments = ["island", path, "--name", "v6e", "--coordinator", "127.0.0.1:1"]
    arguments += ["--workdir", workdir]
    assert cli.main(arguments) == 0
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--incarnation", "7"]) == 0
    assert [island.devices for island in prepared] == [1, 1, 1]
    assert [call[1:] for call in calls] == [
        ("v6e", "127.0.0.1:1", tmp_path / "w", incarnation, WorldAddress(), "", "")
        for incarnation in (1, 2, 7)
    ]


def os_error(number, *where):
    return OSError(number, os.strerror(number), *where)


SILENT = types.SimpleNamespace(name="coordinator", reason="", log=Path("none.log"))


@pytest.mark.parametrize(
    ("name", "error", "code", "said"),
    [
        ("run", Refused("fenced", "a newer incarnation"), 3, "a newer incarnation"),
        ("run", ConnectionLost("nobody answers"), 1, "nobody answers"),
        ("run", ClusterError(SILENT, "did not start", 2), 2, "none.log:\n  (empty)"),
        ("run", KeyboardInterrupt(), 1, "interrupted"),
        ("run", os_error(errno.ENOSPC), 1, "on device: make room there; what was runn"),
        ("run", os_error(errno.EROFS, "ro/c"), 1, "ro/c: Read-only file system; check"),
        ("run", os_error(errno.EEXIST, "a-file"), 1, "a-file: File exists; check that"),
        ("run", os_error(errno.ENAMETOOLONG, "w/x"), 2, "'w/x'; give another path"),
        ("run", RuntimeError("can't start new thread"), 1, "thread; raise `ulimit -u`"),
        # There is no run to go on with.
        ("simulate", os_error(errno.ENOSPC), 1, "make room there and do it again\n"),
        (
            *("simulate", OSError(2, "No usable temporary directory found"), 2),
            "(TMPDIR = '/read-only'); set TMPDIR to a folder",
        ),
    ],
    ids=str,
)
def test_the_exit_code_follows_the_cause(monkeypatch, capsys, name, error, code, said):
    def command(arguments):
        raise error

    monkeypatch.setenv("TMPDIR", "/read-only")
    monkeypatch.setitem(cli.COMMANDS, name, (command, "", ""))
    assert cli.main([name]) == code
    assert said in capsys.readouterr().err


def test_an_error_that_nobody_thought_of_keeps_its_traceback(path, fake):
    fake("diloco_jax.cluster.run", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        cli.main(["run", path])


def test_output_that_nobody_reads_ends_without_a_traceback():
    command = [sys.executable, "-m", "diloco_jax.cli", "simulate", "bandwidth"]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*command, "--json"], stdout=writes, stderr=subprocess.PIPE, text=True
    )
    os.close(writes)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: standard output was closed"]


@pytest.fixture
def finished(tmp_path):
    """A workdir whose coordinator is gone."""
    outer = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
    run = RunConfig(data=DataConfig(digest="d"), outer=outer)
    placement = Placement(faults=("coordinator@9:kill",))
    config = Config(run=run, placement=placement)
    write_config_json(config, tmp_path / "config.json")
    summary = {"wall_seconds": 5, "merges": 3, "goodput": 0.5, "islands": {}}
    write_json({**summary, "phase": "done"}, tmp_path / "summary.json")
    (tmp_path / "coordinator.address").write_text("127.0.0.1:1\n")
    return tmp_path


NEVER = "the fault coordinator@9:kill never struck: coordinator made 3"


@pytest.mark.parametrize(
    ("is_held", "changes", "phase", "said"),
    [
        (False, {}, "done", ["goodput 0.500", NEVER]),
        (False, {"phase": "running"}, "stopped", ["stopped before its end"]),
        (True, {}, "evaluating", ["being evaluated"]),
        (True, {"eval_loss": 2.0}, "done", ["validation loss 2.0000"]),
    ],
)
def test_status_of_a_run_without_coordinator_is_its_summary_with_the_phase(
    finished, capsys, is_held, changes, phase, said
):
    summary = json.loads((finished / "summary.json").read_bytes())
    write_json({**summary, **changes}, finished / "summary.json")
    with held(finished, "`diloco run`") if is_held else contextlib.nullcontext():
        assert cli.main(["status", str(finished), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["phase"], shown["merges"]) == (phase, 3)
        assert cli.main(["status", str(finished)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [text for text in said if text not in captured.err] == []


@pytest.mark.parametrize(
    ("gone", "hours", "said"),
    [
        (("summary.json",), 0, ["127.0.0.1:1: nothing listens there", "cut off, or"]),
        (("summary.json",), 1, ["wrote nothing to its tape for 1:00:0"]),
        (
            ("summary.json", "coordinator.address"),
            *(0, ["no coordinator is up. The run in"]),
        ),
    ],
)
def test_status_of_a_run_that_was_cut_off_is_an_error(
    finished, capsys, gone, hours, said
):
    for name in gone:
        (finished / name).unlink()
    (finished / "log").mkdir()
    if hours:
        tape = finished / "tape.jsonl"
        tape.touch()
        then = tape.stat().st_mtime - 3600 * hours
        os.utime(tape, (then, then))
    assert cli.main(["status", str(finished), "--json"]) == 1
    shown = capsys.readouterr().err
    for text in ("left no summary", f"`diloco run --resume {finished}`", *said):
        assert text in shown


EVALUATED = {
    "eval_loss": 1.5,
    "eval_bits_per_byte": 2.164,
    "eval_tokens": 30_000,
    "eval_merges": 1200,
}


def test_eval_prints_its_result_and_adds_it_to_the_summary(finished, fake, capsys):
    calls = fake("diloco_jax.evaluation", EVALUATED)
    before = read_summary(finished)
    assert cli.main(["eval", str(finished), "--data.paths", "here", "--json"]) == 0
    assert read_summary(finished) == {**before, **EVALUATED}
    assert calls[0][0].run.data.paths == ("here",)
    assert json.loads(capsys.readouterr().out) == EVALUATED
    assert calls[0][1] == finished
    assert cli.main(["eval", str(finished)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "validation loss 1.5000 nats per token, 2.1640 bits per byte, after 1,200 "
        "merges and 30,000 tokens\n"
    )


def test_a_loss_of_older_parameters_is_not_the_summarys(finished, monkeypatch):
    """The run ended while they were evaluated."""

    def evaluated(*_):
        ended = {**read_summary(finished), "merges": 10**6}
        write_json(ended, finished / "summary.json")
        return dict(EVALUATED), "a loss"

    monkeypatch.setattr(commands, "_eval_loss", evaluated)
    assert cli.main(["eval", str(finished)]) == 0
    assert "eval_loss" not in read_summary(finished)


@pytest.mark.parametrize(
    ("name", "said"), [("x" * 300, "File name too long"), ("a\0b", "embedded null")]
)
def test_a_name_that_no_file_can_have_is_refused(path, capsys, name, said):
    for words in (["run", path, "--workdir", name], ["status", name]):
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["eval", name]) == 2


def test_a_machine_without_threads_is_refused_before_anything_starts(
    path, monkeypatch, capsys, tmp_path
):
    started = itertools.count()

    def start(thread):
        if next(started) > 20:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading.Thread, "join", lambda thread: None)
    workdir = tmp_path / "run"
    assert cli.main(["run", path, "--workdir", str(workdir)]) == 2
    assert "21 of about" in (said := capsys.readouterr().err)
    assert "raise `ulimit -u`" in said
    assert not workdir.exists()


@pytest.fixture(scope="module")
def script():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert cli.main(["completion", "bash"]) == 0
    return shown.getvalue()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ru"], ["run"]),
        (["run", "--sync.quor"], ["--sync.quorum"]),
        (["run", "quick"], ["quickstart"]),
        (["run", "quickstart", "--islands.v6e.att"], ["--islands.v6e.attention"]),
        (
            ["run", "quickstart", "--islands.v5p-a.attention", ""],
            ["auto", "dot_product", "splash"],
        ),
        (["run", "--ac"], []),
        (["launch", "x.py", "--on", ""], ["gke", "sky", "tpu_vm"]),
        (["doctor", "--"], ["--folder", "--help", "--json"]),
        (["simulate", ""], ["bandwidth", "faults", "goodput"]),
        (["simulate", "goodput", "--meth"], ["--method"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
    ],
)
def test_bash_completes(script, typed, offered):
    words = " ".join(f"'{word}'" for word in ["diloco", *typed])
    ask = (
        f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _diloco; "
        f'printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", script + ask], capture_output=True, text=True, timeout=60
    )
    assert (sorted(done.stdout.split()), done.stderr) == (offered, "")


def test_fish_is_told_options_and_their_choices(capsys):
    assert cli.main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    seen = "complete -c diloco -n '__fish_seen_subcommand_from"
    assert f"{seen} launch' -l on -x -a 'gke sky tpu_vm'" in map(in_order, lines)
    assert f"{seen} run' -a quickstart" in lines
    kind = "simulate; and __fish_seen_subcommand_from goodput"
    assert f"{seen} {kind}' -l chips" in lines


def in_order(line):
    """A line whose choices, which the parser keeps as a set, are sorted."""
    head, found, choices = line.partition(" -x -a ")
    return (
        f"{head}{found}'{' '.join(sorted(choices[1:-1].split()))}'" if found else line
    )


def test_every_command_is_in_one_group_of_the_help():
    named = " ".join(cli.GROUPS.values()).split()
    assert len(named) == len(set(named))
    assert set(cli.COMMANDS) <= set(named)


def test_help_shows_what_is_needed_and_the_rest_by_section(capsys):
    def shown(*words):
        with pytest.raises(SystemExit):
            cli.main([*words])
        return capsys.readouterr().out

    short, sync = shown("run", "--help"), shown("run", "quickstart", "--help", "sync")
    assert "--total-tokens" in short
    assert "--sync.quorum" not in short
    assert ("--sync.quorum" in sync, "--total-tokens" in sync) == (True, False)
    every = shown("run", "--help", "all")
    assert all(word in every for word in ("--total-tokens", "--sync.quorum"))
    assert "--launch." not in every
    assert "--launch.project" in shown("launch", "--help")
    assert cli.main(["run", "--help", "snyc"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'sync'" in said
    assert "there are model, " in said


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_the_script(shell, capsys, monkeypatch):
    monkeypatch.setattr(cli, "options_of", lambda command, *kind: {"--json": ()})
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in script
    if shutil.which(shell):
        checked = subprocess.run(
            [shell, "-n"], input=script, capture_output=True, text=True, timeout=60
        )
        assert (checked.returncode, checked.stderr) == (0, "")
