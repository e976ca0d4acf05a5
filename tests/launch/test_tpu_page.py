"""docs/tpu.md, gke.md and the page of TPU VMs: the config launches, and the command
lines are ones that exist."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from fake_cloud import parse_gcloud, parse_kubectl

from diloco_jax import checkpoint, cli
from diloco_jax.config.loading import read_config
from diloco_jax.launch import sky

ROOT = Path(__file__).parents[2]
NAMES = ("docs/tpu.md", "docs/gke.md", "launch/tpu_vm/README.md")
PAGE = "\n".join((ROOT / name).read_text() for name in NAMES)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


LINES = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A folder with the page's config where the page says."""
    (tmp_path / "configs").mkdir()
    (block,) = blocks("python")
    (tmp_path / "configs" / "two_slices.py").write_text(block)
    monkeypatch.chdir(tmp_path)


def test_the_pages_config_passes_the_plan_and_waits_for_a_slice(configs, capsys):
    """As long as its first slice trains alone, at a usual share of peak: half of an
    hour for which a second slice may come later, at least."""
    words = ["plan", "configs/two_slices.py", "--arithmetic", "--json"]
    assert cli.main([*words, "--share", "0.4"]) == 0, capsys.readouterr()
    plan = json.loads(capsys.readouterr().out)
    config = read_config("configs/two_slices.py")
    assert config.launch.max_hours < math.inf
    total, length = config.run.total_tokens, config.run.sequence_length
    rates = [
        config.islands[name].batch_size * length / island["expected_step_seconds"]
        for name, island in plan["islands"].items()
    ]
    assert total / max(rates) > 1800
    # The text's own figures.
    assert "0.5 hours for both slices, 1.4 for the v5p" in " ".join(PAGE.split())
    hours = [total / rate / 3600 for rate in (sum(rates), min(rates))]
    assert [round(time, 1) for time in hours] == [0.5, 1.4]


def of(tool):
    return [line for line in LINES if line[0] == tool]


CREATED = ["iam", "service-accounts", "create"]
LAUNCHES = [line for line in of("diloco") if line[1] == "launch"]
(ON_TPU_VM,) = [line for line in LAUNCHES if "tpu_vm" in line and "delete" not in line]


def test_the_page_uses_tools_that_are_checked_here():
    tools = {"gcloud", "kubectl", "docker", "diloco", "tar"}
    assert {line[0] for line in LINES} == tools
    for tool, parse in (("gcloud", parse_gcloud), ("kubectl", parse_kubectl)):
        for line in of(tool):
            parse(line[1:])


def under(bucket, prefix):
    """The condition on objects of a prefix."""
    name = f'"projects/_/buckets/{bucket}/objects/{prefix}/"'
    title = prefix.replace("/", "-")
    return f"expression=resource.name.startsWith({name}),title={title}"


def bound(kind):
    """By account, role and condition of each binding of the page, with the names that
    it is for."""
    found = []
    for line in of("gcloud"):
        name, _, names, flags = parse_gcloud(line[1:])
        if name == f"{kind} add-iam-policy-binding":
            who = flags["--member"].removeprefix("serviceAccount:").partition("@")[0]
            found.append((who, flags["--role"], flags["--condition"], names[0]))
    return found


def test_an_island_reads_the_buckets_of_the_run_and_writes_no_snapshot():
    """One account may write what islands keep, and no role is in the project."""
    found = {}
    for who, role, condition, bucket in bound("storage buckets"):
        granted = bucket, role.removeprefix("roles/storage.")
        found.setdefault(who, {})[granted] = condition
    assert not any("storage" in role for _, role, _, _ in bound("projects"))
    text, kept = "gs://my-bucket", "gs://my-checkpoints"
    both = {(text, "objectViewer"): "None", (kept, "legacyBucketReader"): "None"}
    island, own = "two-slices/islands", "two-slices"
    assert island == f"{own}/{checkpoint.ISLANDS}"
    writes = (kept, "objectUser")
    assert found == {
        "diloco": {**both, writes: under("my-checkpoints", island)},
        "diloco-coordinator": {**both, writes: under("my-checkpoints", own)},
    }


def test_no_account_of_the_page_deletes_what_is_not_its_own():
    permissions, found = {}, {}
    for line in of("gcloud"):
        name, _, names, flags = parse_gcloud(line[1:])
        if name == "iam roles create":
            role = f"projects/my-project/roles/{names[0]}"
            permissions[role] = flags["--permissions"].split(",")
    for who, role, condition, _ in bound("projects"):
        for permission in permissions.get(role, [role]):
            found.setdefault(who, {})[permission] = condition
    reads = {
        "roles/artifactregistry.reader": "None",
        "roles/logging.logWriter": "None",
    }
    slices = ("tpu.nodes.delete", "tpu.queuedResources.delete")
    own = 'expression=resource.name.endsWith("/two-slices-coordinator"),'
    own += "title=two-slices"
    assert found == {
        "diloco": {
            **reads,
            **dict.fromkeys((*slices, "tpu.queuedResources.get"), "None"),
        },
        "diloco-coordinator": {
            **reads,
            "compute.zoneOperations.get": "None",
            "compute.instances.delete": own,
        },
        # Whatever SkyPilot gives it besides.
        sky.ACCOUNT: {**reads, "roles/dns.admin": "None"},
    }


def test_the_pages_accounts_are_those_of_its_config(cloud, configs):
    made = {line[4] for line in of("gcloud") if line[1:4] == CREATED}
    assert cli.main([*ON_TPU_VM[1:], "--yes"]) == 0
    slice_ = cloud.things["queued resource"]["two-slices-v5p"]["--service-account"]
    machine = cloud.things["instance"]["two-slices-coordinator"]["--service-account"]
    used = {slice_.partition("@")[0], machine.partition("@")[0]}
    assert made == used | {sky.ACCOUNT}
    assert slice_ != machine


def test_the_image_is_built_from_a_file_that_is_there():
    build, push = of("docker")
    assert (ROOT / build[build.index("--file") + 1]).is_file()
    assert build[build.index("--tag") + 1] == push[-1]


def test_what_launches_is_launched_and_the_rest_reads_what_comes_of_it():
    commands = [line[1] for line in of("diloco")]
    assert set(commands) == {"launch", "eval", "plan", "manifest"}
    (plan,) = [line for line in of("diloco") if line[1] == "plan"]
    assert plan[2] == LAUNCHES[0][2]


@pytest.mark.parametrize("line", LAUNCHES, ids=" ".join)
def test_every_launch_works(line, cloud, configs, capsys):
    again = ["--yes"] if "--dry-run" not in line else []
    assert cli.main([*line[1:], *again]) == 0, capsys.readouterr().err


def test_the_text_gets_its_manifests_as_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in of("diloco") if line[1] == "manifest"]
    folder = tmp_path / line[2]
    folder.mkdir()
    (folder / "a.txt").write_text("a small file")
    assert cli.main(line[1:]) == 0
    assert "1 files below 16 MB need none" in capsys.readouterr().err


def test_the_results_are_evaluated_as_the_page_says(configs, capsys):
    (line,) = [line for line in of("diloco") if line[1] == "eval"]
    (unpack,) = of("tar")
    packed = [line for line in of("gcloud") if line[-1] == f">{unpack[-1]}"]
    assert len(packed) == 2
    assert all(call[-2].endswith(f" -c {line[2]}") for call in packed)
    assert cli.main(line[1:]) == 2
    assert "there is no run/config.json" in capsys.readouterr().err


def test_what_the_page_asks_by_hand_is_what_was_made(cloud, configs):
    assert cli.main([*ON_TPU_VM[1:], "--yes"]) == 0
    logs, ask = [
        line for line in of("gcloud") if line[3:5] == ["queued-resources", "ssh"]
    ]
    for ssh in (logs, ask):
        assert ssh[5] in cloud.things["queued resource"]
    (script,) = Path("runs/two-slices-tpu-vm/launch").glob("two-slices-v5p.sh")
    address = re.search(r"two-slices-coordinator\S+:7077", ask[-1])[0]
    assert address in script.read_text()
