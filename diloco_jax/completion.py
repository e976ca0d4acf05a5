"""`diloco completion bash|zsh|fish`: a script by which a shell completes commands,
options and configs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from diloco_jax.config import named
from diloco_jax.config.fields import positional
from diloco_jax.options import parse

OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
BASH = """\
_diloco() {
  local word=${COMP_WORDS[COMP_CWORD]} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="COMMANDS"
  else
    case ${COMP_WORDS[1]} in
CASES
    esac
  fi
  [[ $word == -* || $COMP_CWORD -eq 1 ]] || words="$words NAMES"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _diloco diloco
"""
ZSH = "#compdef diloco\nautoload -U +X bashcompinit && bashcompinit\n" + BASH


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The options of `diloco completion`."""

    shell: Literal["bash", "zsh", "fish"] = positional(
        metavar="bash|zsh|fish", help="The shell to write the script for."
    )


def completion_command(arguments: Sequence[str]) -> int:
    """Print a shell's script to standard output."""
    (options,) = parse(
        [CompletionOptions],
        arguments,
        "diloco completion",
        "Print a script by which a shell completes the words of diloco. For bash: "
        "diloco completion bash > ~/.local/share/bash-completion/completions/diloco.",
    )
    from diloco_jax.cli import COMMANDS

    runs = {name: command for name, (command, _, _) in COMMANDS.items()}
    words = {name: options_of(run) for name, run in runs.items()}
    if options.shell == "fish":
        print(fish({name: does for name, (_, _, does) in COMMANDS.items()}, words))
    else:
        print(bash(words, ZSH if options.shell == "zsh" else BASH), end="")
    return 0


def options_of(command: Callable[[Sequence[str]], int]) -> list[str]:
    """Return the options that a command's help names, in order."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        command(["--help"])
    return sorted(set(OPTION.findall(shown.getvalue())))


def bash(options: Mapping[str, Sequence[str]], script: str = BASH) -> str:
    """Return the completion script for bash; zsh gets the same with another
    `script`.
    """
    cases = "\n".join(
        f'      {name}) words="{" ".join(own)}" ;;' for name, own in options.items()
    )
    return (
        script.replace("COMMANDS", " ".join(options))
        .replace("CASES", cases)
        .replace("NAMES", " ".join(named.names()))
    )


def fish(does: Mapping[str, str], options: Mapping[str, Sequence[str]]) -> str:
    """Return the script for fish. does: what each command does."""
    lines = []
    for name, text in does.items():
        unquoted = text.replace("'", "")
        lines.append(
            f"complete -c diloco -n __fish_use_subcommand -a {name} -d '{unquoted}'"
        )
        seen = f"'__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c diloco -n {seen} -l {option.removeprefix('--')}"
            for option in options[name]
        ]
    return "\n".join(lines)
