"""The end on a machine without Kubernetes: it gives itself back, or tries again."""

import dataclasses
import fcntl
import os
import time

import pytest
from test_host import Machine, diloco

from diloco_jax import run_files
from diloco_jax.island import loop
from diloco_jax.launch.order import FRUITLESS_STARTS as MOST
from diloco_jax.launch.order import LASTED_S

NOW = 1_800_000_000


def machine(tmp_path, config, name, now=NOW, **settings):
    launch = dataclasses.replace(config.launch, **settings)
    made = Machine(tmp_path / "host", config, name)
    made.render(dataclasses.replace(config, launch=launch), name, now)
    assert made.start("boot") == 0, made.errors
    assert "ExecStopPost=" in made.unit
    made.calls  # noqa: B018  Forgets them.
    return made


def released(made):
    """Commands by which the machine gives itself back."""
    return [call for call in made.calls if " delete " in call]


def last_words(made):
    """Words that the machine told its disk before it gave itself back."""
    told = made.root / "tools/calls"
    lines = told.read_text().splitlines() if told.exists() else []
    word = "compute disks add-labels two-coordinator --zone=us-east5-a"
    before = [line for line in lines if " delete " in line or word in line]
    if before:
        assert word in before[0], "it is told before the machine is gone"
    return [line.rpartition("=")[2] for line in before if word in line]


@pytest.mark.parametrize(
    ("status", "gives_back"),
    [("0", True), ("2", True), ("3", True), ("1", False), ("137", False), ("", False)],
)
def test_an_island_that_ended_for_good_gives_its_slice_back(
    tmp_path, config, status, gives_back
):
    made = machine(tmp_path, config, "two-v6e-b.sh")
    assert made.start("over", EXIT_STATUS=status) == 0, made.errors
    calls = released(made)
    assert bool(calls) == gives_back
    if gives_back:
        assert calls[0].endswith(
            "gcloud --quiet compute tpus queued-resources delete two-v6e-b "
            "--zone=us-east5-b --force --async --project=my-project"
        )


def test_a_machine_may_be_kept(tmp_path, config):
    made = machine(tmp_path, config, "two-v6e-b.sh", when_done="keep")
    assert made.start("over", EXIT_STATUS="0") == 0
    assert released(made) == []


@pytest.mark.parametrize(
    ("phase", "gives_back"), [("done", True), ("stopped", False), ("", False)]
)
def test_a_coordinator_stays_until_the_run_is_done(tmp_path, config, phase, gives_back):
    made = machine(tmp_path, config, "coordinator.sh")
    if phase:
        run = made.root / "mnt/disks/diloco/run"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(f'{{\n  "phase": "{phase}"\n}}')
    # It is 0 too where it was asked to end, as before a reboot.
    assert made.start("over", EXIT_STATUS="0") == 0, made.errors
    assert last_words(made) == (["done"] if gives_back else [])
    calls = released(made)
    assert bool(calls) == gives_back
    if gives_back:
        assert "compute instances delete two-coordinator --zone=us-east5-a" in calls[0]


def test_a_run_that_goes_on_takes_its_last_word_back(tmp_path, config):
    made = machine(tmp_path, config, "coordinator.sh")
    assert made.start("run") == 0, made.errors
    *before, last = made.calls
    assert "--name diloco" in last
    (word,) = [call for call in before if "add-labels" in call]
    assert word.rpartition("diloco-ended=")[2].split()[0] == "goes-on"
    # Without the right to say it, it serves all the same.
    (made.tools / "broken").write_text("add-labels")
    assert made.start("run") == 0, made.errors
    assert "--name diloco" in made.calls[-1]


@pytest.mark.parametrize("status", ["2", "3"])
def test_a_coordinator_that_failed_says_so_to_whoever_watches(tmp_path, config, status):
    made = machine(tmp_path, config, "coordinator.sh")
    run = made.root / "mnt/disks/diloco/run"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"phase": "done"}')
    # Without the right to say it, the machine is given back all the same.
    (made.tools / "broken").write_text("add-labels")
    assert made.start("over", EXIT_STATUS=status) == 0, made.errors
    assert last_words(made) == ["failed"]
    assert len(released(made)) == 1


def test_the_last_hour_ends_both(tmp_path, config):
    now = int(time.time()) - 7201
    for name in ("coordinator.sh", "two-v5p.sh"):
        made = machine(tmp_path / name, config, name, now, max_hours=2.0)
        assert made.start("run", EXIT="1") == 0, made.errors
        assert made.calls == []
        assert made.start("over", EXIT_STATUS="0") == 0
        if name == "coordinator.sh":
            assert last_words(made) == ["hours"]
        assert len(released(made)) == 1


def test_a_process_ends_at_the_last_hour(tmp_path, config):
    made = machine(tmp_path, config, "two-v5p.sh", int(time.time()), max_hours=2.0)
    tool = made.tools / "timeout"
    tool.write_text(
        '#!/bin/bash\n[ "$2" != tail ] || exit 0\n'
        'echo "timeout $*" >>"$TOOLS/calls"; exit 124\n'
    )
    tool.chmod(0o755)
    assert made.start("run") == 124
    words = made.calls[-1].split()
    assert words[:3] == ["timeout", "--foreground", "--kill-after=60"]
    assert 7100 < int(words[3]) <= 7200
    assert words[4:6] == ["docker", "run"]


def test_the_last_hour_is_the_same_however_long_text_was_copied(tmp_path, config):
    now = int(time.time())
    made = machine(tmp_path, config, "two-v5p.sh", now, max_hours=2.0)
    for name, text in (
        ("timeout", '[ "$2" = tail ] || echo "timeout $*" >>"$TOOLS/calls"'),
        # Each look at the clock comes 1000 s after the one before.
        (
            "date",
            f'echo >>"$TOOLS/now"; echo $(({now} + 1000 * $(wc -l <"$TOOLS/now")))',
        ),
    ):
        (made.tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (made.tools / name).chmod(0o755)
    assert made.start("run") == 0, made.errors
    assert made.calls[-1].split()[3] == "5200"


def older(path, seconds):
    """Makes the file as old as if its last change were that much earlier."""
    before = path.stat().st_mtime - seconds
    os.utime(path, (before, before))


@pytest.mark.parametrize("name", ["two-v5p.sh", "coordinator.sh"])
def test_a_crash_loop_ends_however_long_each_start_takes(tmp_path, config, name):
    made = machine(tmp_path, config, name)
    count = made.root / "var/lib/diloco/crashes"
    (made.tools / "broken").write_text("pull")
    for attempt in range(3):
        assert made.start("run") == 1
        assert count.read_text().split() == [f"{attempt + 1}"]
        # It has copied text for two hours.
        older(count, 7200)
    count.write_text(f"{MOST}\n")
    older(count, 7200)
    made.calls  # noqa: B018
    assert made.start("run") == 2
    (told,) = made.calls
    assert "--entrypoint echo" in told


def fruitless(made, **environment):
    """Starts it until it gives up; returns how often, and what it said then."""
    for starts in range(100):
        if made.start("run", **environment) == 2:
            return starts, made.said
    raise AssertionError("it never gives up")


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
def test_starts_that_fail_before_a_hello_end_after_twenty_and_say_where(
    tmp_path, config, name, broken, why
):
    settings = {"data": "gs://bucket/text", "secrets": {"HF_TOKEN": "hub-token"}}
    made = machine(tmp_path, config, name, **settings)
    if broken:
        (made.tools / "broken").write_text(broken)
    starts, said = fruitless(made, EXIT="1")
    assert starts == MOST == 20
    assert f"{MOST} starts in a row" in said
    assert said.rstrip().endswith(why)
    *calls, told = made.calls
    # It outlives the machine, and is found where the run's other lines are.
    assert "--log-driver gcplogs --label diloco-run=two --label diloco-part=" in told
    assert told.endswith(said.rstrip())
    pauses = [int(call.split()[1]) for call in calls if call.startswith("sleep ")]
    assert pauses == sorted(pauses)
    assert 1500 < sum(pauses) < 3600, "a registry that is away for half an hour"
    # 2 gives the machine back; whoever kept it may try as often again.
    assert made.start("over", EXIT_STATUS="2") == 0
    assert len(released(made)) == 1
    assert made.start("run", EXIT="1") == 1


def test_the_config_says_how_many_starts_are_too_many(tmp_path, config):
    placement = dataclasses.replace(config.placement, fruitless_starts=3)
    few = dataclasses.replace(config, placement=placement)
    made = machine(tmp_path, few, "two-v5p.sh")
    (made.tools / "broken").write_text("pull")
    assert fruitless(made)[0] == 3


def test_an_end_that_was_asked_for_is_no_crash(tmp_path, config):
    made = machine(tmp_path, config, "two-v5p.sh")
    count = made.root / "var/lib/diloco/crashes"
    assert made.start("run", EXIT="1") == 1
    assert made.start("run", EXIT="1") == 1
    assert made.start("stopping") == 0, made.errors
    assert count.read_text().split() == ["2"], "it ended by itself"
    assert made.start("stopping", MAINPID="17") == 0, made.errors
    assert made.start("run", EXIT="1") == 1
    assert count.read_text().split() == ["1"]


def test_a_full_disk_hides_no_crash(tmp_path, config):
    """Files are written in place: they take neither more room nor less."""
    made = machine(tmp_path, config, "two-v5p.sh", data="gs://bucket/text")
    (made.tools / "broken").write_text("rsync")
    assert made.start("run") == 1
    held = []
    for name in ("crashes", "begun"):
        path = made.root / "var/lib/diloco" / name
        held.append(os.memfd_create(name, os.MFD_ALLOW_SEALING))
        os.write(held[-1], path.read_bytes())
        sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(held[-1], fcntl.F_ADD_SEALS, sealed)
        path.unlink()
        path.symlink_to(f"/proc/{os.getpid()}/fd/{held[-1]}")
    try:
        starts, said = fruitless(made)
    finally:
        for file in held:
            os.close(file)
    assert starts == MOST - 1
    assert said.rstrip().endswith("copy of gs://bucket/text")


def test_both_mean_the_same_ten_minutes(tmp_path, config):
    assert loop.LASTS_S == LASTED_S == 600


@pytest.mark.parametrize(
    ("text", "code", "left"),
    [
        ("1764000000 3\n", 1, ["4"]),
        (f"1764000000 {MOST}\n", 2, []),
        ("", 1, ["1"]),
        ("\0\0\n", 1, ["1"]),
    ],
    ids=["of an earlier version", "and too many", "empty", "damaged"],
)
def test_a_count_of_crashes_that_is_no_number_fails_no_start(
    tmp_path, config, text, code, left
):
    made = machine(tmp_path, config, "two-v5p.sh")
    count = made.root / "var/lib/diloco/crashes"
    count.write_text(text)
    made.calls  # noqa: B018
    assert made.start("run", EXIT="1") == code, made.errors
    assert (count.read_text().split() if count.exists() else []) == left
    assert any("--name diloco" in call for call in made.calls) == (code == 1)


def test_lasting_progress_ends_a_row_of_crashes(tmp_path, config):
    island = machine(tmp_path / "island", config, "two-v5p.sh")
    count = island.root / "var/lib/diloco/crashes"
    mark = island.root / "var/lib/diloco/run" / run_files.LASTED
    mark.touch()
    older(mark, 100)
    for before, expected in ((MOST, 2), (MOST - 1, 1)):
        count.write_text(f"{before}\n")
        assert island.start("run", EXIT="1") == expected
    assert count.read_text().split() == [f"{MOST}"]
    mark.touch()
    assert island.start("run", EXIT="1") == 1
    assert count.read_text().split() == ["1"]


def test_a_coordinator_that_merged_for_ten_minutes_is_in_no_crash_loop(
    tmp_path, config
):
    made = machine(tmp_path, config, "coordinator.sh")
    count = made.root / "var/lib/diloco/crashes"
    publish = made.root / "mnt/disks/diloco/run" / run_files.PUBLISHES / "0"
    publish.parent.mkdir(parents=True)
    for lived_s, left in ((300, MOST), (700, 1)):
        count.write_text(f"{MOST - 1}\n")
        older(count, lived_s)
        publish.touch()
        assert made.start("run", EXIT="1") == 1
        assert count.read_text().split() == [f"{left}"]


@pytest.mark.parametrize("may_log", [True, False])
def test_logs_outlive_the_machine_if_it_may_write_them(tmp_path, config, may_log):
    made = machine(tmp_path, config, "two-v5p.sh")
    if not may_log:
        (made.tools / "broken").write_text("--entrypoint true")
    assert made.start("run") == 0, made.errors
    ran = made.calls[-1]
    assert ("--log-driver gcplogs --label diloco-run=two" in ran) == may_log
    assert ("--log-driver none" in ran) != may_log


def test_only_islands_are_privileged(tmp_path, config):
    for name, privileged in (("two-v5p.sh", True), ("coordinator.sh", False)):
        made = machine(tmp_path / name, config, name)
        assert made.start("run") == 0, made.errors
        assert (" --privileged " in made.calls[-1]) == privileged


def test_a_machine_of_sky_counts_by_its_clock_and_registers_its_address(
    tmp_path, config
):
    from diloco_jax.launch.host import coordinator_script, island_script
    from diloco_jax.launch.order import make_order

    place = {"coordinator_address": "c.diloco.internal", "dns_zone": "diloco"}
    launch = dataclasses.replace(config.launch, **place)
    order = make_order(dataclasses.replace(config, launch=launch), "two.py", "sky")
    island = machine(tmp_path / "island", config, "two-v5p.sh")
    island.put(
        island_script(order, order.islands[0], "c.diloco.internal:7077", NOW, ())
    )
    before = int(time.time())
    assert island.start("prepare") == 0, island.errors
    assert island.start("run") == 0, island.errors
    assert int(diloco(island).rpartition(" ")[2]) >= before
    assert island.start("over", EXIT_STATUS="0") == 0
    assert released(island) == []
    made = machine(tmp_path / "coordinator", config, "coordinator.sh")
    made.put(coordinator_script(order, "c.diloco.internal:7077", NOW, ()))
    tool = made.tools / "hostname"
    tool.write_text("#!/bin/bash\necho 10.1.2.3 172.17.0.1\n")
    tool.chmod(0o755)
    assert made.start("run") == 0, made.errors
    (update,) = [call for call in made.calls if "record-sets update" in call]
    assert update.endswith(
        "dns record-sets update c.diloco.internal. --zone diloco --type A "
        "--project my-project --ttl 5 --rrdatas 10.1.2.3"
    )
    (made.tools / "broken").write_text("record-sets describe")
    assert made.start("run") == 0, made.errors
    assert any("record-sets create" in call for call in made.calls)
