"""A machine without Kubernetes after the end of its process: it tries again, or gives
itself back."""

import fcntl
import os
import time

import pytest
from gke_support import changed
from test_host import Machine, prepared

from diloco_jax import run_files
from diloco_jax.island import loop
from diloco_jax.launch.spec import FRUITLESS_STARTS as MOST
from diloco_jax.launch.spec import make_spec
from diloco_jax.launch.tpu_vm import LASTED_S, coordinator_script, island_script

BOTH = ("two-v5p.sh", "coordinator.sh")
GIVES_BACK = {
    "two-v5p.sh": "compute tpus queued-resources delete two-v5p --zone=us-east5-a "
    "--force --async --project=my-project",
    "coordinator.sh": "compute instances delete two-coordinator --zone=us-east5-a "
    "--project=my-project",
}


def few(config, starts):
    """The config by which so many starts are too many."""
    return config.replace("fruitless_starts", starts)


def serve(machine, *codes, **environment):
    """Lets the process end so, start by start; returns the exit code, how often it
    started, and how the machine gave itself back."""
    (machine.tools / "started").unlink(missing_ok=True)
    (machine.tools / "codes").write_text("".join(f"{code}\n" for code in codes))
    code = machine.start("serve", **environment)
    calls = machine.calls
    machine.pauses = [int(c.split()[1]) for c in calls if c.startswith("sleep ")]
    machine.told = [c for c in calls if "--entrypoint echo" in c]
    started = [c for c in calls if "--name diloco" in c]
    gone = [c.partition("gcloud --quiet ")[2] for c in calls if " delete " in c]
    return code, len(started), gone


def summarize(machine, phase):
    run = machine.root / "mnt/disks/diloco/run"
    run.mkdir(parents=True, exist_ok=True)
    (run / run_files.SUMMARY).write_text(f'{{\n  "phase": "{phase}"\n}}')


@pytest.mark.parametrize("name", BOTH)
def test_crashes_are_repeated_and_nothing_else(tmp_path, config, name):
    machine = prepared(tmp_path / "gives", config, name)
    summarize(machine, "done")
    given_back = [GIVES_BACK[name]]
    for codes in ((0,), (2,), (3,), (1, 137, 0), (1, 3)):
        assert serve(machine, *codes) == (codes[-1], len(codes), given_back)
    # Without the right to it, or if another host has done it already.
    (machine.tools / "broken").write_text(" delete ")
    assert serve(machine, 1, 3) == (3, 2, given_back)
    kept = prepared(tmp_path / "kept", config, name, when_done="keep")
    summarize(kept, "done")
    assert serve(kept, 0) == (0, 1, [])


def test_a_coordinator_stays_until_the_run_is_done(tmp_path, config):
    """It ends with 0 too where it was asked to end, as before a reboot."""
    machine = prepared(tmp_path, config, "coordinator.sh")
    assert serve(machine, 0, 0, 3) == (3, 3, [GIVES_BACK["coordinator.sh"]])
    summarize(machine, "stopped")
    assert serve(machine, 0, 2)[:2] == (2, 2)


@pytest.mark.parametrize("name", BOTH)
def test_the_last_hour_ends_it(tmp_path, config, name):
    made = Machine(tmp_path, config, name)
    made.render(config, name, int(time.time()) - 7201, max_hours=2.0)
    assert serve(made, 1) == (0, 0, [GIVES_BACK[name]])
    assert "launch.max_hours are over" in made.said


def test_a_process_ends_at_the_last_hour_however_long_text_was_copied(tmp_path, config):
    now = int(time.time())
    made = prepared(tmp_path, config, "two-v5p.sh")
    made.render(config, "two-v5p.sh", now, max_hours=2.0)
    told = '[ "$2" = tail ] || { echo "timeout $*" >>"$TOOLS/calls"; exit 124; }'
    made.tool("timeout", told)
    # Each look at the clock comes 1000 s after the one before.
    later = f'echo $(({now} + 1000 * $(wc -l <"$TOOLS/now")))'
    made.tool("date", f'echo >>"$TOOLS/now"; {later}')
    assert made.start("run") == 124, made.errors
    words = made.calls[-1].split()
    assert words[:3] == ["timeout", "--foreground", "--kill-after=60"]
    # The looks before: at the start, for the incarnation, and after the copy.
    assert words[3:6] == ["4200", "docker", "run"]


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("two-v5p.sh", "pull", "pull of us-docker.pkg.dev/my-project/diloco/diloco:1"),
        ("two-v5p.sh", "--out-file", "the secret two-v5p-certificates"),
        ("two-v5p.sh", "rsync", "copy of gs://bucket/text"),
        ("two-v5p.sh", "--secret hub-token", "hub-token (launch.secrets)"),
        ("two-v5p.sh", "", "`diloco`, whose own log says why"),
        ("coordinator.sh", "versions describe", "the secret two-coordinator-begin"),
    ],
)
def test_starts_that_come_to_nothing_end_and_say_where(
    tmp_path, config, name, broken, why
):
    settings = {"data": "gs://bucket/text", "secrets": {"HF_TOKEN": "hub-token"}}
    made = prepared(tmp_path, few(config, 3), name, **settings)
    if broken:
        (made.tools / "broken").write_text(broken)
    code, _, gone = serve(made, *(9 * [1]))
    # Nobody repeats 2.
    assert (code, gone) == (2, [GIVES_BACK[name]])
    assert "3 starts in a row" in made.said
    assert made.said.rstrip().endswith(why)
    # It outlives the machine, and is found where the run's other lines are.
    (told,) = made.told
    assert "--log-driver gcplogs --label diloco-run=two --label diloco-part=" in told
    assert told.endswith(made.said.rstrip())


def test_a_registry_may_be_away_for_half_an_hour(tmp_path, config):
    made = prepared(tmp_path, config, "two-v5p.sh")
    (made.tools / "broken").write_text("pull")
    assert serve(made)[0] == 2
    assert len(made.pauses) == MOST - 1 == 19
    assert made.pauses == sorted(made.pauses)
    assert 1500 < sum(made.pauses) < 3600


def test_lasting_progress_ends_a_row_of_crashes(tmp_path, config):
    """Ten minutes of steps, or in which a coordinator merged: here none."""
    assert loop.LASTS_S == LASTED_S == 600
    mark = "var/lib/diloco/run/lasted"
    publish = "mnt/disks/diloco/run/publishes"
    for name, made_progress in ((BOTH[0], mark), (BOTH[1], publish)):
        made = prepared(tmp_path / name, few(config, 4), name)
        script = made.script.read_text()
        assert "LASTED_S=600" in script
        made.script.write_text(script.replace("LASTED_S=600", "LASTED_S=0"))
        path = made.root / made_progress
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        docker = made.tools / "docker"
        text = docker.read_text()
        assert serve(made, *(9 * [1]))[:2] == (2, 4), "what was there before"
        # Every third start gets so far.
        touches = (
            f'(( $(wc -l <"$TOOLS/started") % 3 )) || touch -d "2 seconds" "{path}"'
        )
        docker.write_text(text.replace("      exit", f"      {touches}\n      exit", 1))
        assert serve(made, *(8 * [1]), 3)[:2] == (3, 9)


def test_a_coordinator_of_sky_registers_its_address(tmp_path, config):
    place = {"coordinator_address": "c.diloco.internal", "dns_zone": "diloco"}
    spec = make_spec(changed(config, **place), "two.py", "sky")
    island = prepared(tmp_path / "island", config, "two-v5p.sh")
    address, now = "c.diloco.internal:7077", int(time.time())
    island.put(island_script(spec, spec.islands[0], address, now, ()))
    assert serve(island, 1, 0) == (0, 2, []), "SkyPilot gives it back"
    made = prepared(tmp_path / "coordinator", config, "coordinator.sh")
    made.put(coordinator_script(spec, address, now, ()))
    made.tool("hostname", "echo 10.1.2.3 172.17.0.1")
    assert made.start("run") == 0, made.errors
    calls = made.calls
    (update,) = [call for call in calls if "record-sets update" in call]
    assert update.endswith(
        "dns record-sets update c.diloco.internal. --zone diloco --type A "
        "--project my-project --ttl 5 --rrdatas 10.1.2.3"
    )
    (made.tools / "broken").write_text("record-sets describe")
    assert made.start("run") == 0, made.errors
    assert any("record-sets create" in call for call in made.calls)


def test_a_full_disk_hides_no_reason(tmp_path, config):
    """The file is written in place: it takes neither more room nor less."""
    made = prepared(tmp_path, few(config, 3), "two-v5p.sh", data="gs://bucket/text")
    (made.tools / "broken").write_text("rsync")
    assert made.start("run") == 1
    path = made.root / "var/lib/diloco/begun"
    held = os.memfd_create("begun", os.MFD_ALLOW_SEALING)
    try:
        os.write(held, path.read_bytes())
        fcntl.fcntl(held, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path.unlink()
        path.symlink_to(f"/proc/{os.getpid()}/fd/{held}")
        assert serve(made)[0] == 2
    finally:
        os.close(held)
    assert made.said.rstrip().endswith("copy of gs://bucket/text")
