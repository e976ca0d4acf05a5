"""The `diloco` command.

Exit codes: 0 done, 2 bad arguments or config, 3 refused by the peer, 1 anything else.
Results for programs go to standard output (`--json`), all else to standard error.
Nothing heavy is imported before a command needs it. `diloco completion bash|zsh|fish`
prints a script by which a shell completes commands, options and configs.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Literal, NoReturn

from diloco_jax import commands, machine
from diloco_jax.config.fields import positional
from diloco_jax.config.loading import named_configs, read_config
from diloco_jax.config.options import COMPLETES, command
from diloco_jax.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_REFUSED,
    UNNAMEABLE,
    ConfigError,
    disk_failure,
    suggest,
)
from diloco_jax.process import (
    Interruptible,
    end_process,
    end_when_asked,
    hold_streams,
)

Words = Mapping[str, tuple[str, ...]]
"""Options of a command, each with the values that it may have, if they can be told."""
BASH = """\
_diloco() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  local words="" islands="" island all
  local -a hidden=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="COMMANDS"
  else
    case "${COMP_WORDS[1]} ${COMP_WORDS[2]} " in
CASES
    esac
    case "${COMP_WORDS[1]} $before" in
CHOICES
    esac
    case "${COMP_WORDS[2]}" in
ISLANDS
    esac
    if [[ $word == --islands.* && -n $islands ]]; then
      all=$words words=""
      for island in $islands; do words="$words ${all//NAME/$island}"; done
    fi
  fi
  [[ $word == -* ]] || hidden=(-X '-*')
  COMPREPLY=($(compgen -W "$words" "${hidden[@]}" -- "$word"))
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


@command(CompletionOptions, "diloco completion")
def completion_command(options: CompletionOptions) -> int:
    """Print a script by which a shell completes the words of diloco. For bash: diloco
    completion bash > ~/.local/share/bash-completion/completions/diloco."""

    words: dict[str, Words] = {}
    for name, (run, usage, _) in COMMANDS.items():
        first, of_its_own = usage.split()[0], name == "completion"
        kinds = first.split("|") if re.fullmatch("[a-z|]+", first) else []
        for kind in [] if of_its_own else kinds:
            words[f"{name} {kind}"] = options_of(run, kind)
        own = options_of(run) if of_its_own or not kinds else {}
        names = named_configs() if first == "CONFIG" else kinds
        words[name] = {**dict.fromkeys(names, ()), **own}
    if options.shell == "fish":
        print(fish(words))
    else:
        print(bash(words, ZSH if options.shell == "zsh" else BASH), end="")
    return 0


def options_of(run: Callable[[Sequence[str]], int], *kind: str) -> Words:
    """Return the options of a command's own parser. kind: the word that chooses it."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        run([*kind, COMPLETES, "bash"])
    _, _, told = shown.getvalue().partition("COMPLETION_SPEC = ")
    return {
        flag: tuple(choice for choice in option.get("choices", ()) if choice != "None")
        for option in ast.literal_eval(told.partition("\n")[0])["options"]
        for flag in option["flags"]
        if flag.startswith("--")
    }


def bash(words: Mapping[str, Words], script: str = BASH) -> str:
    """Return the completion script for bash; zsh gets the same with another
    `script`. words: what follows a command, or a command and its kind."""
    cases, chosen = [], dict[str, list[str]]()
    for path, options in words.items():
        cases.append(f'      "{path} "*) words="{" ".join(options)}" ;;')
        for option, choices in options.items():
            if choices:
                case = f"{path.split()[0]} {option}".replace("NAME", '"*"')
                chosen.setdefault(" ".join(choices), []).append(f'"{case}"')
    islands = {name: read_config(name).islands for name in named_configs()}
    parts = {
        "COMMANDS": " ".join(dict.fromkeys(path.split()[0] for path in words)),
        "CASES": "\n".join(cases),
        "CHOICES": "\n".join(
            f'      {"|".join(of)}) words="{choices}" ;;'
            for choices, of in chosen.items()
        ),
        "ISLANDS": "\n".join(
            f'      {name}) islands="{" ".join(own)}" ;;'
            for name, own in islands.items()
        ),
    }
    return re.sub("|".join(parts), lambda found: parts[found[0]], script)


def fish(words: Mapping[str, Words]) -> str:
    """Return the script for fish. words: as for `bash`."""
    lines = []
    for name, (_, _, does) in COMMANDS.items():
        unquoted = does.replace("'", "")
        lines.append(
            f"complete -c diloco -n __fish_use_subcommand -a {name} -d '{unquoted}'"
        )
    for path, options in words.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {w}" for w in path.split())
        for option, choices in options.items():
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            how = f"-l {option[2:]}" if option.startswith("--") else f"-a {option}"
            lines.append(f"complete -c diloco -n '{seen}' {how}{values}")
    return "\n".join(lines)


MEMBERS = ("coordinator", "island")
"""Commands that leave a run in order when asked to end."""
LASTING = ("run", "rehearse", "chaos", "worker", *MEMBERS)
"""Commands that go on if nobody reads their output any more."""
THREADED = {"run": 2, "chaos": 2, "coordinator": 1, "worker": 1, "island": 1}
"""Commands of many threads, with the number of processes that they become at least."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"diloco {metadata.version('diloco-jax')}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        return _fail(
            f"no command {name!r}{suggest(name, list(COMMANDS))}; there are {known}",
            EXIT_CONFIG,
        )
    try:
        machine.require_threads(THREADED.get(name, 0))
    except ConfigError as error:
        return _fail(str(error), EXIT_CONFIG)
    with contextlib.nullcontext() if name in MEMBERS else Interruptible():
        return _run(name, arguments[1:])


def script() -> NoReturn:
    """Be the `diloco` command: run it, and end this process with the exit code."""
    hold_streams(unread=any(name in LASTING for name in sys.argv[1:2]))
    if sys.argv[1:2] and sys.argv[1] not in MEMBERS:
        sys.exit(main())
    end_when_asked()
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = EXIT_FAILED
    # A thread that waits for a peer may still be in C++.
    end_process(code)


def _run(name: str, arguments: Sequence[str]) -> int:
    from diloco_jax.cluster.cluster import ClusterError
    from diloco_jax.files import StorageAway
    from diloco_jax.wire.errors import Refused, SecurityError, WireError

    try:
        code = COMMANDS[name][0](arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # `head` does this. Python flushes again as it ends, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("standard output was closed", EXIT_FAILED)
    except (ConfigError, SecurityError) as error:
        return _fail(str(error), EXIT_CONFIG)
    except Refused as error:
        return _fail(str(error), EXIT_REFUSED)
    except ClusterError as error:
        return _fail(str(error), error.exit_code)
    except (WireError, StorageAway) as error:
        return _fail(str(error), EXIT_FAILED)
    except OSError as error:
        if "No usable temporary directory" in str(error):
            given = f"(TMPDIR = {os.environ.get('TMPDIR', '')!r})"
            said = f"{error.strerror} {given}; set TMPDIR to a folder to write in"
            return _fail(said, EXIT_CONFIG)
        if error.errno in UNNAMEABLE:
            return _fail(f"{error}; give another path", EXIT_CONFIG)
        after = " and do it again"
        if name in ("run", *MEMBERS):
            local = "a local run with `diloco run --resume WORKDIR`"
            after = f"; what was running goes on after that, {local}"
        message = disk_failure(error, after=after)
        if not message:
            raise
        return _fail(message, EXIT_FAILED)
    except RuntimeError as error:
        message = machine.thread_shortage(error)
        if not message:
            raise
        return _fail(message, EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_FAILED)


def _of(module: str, function: str) -> Callable[[Sequence[str]], int]:
    """Return a command whose module is imported when it runs."""

    def run(arguments: Sequence[str]) -> int:
        code: int = getattr(importlib.import_module(module), function)(arguments)
        return code

    return run


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str, str]] = {
    "run": (
        commands.run_command,
        "CONFIG [--workdir DIR] [--init hf:DIR] [--resume WORKDIR] [options]",
        "coordinator and all islands of CONFIG on this machine",
    ),
    "coordinator": (
        commands.coordinator_command,
        "CONFIG --workdir DIR --bind HOST:PORT",
        "the coordinator alone; --init [hf:DIR] begins a new run",
    ),
    "worker": (
        commands.worker_command,
        "CONFIG --index N --workdir DIR",
        "one worker of a coordinator on another machine",
    ),
    "island": (
        commands.island_command,
        "CONFIG --name NAME --coordinator HOST:PORT --workdir DIR",
        "one island",
    ),
    "chaos": (
        commands.chaos_command,
        "CONFIG or WORKDIR [--strikes WHO@TIMEs:KIND...] [options]",
        "a run, begun or going on, whose processes and links are struck; what it cost",
    ),
    "emulate": (
        commands.emulate_command,
        "CONFIG [--workdir DIR] [--json] [options]",
        "all islands with real gradients in this process, in virtual time",
    ),
    "status": (
        _of("diloco_jax.cluster.status", "status_command"),
        "HOST:PORT or WORKDIR [--json]",
        "who is alive, who takes part, versions, tokens, goodput, bandwidth",
    ),
    "admit": (
        _of("diloco_jax.cluster.status", "admit_command"),
        "NAME --coordinator HOST:PORT [--remove]",
        "lets an island into a run that goes on, though its config does not name it",
    ),
    "profile": (
        _of("diloco_jax.cluster.status", "profile_command"),
        "NAME --coordinator HOST:PORT [--steps N]",
        "traces the next steps of an island that trains, with jax.profiler",
    ),
    "release": (
        _of("diloco_jax.cluster.status", "release_command"),
        "NAME --coordinator HOST:PORT",
        "ends an island's quarantine",
    ),
    "dashboard": (
        _of("diloco_jax.dashboard.command", "dashboard_command"),
        "WORKDIR [--port N]",
        "shows a run in a browser: islands over time, merges, losses, alerts",
    ),
    "eval": (
        _of("diloco_jax.commands", "eval_command"),
        "WORKDIR [--json]",
        "loss on the whole validation split",
    ),
    "export": (
        _of("diloco_jax.weights.commands", "export_command"),
        "WORKDIR DIR [--dtype bfloat16]",
        "the parameters as safetensors and config.json, for other tools",
    ),
    "generate": (
        _of("diloco_jax.weights.commands", "generate_command"),
        "RUN_OR_EXPORT --prompt TEXT [--max-tokens N] [--temperature T] [--top-p P]",
        "continues a text",
    ),
    "simulate": (
        _of("diloco_jax.simulation.commands", "simulate_command"),
        "goodput|bandwidth|faults [options] [--json]",
        "virtual time: what fleets would do",
    ),
    "replay": (
        _of("diloco_jax.simulation.commands", "replay_command"),
        "WORKDIR [--until MERGE] [--json]",
        "repeats a recorded run from its tape and compares every merge",
    ),
    "fork": (
        commands.fork_command,
        "WORKDIR --at MERGE [--workdir DIR] [--json] [options]",
        "repeats a recorded run up to a merge, and goes on under other settings",
    ),
    "plan": (
        commands.plan_command,
        "CONFIG [--json] [options]",
        "compiles CONFIG for its TPU slices without one: fit, speed, bandwidth",
    ),
    "launch": (
        commands.launch_command,
        "CONFIG --on sky|gke|tpu_vm [--action create|stop|delete|...] [--dry-run]",
        "makes and starts what runs CONFIG on TPU slices",
    ),
    "rehearse": (
        commands.rehearse_command,
        "CONFIG [--on sky|gke|tpu_vm] [--max-minutes N] [--max-price N] [options]",
        "the first hour: tries what the plan of CONFIG assumes; a page, and what to "
        "change",
    ),
    "data": (
        _of("diloco_jax.data.commands", "data_command"),
        "prepare OUT SOURCES... [--tokenizer PATH] [--sequence-length T]",
        "packed rows of tokens out of text, JSON lines and Parquet",
    ),
    "manifest": (
        _of("diloco_jax.data.commands", "manifest_command"),
        "PATH [--missing]",
        "read large files of text or tokens once, so that no start does",
    ),
    "init": (
        _of("diloco_jax.config.init_command", "init_command"),
        "FILE [--like CONFIG] [--all]",
        "writes a commented config to start from",
    ),
    "completion": (
        _of("diloco_jax.cli", "completion_command"),
        "bash|zsh|fish",
        "prints a script by which the shell completes commands and options",
    ),
    "doctor": (
        _of("diloco_jax.doctor", "doctor_command"),
        "[--folder DIR] [--json]",
        "what is installed here, what jax finds, what the machine gives a run",
    ),
    "certs": (
        _of("diloco_jax.wire.certificates", "certs_command"),
        "DIR --hosts NAME... [--add]",
        "certificates for mutual TLS",
    ),
}


GROUPS = {
    "start": "init doctor run rehearse data manifest completion",
    "watch": "status dashboard eval generate export",
    "operate": "coordinator worker island admit release profile certs",
    "cloud": "plan launch",
    "study": "emulate simulate chaos replay fork",
}
"""Commands by what they are for, in the order of the help."""


def _help() -> str:
    lines = ["usage: diloco COMMAND ...   (diloco COMMAND --help tells more)"]
    for group, names in GROUPS.items():
        lines += ["", group]
        for name in names.split():
            if name in COMMANDS:
                _, usage, does = COMMANDS[name]
                lines += [f"  diloco {name} {usage}", f"      {does}"]
    lines += [
        "",
        "CONFIG is a .py file (diloco init writes one), a run's config.json, or one of",
        f"{', '.join(named_configs())}.",
        "Options such as --sync.quorum 2 or --islands.NAME.batch-size 4 override its",
        "fields.",
        "Exit codes: 0 done, 2 bad arguments or config, 3 refused, 1 anything else.",
    ]
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    script()
