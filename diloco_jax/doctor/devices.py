"""Ask jax for its devices, in a process of its own: a TPU that another process holds
may never answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from diloco_jax.before_jax import skip_absent_tpu
from diloco_jax.doctor.finding import Finding, note, ok, problem, refused
from diloco_jax.errors import ConfigError
from diloco_jax.hardware.tpus import generation_here

ANSWERS_WITHIN_S = 120.0
"""Seconds for jax to find its devices; a slice of many hosts waits for all of them."""
ASK = """
import json, jax
kinds = sorted({d.device_kind for d in jax.devices()})
print(json.dumps([jax.default_backend(), jax.local_device_count(), kinds]))
"""


def check_devices(answers_within_s: float = ANSWERS_WITHIN_S) -> Iterator[Finding]:
    """Yield what jax finds here; on a host of a TPU anything else is a problem."""
    environment = dict(os.environ)
    try:
        skip_absent_tpu(environment)
    except ConfigError as error:
        yield refused("devices", error)
        return
    command = [sys.executable, "-P", "-c", ASK]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=answers_within_s,
        )
    except subprocess.TimeoutExpired:
        yield problem(
            "devices",
            f"jax did not find its devices within {answers_within_s:g} s",
            "end other processes that use the TPU (a TPU serves one at a time), or run "
            "this on all hosts of the slice at once",
        )
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield problem("devices", f"jax ends: {reason}", "see the line of packages")
        return
    backend, count, kinds = json.loads(done.stdout.splitlines()[-1])
    found = f"{count} of {backend}: {', '.join(kinds)}"
    generation = generation_here()
    if generation and backend != "tpu":
        yield problem(
            "devices",
            f"{found}, although this machine has a TPU {generation}",
            "pip install 'diloco-jax[tpu]', and unset JAX_PLATFORMS",
        )
    elif backend == "cpu":
        yield note("devices", found, "islands train on the CPU here")
    else:
        yield ok("devices", found)
