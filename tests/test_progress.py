"""Every command that takes more than two seconds shows how far it is, with the time
left: a bar on a terminal, without colours if they are not wanted, else plain lines."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli
from diloco_jax.cluster.cluster import DILOCO
from diloco_jax.config import Config, DataConfig, IslandConfig, RunConfig, SyncConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.config.resolving import resolve_open
from diloco_jax.coordinator.holding.fragment_snapshots import load_first, make_store
from diloco_jax.launch.submit import Command, Submitter
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability import terminal
from diloco_jax.weights.first import first_params

RUN_S = 300.0
LEFT = r"\d+%.*\d:\d\d left|━.*(\d+:\d\d:\d\d|-:--:--)"
"""How far, with the time left: in a line, and beside a bar."""
COLOUR = re.compile(r"\x1b\[(\d+;)*(3[0-8]|4[0-8]|9\d)(;\d+)*m")
TERMINALS = {
    "elsewhere": {"TTY_COMPATIBLE": "0"},
    "terminal": {"TTY_COMPATIBLE": "1", "TERM": "xterm-256color"},
    "no colour": {"TTY_COMPATIBLE": "1", "TERM": "xterm-256color", "NO_COLOR": "1"},
}


class Given(NamedTuple):
    """Arguments of commands: a folder with `config.json`, and a run's workdir."""

    folder: Path
    run: Path | None


def command(*words: str) -> Callable[[Given], None]:
    """Run a command. {run}, {config} and {out} stand for what it is given."""

    def carry_out(given: Given) -> None:
        names = {"run": given.run, "config": given.folder / "config.json"}
        names["out"] = given.folder / "out"
        assert cli.main([word.format(**names) for word in words]) == 0

    return carry_out


def plan(given: Given) -> None:
    with terminal.bar(Console(stderr=True), "island") as report:
        report(0.5)


def launch(given: Given) -> None:
    submitter = Submitter(
        None, only=(), show=lambda line: None, confirm=lambda question: True
    )
    submitter._carry_out([Command(("true",), 9.0)] * 2)


def coordinator(given: Given) -> None:
    config = resolve_open(tiny())
    model = build(config.run)
    store = make_store(config, build_plan(config.run, model))
    load_first(store, first_params(config.run, model), range(len(store.plan.fragments)))


SHOWN = {
    "simulate goodput": command("simulate", "goodput", "--hours", "1", "--seeds", "2"),
    "simulate faults": command("simulate", "faults", "--seeds", "3"),
    "emulate": command("emulate", "{config}"),
    "data": command(
        *("data", "prepare", "{out}", "docs/design", "--sequence-length", "64"),
        *("--validation-fraction", "0.3"),
    ),
    "doctor": command("doctor"),
    "plan": plan,
    "launch": launch,
    "coordinator": coordinator,
}
"""Each command with work that takes long, in a short form."""
OF_RUN = {
    "eval": command("eval", "{run}"),
    "export": command("export", "{run}", "{out}"),
    "generate": command("generate", "{run}", "--prompt", "a", "--json"),
    "replay": command("replay", "{run}"),
}
"""Likewise, of what needs a run."""
ELSEWHERE = {
    "run": "the test below, and of the table: test_terminal.py",
    **dict.fromkeys(("chaos", "rehearse"), "as run"),
    "fork": "as replay, then as emulate",
    "island": "it is a service; its start is in its log",
    "worker": "as island",
    "manifest": "tests/data/test_manifest.py",
    "dashboard": "the page says how much is read",
    "simulate bandwidth": "formulas",
    **dict.fromkeys(
        ("status", "admit", "release", "profile"), "one call with a deadline"
    ),
    **dict.fromkeys(("init", "completion", "certs"), "writes small files"),
}
"""Commands without a bar of their own, or with another test, and why."""


def tiny() -> Config:
    """Two islands that train for some seconds."""
    run = RunConfig(
        model=MODEL,
        data=DataConfig(validation_fraction=0.001),
        sync=SyncConfig(steps_per_cycle=4, fragments=4, quorum=2),
        sequence_length=SEQUENCE_LENGTH,
        total_tokens=120 * 2 * SEQUENCE_LENGTH,
    )
    islands = {name: IslandConfig(batch_size=2, step_seconds=0.05) for name in "ab"}
    return Config(run=run, islands=islands).validate()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Workdir of a run that is over, and what it said."""
    folder = tmp_path_factory.mktemp("ran")
    write_config_json(tiny(), folder / "config.json")
    words = ["run", str(folder / "config.json"), "--workdir", str(folder / "run")]
    done = subprocess.run(
        [*DILOCO, *words], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stderr


def test_every_command_is_here():
    simulated = {f"simulate {kind}" for kind in simulations()}
    assert {*SHOWN, *OF_RUN, *ELSEWHERE} == {*cli.COMMANDS, *simulated} - {"simulate"}


def simulations() -> list[str]:
    from diloco_jax.simulation.commands import KINDS

    return list(KINDS)


@pytest.mark.dist
def test_a_run_says_whether_it_is_healthy_and_how_far_it_is(ran):
    _, said = ran
    assert re.search(r"^(healthy|starting) \| running \d+% of", said, re.MULTILINE)
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "elsewhere") for name in SHOWN),
        *(pytest.param(name, "elsewhere", marks=pytest.mark.dist) for name in OF_RUN),
        # One bar is that of all.
        *itertools.product(("plan", "simulate faults"), ("terminal", "no colour")),
    ],
)
def test_how_far_it_is_and_how_long_it_takes(
    name, where, request, tmp_path, monkeypatch, capsys
):
    run = request.getfixturevalue("ran")[0] if name in OF_RUN else None
    write_config_json(tiny(), tmp_path / "config.json")
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in TERMINALS[where].items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    (SHOWN | OF_RUN)[name](Given(tmp_path, run))
    said = capsys.readouterr().err
    assert re.search(LEFT, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)), said
    match where:
        case "elsewhere":
            assert "\x1b" not in said
        case "terminal":
            assert COLOUR.search(said)
        case _:
            assert not COLOUR.search(said)
