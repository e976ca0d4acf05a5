"""The script of every machine without Kubernetes: what one start of it does, with tools
that tell what they do."""

import io
import os
import re
import shutil
import subprocess
import tarfile
import time

import pytest
from gke_support import changed

from diloco_jax.config.loading import read_config_json
from diloco_jax.launch.spec import make_spec
from diloco_jax.launch.tpu_vm import deployment

HUB, GOOGLE = "docker.io/me/diloco", "us-docker.pkg.dev/my-project/diloco/diloco"
DIGEST = f"sha256:{'0' * 64}"
NOW = 1_800_000_000
WAIT_S = 120.0

DOCKER = """\
echo "docker $*" >>"$TOOLS/calls"
[ "$1" != login ] || cat >"$TOOLS/password"
case "$*" in
  *"print-access-token"*) echo token ;;
  *"--out-file"*) cp "$TOOLS/secret.tar" "${!#}" ;;
  *"versions describe 1 --secret two-coordinator-begin"*)
    cat "$TOOLS/permit" 2>/dev/null || echo ENABLED ;;
  *"versions destroy 1 --secret two-coordinator-begin"*)
    echo DESTROYED >"$TOOLS/permit" ;;
  *"--secret hub-token"*) printf 'two\nlines\n' ;;
  *" manifest --missing "*) exit 2 ;;
  *"--name diloco"*)
    printf '%s' "${HF_TOKEN-none}" >"$TOOLS/token"
    if [ -e "$TOOLS/next.tar" ]; then
      mv "$TOOLS/next.tar" "$TOOLS/secret.tar"
      timeout 60 "$TOOLS/await" "$AWAITED" || exit 9
    fi
    if [ -e "$TOOLS/codes" ]; then
      echo >>"$TOOLS/started"
      exit "$(sed -n "$(wc -l <"$TOOLS/started")p" "$TOOLS/codes")"
    fi
    exit "${EXIT:-0}" ;;
esac
[ ! -e "$TOOLS/broken" ] || [[ $* != *"$(cat "$TOOLS/broken")"* ]] || exit 2
"""
AWAIT = 'until grep -s new "$1"; do /bin/sleep 0.05; done'
TOOL = 'echo "${0##*/} $*" >>"$TOOLS/calls"\n'


class Machine:
    """A folder in the place of a machine's `/`."""

    def __init__(self, root, config, name, **settings):
        self.root = root
        self.tools = root / "tools"
        self.tools.mkdir(parents=True)
        for folder in ("etc/systemd/system", "sys/kernel/mm/transparent_hugepage"):
            (root / folder).mkdir(parents=True)
        self.tool("docker", DOCKER)
        self.tool("await", AWAIT)
        for tool in ("sysctl", "systemctl", "iptables", "mount", "mkfs.ext4", "sleep"):
            self.tool(tool, TOOL)
        for tool in ("mountpoint", "blkid"):
            self.tool(tool, f"{TOOL}exit 1")
        self.pack("secret.tar", "island.v6e.b.key", "a key")
        self.render(config, name, **settings)

    def tool(self, name, text):
        """Puts a command there."""
        (self.tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.tools / name).chmod(0o755)

    def render(self, config, name, now=NOW, source="", **settings):
        """Puts the rendered script there, with this folder as `/`."""
        config = changed(config, **settings)
        spec = make_spec(config, "two.py", "tpu_vm", source)
        self.put(deployment(spec, "certificates", "folder", now).files[name])

    def pack(self, archive, name, text):
        """Make what the machine gets from Secret Manager, of one file."""
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(text), 0o600
        with tarfile.open(self.tools / archive, "w") as tar:
            tar.addfile(entry, io.BytesIO(text.encode()))

    def put(self, text):
        """Puts a script there, with this folder as `/`."""
        for place in ("/var/lib/", "/etc/systemd", "/sys/kernel", "/mnt/disks"):
            text = text.replace(place, f"{self.root}{place}")
        self.script = self.root / "startup"
        self.script.write_text(text)

    def start(self, verb, **environment):
        """Runs the script; returns its exit code."""
        path = f"{self.tools}:/usr/bin:/bin"
        done = subprocess.run(
            ["/bin/bash", self.script, verb],
            env={**environment, "PATH": path, "TOOLS": str(self.tools)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        self.said, self.errors = done.stdout, done.stderr
        return done.returncode

    @property
    def unit(self):
        """The service as it is installed."""
        return (self.root / "etc/systemd/system/diloco.service").read_text()

    @property
    def calls(self):
        """Return the commands run so far, and forget them."""
        path = self.tools / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.replace(str(self.root), "") for line in found]


def prepared(root, config, name, **settings):
    """A machine after the first lines of its service."""
    made = Machine(root, config, name, **settings)
    assert made.start("prepare") == 0, made.errors
    made.calls  # noqa: B018  Forgets them.
    return made


@pytest.fixture
def island(tmp_path, config):
    return prepared(tmp_path / "island", config, "two-v6e-b.sh")


@pytest.fixture
def coordinator(tmp_path, config):
    return prepared(tmp_path / "coordinator", config, "coordinator.sh")


def diloco(machine):
    """Return the last command's part after the image's name."""
    return machine.calls[-1].partition("/diloco/diloco:1 ")[2]


def seen(call):
    """Folders of the machine that a container sees, as it sees them."""
    return {v.partition(":")[2] for v in re.findall(r"--volume (\S+)", call)}


def test_a_boot_installs_the_service_and_starts_it(tmp_path, config):
    machine = Machine(tmp_path / "host", config, "two-v6e-b.sh")
    assert machine.start("boot") == 0, machine.errors
    assert machine.calls == [
        "systemctl daemon-reload",
        "systemctl start --no-block diloco",
    ]
    started = re.search(r"^ExecStart=/bin/bash (\S+) serve$", machine.unit, re.M)[1]
    assert started == f"{machine.root}/var/lib/diloco/host.sh"
    assert (machine.root / "var/lib/diloco/host.sh").read_text() == (
        machine.script.read_text()
    )
    assert machine.start("boot") == 0  # Boots come again.


def test_a_machine_is_prepared_for_what_it_runs(tmp_path, config):
    for name, ports in (("two-v6e-b.sh", []), ("coordinator.sh", [7077, 7078])):
        machine = Machine(tmp_path / name, config, name)
        assert machine.start("prepare") == 0, machine.errors
        rules = [call for call in machine.calls if call.startswith("iptables")]
        for rule, port in zip(rules, ports, strict=True):
            assert f"--dport {port} --jump ACCEPT" in rule
        pages = machine.root / "sys/kernel/mm/transparent_hugepage/enabled"
        assert pages.exists() == (not ports)
        read = read_config_json(machine.root / "var/lib/diloco/config/config.json")
        assert read.run == config.run
        assert read.islands["v6e.b"].hosts == 4


def test_an_island_runs_with_certificates_and_a_new_incarnation(island):
    before = int(time.time())
    assert island.start("run") == 0, island.errors
    calls = island.calls
    key = island.root / "var/lib/diloco/certificates/island.v6e.b.key"
    assert key.read_text() == "a key"
    assert key.parent.joinpath("island.tar").stat().st_mode & 0o077 == 0
    assert "--secret two-v6e-b-certificates --project my-project" in " ".join(calls)
    assert (island.tools / "password").read_text() == "token\n"
    assert not any("rsync" in call for call in calls)
    assert "docker rm --force diloco" in calls
    assert "--network host" in calls[-1]
    assert "--env JAX_PLATFORMS=tpu,cpu" in calls[-1]
    assert calls[-1].endswith(
        "island /var/lib/diloco/config/config.json --name v6e.b --coordinator "
        "two-coordinator.us-east5-a.c.my-project.internal:7077 --workdir "
        "/var/lib/diloco/run --certificates /var/lib/diloco/certificates "
        f"--notice-s 25 --incarnation {calls[-1].split()[-1]}"
    )
    assert before <= int(calls[-1].split()[-1]) <= time.time()


@pytest.mark.parametrize(
    ("name", "file"),
    [("coordinator.sh", "revoked.txt"), ("two-v6e-b.sh", "island.v6e.b.pem")],
)
def test_changed_certificates_reach_a_process_that_runs(tmp_path, config, name, file):
    machine = prepared(tmp_path / "host", config, name)
    every = "FOLLOW_S=60" if name == "coordinator.sh" else "FOLLOW_S=600"
    script = machine.script.read_text()
    assert every in script
    machine.script.write_text(script.replace(f"{every}\n", "FOLLOW_S=0.1\n"))
    machine.pack("secret.tar", file, "old")
    machine.pack("next.tar", file, "new")
    there = machine.root / "var/lib/diloco/certificates" / file
    # The process ends once it has read the new one.
    assert machine.start("run", AWAITED=str(there)) == 0, machine.errors
    assert there.read_text() == "new"
    assert there.stat().st_mode & 0o077 == 0
    assert there.stat().st_mtime > 1e9, "or nobody would notice that it changed"


def test_a_coordinator_begins_a_run_on_its_new_disk(coordinator):
    assert coordinator.start("run") == 0, coordinator.errors
    calls = coordinator.calls
    assert "JAX_PLATFORMS" not in calls[-1]
    (made,) = [call for call in calls if call.startswith("mkfs")]
    device = "/dev/disk/by-id/google-two-coordinator"
    assert made == f"mkfs.ext4 -q {device}"
    assert f"mount -o discard {device} /mnt/disks/diloco" in calls
    assert "--volume /mnt/disks/diloco/run:/var/lib/diloco/run" in calls[-1]
    assert calls[-1].endswith("--init")
    assert "--bind 0.0.0.0:7077" in calls[-1]
    assert "--incarnation" not in calls[-1]


LOG, DISK = "mnt/disks/diloco/run/log", "mnt/disks/diloco"
WEIGHTS = "hf:gs://bucket/a b"
SCENES = {
    "from weights": (["weights", "run"], f"--init {WEIGHTS}"),
    # The first process ended before it had begun the run.
    "again": (["crash", "crash"], "--init"),
    "a day late": (["cannot pull", "crash"], "--init"),
    "with the run on its disk": (["log", "has a file system", "run"], ""),
    "on a disk that replaces a lost one": (["crash", "lost disk", "run"], ""),
    "with what is left of a run": (["run", "log", "run", "no log", "run"], ""),
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_run_begins_once_on_one_disk(coordinator, config, scene):
    """However late its first start is."""
    steps, ends = SCENES[scene]
    root, broken = coordinator.root, coordinator.tools / "broken"
    for step in steps:
        if step == "weights":
            coordinator.render(config, "coordinator.sh", source=WEIGHTS)
        elif step == "cannot pull":
            broken.write_text("pull")
            assert coordinator.start("run") == 1
            broken.unlink()
        elif step == "has a file system":
            shutil.copy("/bin/true", coordinator.tools / "blkid")
        elif step == "log":
            (root / LOG).mkdir(parents=True)
        elif step == "no log":
            (root / LOG).rmdir()
        elif step == "lost disk":
            shutil.rmtree(root / DISK)
        else:
            coordinator.calls  # noqa: B018  Forgets them.
            code = int(step == "crash")
            assert coordinator.start("run", EXIT=str(code)) == code
    calls = coordinator.calls
    assert calls[-1].endswith(ends)
    assert ("--init" in calls[-1]) == bool(ends)
    assert any(call.startswith("mkfs") for call in calls) == ("run on" not in scene)
    told = "begun on another disk" in coordinator.said
    assert told == ("lost" in scene or "left" in scene)


@pytest.mark.parametrize("broken", ["versions describe", "versions destroy"])
def test_a_permit_is_neither_lost_nor_given_twice_by_a_start_that_is_cut_off(
    coordinator, broken
):
    (coordinator.tools / "broken").write_text(broken)
    assert coordinator.start("run") == 1
    assert not any("--name diloco" in call for call in coordinator.calls)
    (coordinator.tools / "broken").unlink()
    assert coordinator.start("run") == 0
    assert diloco(coordinator).endswith("--init")
    assert (coordinator.tools / "permit").read_text() == "DESTROYED\n"


@pytest.mark.parametrize("max_hours", [0.0, 2.0])
def test_signals_reach_diloco(island, config, max_hours):
    """The script becomes `docker run`: systemd's SIGTERM goes there. With a last hour
    it becomes `timeout`, which passes it on."""
    island.render(config, "two-v6e-b.sh", int(time.time()), max_hours=max_hours)
    waits = "trap 'kill $!; exit 41' TERM; echo up; /bin/sleep 600 >/dev/null & wait"
    island.tool("docker", DOCKER.replace('exit "${EXIT:-0}"', waits))
    environment = {"PATH": f"{island.tools}:/usr/bin:/bin", "TOOLS": str(island.tools)}
    with subprocess.Popen(
        ["/bin/bash", island.script, "run"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, 15)
        assert process.wait(WAIT_S) == 41


# ---- containers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "driver"), [("", "gcplogs"), ("--entrypoint true", "none")]
)
def test_a_machine_that_may_not_write_to_the_clouds_log_runs_without(
    island, broken, driver
):
    (island.tools / "broken").write_text(broken or "nothing")
    assert island.start("run") == 0, island.errors
    *_, last = island.calls
    assert f" --log-driver {driver} " in last
    assert ("--label diloco-run=two" in last) == (driver == "gcplogs")


@pytest.mark.parametrize(
    ("image", "is_there", "logs_in", "pulls"),
    [
        (f"{GOOGLE}@{DIGEST}", False, True, True),
        (f"{GOOGLE}@{DIGEST}", True, False, False),
        ("gcr.io/my-project/diloco:1", True, True, True),
        ("eu.gcr.io/my-project/diloco:1", True, True, True),
        ("localhost.example:5000/diloco:1", True, False, True),
        (f"{HUB}@{DIGEST}", True, False, False),
    ],
)
def test_an_image_is_pulled_where_it_may_be_another_one(
    tmp_path, config, image, is_there, logs_in, pulls
):
    machine = prepared(tmp_path / "host", config, "two-v5p.sh", image=image)
    if not is_there:
        (machine.tools / "broken").write_text("image inspect")
    assert machine.start("run") == 0, machine.errors
    calls = machine.calls
    told = [call for call in calls if call.startswith("docker login")]
    host = image.split("/")[0]
    assert [call.split()[-1] for call in told] == [f"https://{host}"] * logs_in
    assert (machine.tools / "password").exists() == logs_in
    assert (f"docker pull --quiet {image}" in calls) == pulls
    assert f" {image} island " in calls[-1]


@pytest.mark.parametrize("name", ["two-v5p.sh", "coordinator.sh"])
def test_each_container_sees_what_it_needs(tmp_path, config, name):
    """And no argument has the value of a secret, nor a coordinator an island's rights.
    A bad text is `diloco`'s own to tell, with the exit code that means it."""
    environment = {"HF_HOME": "/a b", "v5p:XLA_FLAGS": "--a=1 --b=2"}
    given = {"environment": environment, "secrets": {"HF_TOKEN": "hub-token"}}
    machine = prepared(tmp_path, config, name, data="gs://bucket/text", **given)
    assert machine.start("run", EXIT="2") == 2
    *before, made, last = calls = machine.calls
    root, island = "/var/lib/diloco", name == "two-v5p.sh"
    data = f"{root}/data"
    own = {f"{root}/config:ro", f"{root}/certificates:ro", data}
    assert seen(last) == own | {f"{root}/run"}
    assert made.endswith(f"/diloco/diloco:1 manifest --missing {data}")
    for call in (*before, made):
        needs = {f"{root}/certificates.new"} if "--out-file" in call else set()
        if " rsync " in call or call == made:
            needs = {data}
        assert seen(call) == needs, call
    assert "--env=HF_HOME=/a b " in last
    assert ("--env=XLA_FLAGS=--a=1 --b=2 " in last) == island
    assert "--env HF_TOKEN " in last
    assert (machine.tools / "token").read_text() == "two\nlines"
    assert not any("lines" in call for call in calls)
    assert (" --privileged " in last) == island
    assert machine.start("serve", EXIT="2") == 2
    assert seen(machine.calls[-1]) == set(), "it gives itself back"
