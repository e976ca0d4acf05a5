"""Others fill the coordinator's disk to the last byte: merges wait, islands train on,
and the run goes on when there is space again."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from runtime_support import (
    PATIENCE_S,
    await_that,
    client,
    coordinator,
    make_config,
    placed,
)
from training_support import slowed, trained

from diloco_jax import run_files
from diloco_jax.chaos import strike
from diloco_jax.observability.tape import read_tape

DISK = "160m"
"""Publishes and snapshots leave 64 MB of it free."""


@pytest.fixture
def small_disk():
    """A file system of its own. A run of tests that is killed leaves it, so it is not
    among the folders that the next one cleans up."""
    folder = Path(tempfile.mkdtemp(prefix="diloco-disk-"))
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if subprocess.run(mounting, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def test_a_full_disk_delays_merges_and_ends_nothing(text, small_disk, tmp_path):
    config = placed(make_config(text, cycles=24), time_budget_s=PATIENCE_S)
    config, workdir = slowed(config, 0.05), small_disk / "run"
    with (
        coordinator(config, workdir) as service,
        client(service.address) as observer,
        trained(config, service.address, tmp_path) as hosts,
    ):

        def merges():
            return sum(f.merges for f in service.lead.state.fragments)

        def steps():
            return [host.mailbox.status().steps for host in hosts]

        await_that(lambda: merges() >= 2)
        assert strike.fill(small_disk)
        assert os.statvfs(small_disk).f_bavail == 0

        def waits():
            alerts = observer.status(PATIENCE_S)["alerts"]
            return [text for text in alerts if "waits for space in" in text]

        await_that(waits)
        assert "placement.outage_budget_s" in waits()[0]
        # None is under way any more, so none is missed by the count.
        before, merged = steps(), merges()

        def made():
            return [now - then for now, then in zip(steps(), before, strict=True)]

        await_that(lambda: min(made()) >= 5)
        assert merges() == merged, "a merge without its record"
        strike.free(small_disk)
        await_that(lambda: merges() > merged)
        await_that(lambda: service.lead.finished, 2 * PATIENCE_S)
    summary = json.loads((workdir / run_files.SUMMARY).read_text())
    assert summary["tokens_computed"] == (
        summary["tokens_merged"]
        + sum(summary["tokens_lost"].values())
        + summary["tokens_in_flight"]
    )
    told = [
        line["text"] for line in read_tape(workdir / run_files.TAPE) if "text" in line
    ]
    assert [text for text in told if "waited" in text and "to be written" in text]
    lines = (workdir / run_files.METRICS).read_text().splitlines()
    versions = [
        (line["fragment"], line["version"])
        for line in map(json.loads, lines)
        if line["kind"] == "merge"
    ]
    assert len(versions) == len(set(versions)) == summary["merges"]
