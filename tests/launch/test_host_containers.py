"""The containers of a machine: where their images come from, and what they see."""

import dataclasses

import pytest
from test_host import Machine, seen

HUB, GOOGLE = "docker.io/me/diloco", "us-docker.pkg.dev/my-project/diloco/diloco"
DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("image", "is_there", "logs_in", "pulls"),
    [
        (f"{GOOGLE}:1", True, True, True),
        (f"{GOOGLE}@{DIGEST}", False, True, True),
        (f"{GOOGLE}@{DIGEST}", True, False, False),
        ("gcr.io/my-project/diloco:1", True, True, True),
        ("eu.gcr.io/my-project/diloco:1", True, True, True),
        (f"{HUB}:1", True, False, True),
        ("localhost.example:5000/diloco:1", True, False, True),
        (f"{HUB}@{DIGEST}", True, False, False),
    ],
)
def test_an_image_is_pulled_where_it_may_be_another_one(
    tmp_path, config, image, is_there, logs_in, pulls
):
    launch = dataclasses.replace(config.launch, image=image)
    config = dataclasses.replace(config, launch=launch)
    machine = Machine(tmp_path / "host", config, "two-v5p.sh")
    machine.start("boot")
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


def test_each_container_sees_what_it_needs(tmp_path, config):
    launch = dataclasses.replace(
        config.launch, data="gs://bucket/text", secrets={"HF_TOKEN": "hub-token"}
    )
    config = dataclasses.replace(config, launch=launch)
    root = "/var/lib/diloco"
    own = {f"{root}/config:ro", f"{root}/certificates:ro", f"{root}/data"}
    for name in ("two-v5p.sh", "coordinator.sh"):
        machine = Machine(tmp_path / name, config, name)
        machine.start("boot")
        assert machine.start("run") == 0, machine.errors
        *before, last = machine.calls
        assert seen(last) == own | {f"{root}/run"}
        for call in before:
            needs = set()
            if "--out-file" in call:
                needs = {f"{root}/certificates.new"}
            elif " rsync " in call or " manifest --missing " in call:
                needs = {f"{root}/data"}
            assert seen(call) == needs, call
        assert machine.start("over", EXIT_STATUS="2") == 0
        assert [seen(call) for call in machine.calls if "gcloud" in call] == (
            [set()] * (1 if name == "two-v5p.sh" else 2)
        )
