"""Files hold what each backend renders and submits: shapes of objects, settings of
scripts, and every command line."""

import dataclasses
from importlib import resources

import pytest
from gke_support import NOW, changed
from goldens import require_golden

from diloco_jax.launch.command import BACKENDS
from diloco_jax.launch.spec import make_spec

SCRIPT = resources.files("diloco_jax.launch").joinpath("host.sh").read_text()
ACCOUNTS = {"service_account": "i@p.iam", "coordinator_account": "c@p.iam"}
GIVEN = {
    "environment": {"HF_HOME": "/a b", "v5p:XLA_FLAGS": "--a=1 --b=2"},
    "secrets": {"HF_TOKEN": "hub-token"},
    "data": "gs://bucket/text",
    "max_hours": 4.5,
    **ACCOUNTS,
}
INSIDE = {"internal_ips": True, "network": "wide", "subnetwork": "tpus"}
ZONES = {"v5p": "us-east5-a,us-central1-a", "v6e.b": "us-east5-b"}
PLACE = {"coordinator_address": "two.diloco.internal", "dns_zone": "diloco"}
LAUNCHES = {
    "gke": ("gke", {}),
    "gke_workers_apart": ("gke", {"workers": 2, **GIVEN}),
    "gke_two_clusters": (
        "gke",
        {
            "zones": {"v5p": "us-east5-a,us-east5-c", "v6e.b": "us-central1-b"},
            "clusters": {"v6e.b": "us-central1/far"},
            "coordinator_address": "10.20.0.9",
            "namespace": "train",
            "queue": "tpus",
            "purchase": {"v5p": "reserved:mine"},
        },
    ),
    "sky": ("sky", PLACE),
    "sky_all": ("sky", {**PLACE, **GIVEN, **INSIDE, "zones": ZONES}),
    "tpu_vm": ("tpu_vm", {}),
    "tpu_vm_all": (
        "tpu_vm",
        {**GIVEN, **INSIDE, "purchase": {"v5p": "reserved"}, "when_done": "keep"},
    ),
}

ISLANDS = {
    "gke_workers_apart": {"v6e.b": {"hosts": 4}},
    # A shape without an accelerator type; and one host, which needs no rule.
    "tpu_vm_all": {
        "v5p": {"topology": "v5p:4x4x12", "mesh_fsdp": 192, "batch_size": 192},
        "v6e.b": {"topology": "v6e:2x2", "mesh_fsdp": 4, "batch_size": 4},
    },
}


def shown(config, on, settings):
    """All of a launch in one text, less what other files hold: the config as machines
    read it, and `host.sh`."""
    spec = make_spec(changed(config, **settings), "two.py", on)
    spec = dataclasses.replace(spec, config_json="{}")
    made = BACKENDS[on].deployment(spec, "certificates", "launch", NOW)
    indented = SCRIPT.rstrip().replace("\n", "\n  ").replace("\n  \n", "\n\n")
    parts = [f"# {on}, for the names {', '.join(BACKENDS[on].hosts(spec))}"]
    for name, text in made.files.items():
        for script in (SCRIPT, indented):
            text = text.replace(script, "(host.sh)\n")
        parts.append(f"# ==== {name}\n{text}")
    for resource in made.resources:
        of = "; ".join(
            f"{field} {value!r}"
            for field in ("owner", "dead", "content", "runs", "keeps")
            if (value := getattr(resource, field))
        )
        parts.append(f"# ==== {resource.what}: {of}")
        parts.append(f"find    {resource.find.line}")
        parts += [f"create  {command.line}" for command in resource.create]
        parts += [f"update  {command.line}" for command in resource.update]
        parts += [f"delete  {c.line}" for c in [resource.delete] if c]
    parts += ["# ==== looks", *(c.line for c in made.prepare)]
    parts += [f"{r.owner}: {r.logs.line}" for r in made.resources if r.logs]
    parts += [c.line for c in [made.status] if c]
    parts += [command.line for command in made.results]
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_is_what_it_was(config, name):
    for island, fields in ISLANDS.get(name, {}).items():
        config.islands[island] = dataclasses.replace(config.islands[island], **fields)
    require_golden(f"launch/{name}.txt", shown(config, *LAUNCHES[name]))
