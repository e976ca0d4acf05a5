"""`diloco completion`: the words that a shell is offered."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from diloco_jax import cli, completion

OPTIONS = {"run": ["--json", "--sync.quorum"], "doctor": ["--folder", "--json"]}


@pytest.fixture(scope="module")
def script():
    return completion.bash(OPTIONS)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ru"], ["run"]),
        (["run", "--sync"], ["--sync.quorum"]),
        (["run", "quick"], ["quickstart"]),
        (["doctor", "--"], ["--folder", "--json"]),
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
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_fish_has_a_line_for_each_word():
    lines = completion.fish({"run": "it's here", "doctor": ""}, OPTIONS).splitlines()
    assert len(lines) == 6
    assert "complete -c diloco -n __fish_use_subcommand -a run -d 'its here'" in lines


def test_the_options_of_a_command_are_those_of_its_help():
    assert completion.options_of(cli.COMMANDS["doctor"][0]) == [
        "--folder",
        "--help",
        "--json",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_the_script(shell, capsys, monkeypatch):
    monkeypatch.setattr(completion, "options_of", lambda command: ["--json"])
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in script
    if shutil.which(shell):
        checked = subprocess.run(
            [shell, "-n"], input=script, capture_output=True, text=True, timeout=60
        )
        assert (checked.returncode, checked.stderr) == (0, "")
