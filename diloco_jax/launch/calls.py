"""Run one command of the cloud's tools, with a deadline and a remedy if it fails."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import NamedTuple

from diloco_jax.launch.resources import Command

UNREACHED = "Could not prepare all"
"""Message of `queued-resources ssh` when it left out machines; it exits with 0."""
NOT_FOUND = re.compile(r"not[ _]found", re.IGNORECASE)

CAPACITY = re.compile(
    r"quota|RESOURCE_EXHAUSTED|STOCKOUT|capacity|insufficient|not available in"
    r"|not supported|accelerator type .* not found|zone .* not found"
    # The cloud's message for a zone that has no TPUs at all.
    r"|Permission denied on 'locations",
    re.IGNORECASE,
)
REMEDIES = {
    r"SERVICE_DISABLED|has not been used in project|is not enabled": (
        "enable the service that the message names: `gcloud services enable SERVICE`"
    ),
    r"PERMISSION_DENIED|Required '.*' permission|Forbidden|does not have .* access": (
        "ask for the role that the message names; docs/tpu.md lists those needed"
    ),
    r"Reauthentication|gcloud auth login|Unauthorized|must be logged in": (
        "log in: `gcloud auth login`; kubectl also needs `gcloud components install "
        "gke-gcloud-auth-plugin`"
    ),
    UNREACHED: (
        "a machine of that slice cannot be reached: `diloco launch` shows the slice's "
        "state, and makes it anew if it was taken away; --only leaves it out"
    ),
    r"matches for kind \"JobSet\"|resource type \"jobset\"": (
        "install JobSet in the cluster; docs/tpu.md says how"
    ),
}
INSTALL = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk)",
    "sky": "install it with `pip install 'skypilot[gcp]'`, and see `sky check gcp`",
    "diloco": "install this package, and put its `diloco` on PATH",
    "kubectl": "install it with `gcloud components install kubectl`",
}


class CommandError(Exception):
    """A command failed: names it, its exit code, its output and the remedy."""


class Result(NamedTuple):
    """The output and the exit code of a command."""

    code: int
    output: str
    errors: str

    @property
    def not_found(self) -> bool:
        """True if the command failed because its object does not exist."""
        return self.code != 0 and bool(NOT_FOUND.search(self.errors))


def attempt(command: Command) -> Result:
    """Run a command to its end; return its result even if it failed.

    Raises CommandError if the program is missing or the deadline passes.
    """
    program = command.arguments[0]
    try:
        done = subprocess.run(
            command.arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=command.deadline_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(
            f"{program} is not on this machine; {INSTALL[program]}"
        ) from error
    except OSError as error:  # No memory or no process left, say.
        raise CommandError(f"{program} could not be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            f"{shlex.join(command.arguments)}\ndid not end within "
            f"{command.deadline_s:g} s; it may go on in the cloud: run the same "
            f"`diloco launch` again, it takes up what is there"
        ) from error
    code = done.returncode or int(UNREACHED in done.stderr)
    return Result(code, done.stdout, done.stderr)


def call(command: Command) -> str:
    """Run a command and return its output; raise CommandError if it fails."""
    result = attempt(command)
    if result.code:
        raise failure(command, result)
    return result.output


def failure(command: Command, result: Result) -> CommandError:
    """Return the error for a command that failed."""
    said = result.errors.strip() or result.output.strip() or "(it said nothing)"
    remedy = "put that right and run the same `diloco launch` again"
    known = [text for pattern, text in REMEDIES.items() if re.search(pattern, said)]
    if command.remedy and CAPACITY.search(said):
        remedy = command.remedy
    elif known:
        remedy = known[0]
    return CommandError(
        f"{shlex.join(command.arguments)}\nexit code {result.code}: {said}\n{remedy}"
    )
