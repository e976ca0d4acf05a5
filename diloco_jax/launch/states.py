"""The state of what there is in the cloud: in words, and what follows from them."""

from __future__ import annotations

import json
import re
from typing import Any

from diloco_jax.launch.calls import CommandError, attempt, failure
from diloco_jax.launch.resources import Resource

HEARD_S = 300.0
"""Seconds since the last sign of an island for which its slice is taken to work,
whatever the cloud says."""
MISSING = "MISSING"
"""State of machines that are not there."""
NO_JOBS = "No in-progress managed jobs"
"""Answer of `sky jobs queue` as long as nobody has launched any."""


def state_of(resource: Resource) -> str:
    """Return the state in words, on one line, and that of the machines inside; empty if
    the resource is missing. Raises CommandError if it cannot be looked at."""
    state = _own_state(resource)
    if resource.inside is None or state != resource.holds:
        return state
    result = attempt(resource.inside)
    if result.code and not result.not_found:
        raise failure(resource.inside, result)
    inside = MISSING if result.code else result.output
    return " ".join([state, *inside.split()])


def is_heard(islands: dict[str, Any], name: str) -> bool:
    """Tell whether a status' islands say that there was a sign of this one lately."""
    silent = islands.get(name, {}).get("silent_seconds")
    return silent is not None and silent < HEARD_S


def is_unwell(state: str, resource: Resource) -> bool:
    """Tell whether the machines in it are in another state than good ones."""
    words = state.split()
    holds = words[:1] == [resource.holds]
    return holds and not set(words) <= set(resource.well)


def _own_state(resource: Resource) -> str:
    result = attempt(resource.find)
    if resource.job and NO_JOBS in result.output + result.errors:
        return ""
    if result.code and not result.not_found:
        raise failure(resource.find, result)
    if resource.job and not result.code:
        return _state_of_job(result.output, resource)
    return "" if result.code else " ".join(result.output.split())


def _state_of_job(text: str, resource: Resource) -> str:
    """Return the state of the newest job of that name; empty if it is dead."""
    begins = re.search(r"^\[", text, re.MULTILINE)  # After what else it says.
    if begins is None:
        raise CommandError(f"`sky jobs queue` printed no list of jobs: {text!r}")
    try:
        queue = json.loads(text[begins.start() :])
        jobs = [job for job in queue if job["job_name"] == resource.job]
        newest = max(jobs, key=lambda job: job["job_id"], default={"status": ""})
        state = str(newest["status"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"`sky jobs queue` printed a list that is not understood ({error!r}): "
            f"{text!r}"
        ) from error
    return "" if state in resource.dead else state
