"""Islands compiled for real slices, through `diloco plan` itself."""

import dataclasses
import re
from importlib import metadata

import pytest
from config_support import load_config
from plan_support import ROOT, needs_libtpu, plan, run_plan

from diloco_jax.config.loading import write_config_json
from diloco_jax.hardware.tpus import GENERATIONS, find_slice

pytestmark = [pytest.mark.tpu_compile, needs_libtpu]

NAMES = ("v5p", "v6e")
CUT_NAMES = ("v6e_cut",)
OTHERS = ("v4", "v5e", "tpu7x")
"""Generations whose islands of configs/mixed_five.py are compiled here alone; the other
two are those of configs/mixed_toy.py."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """With int4 deltas; and one island again, cut along two axes, with anchors in host
    memory."""
    config = load_config(ROOT / "configs" / "mixed_toy.py")
    cut = dataclasses.replace(
        config.islands["v6e"], mesh_fsdp=2, mesh_tensor=2, anchor_memory="pinned_host"
    )
    path = tmp_path_factory.mktemp("plan") / "three.json"
    config = config.replace(
        {"sync.codec_up": "int4", "islands": {**config.islands, CUT_NAMES[0]: cut}}
    )
    write_config_json(config, path)
    code, found = plan(path)
    assert code == 0
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    config = load_config(ROOT / "configs" / "mixed_five.py")
    islands = {name: config.islands[name] for name in OTHERS}
    path = tmp_path_factory.mktemp("plan") / "others.json"
    write_config_json(config.replace({"islands": islands, "launch.zones": {}}), path)
    code, found = plan(path, timeout_s=560)
    assert code == 0
    return found


def test_the_two_configs_share_their_islands_programs():
    five = load_config(ROOT / "configs" / "mixed_five.py").islands
    two = load_config(ROOT / "configs" / "mixed_toy.py").islands
    assert set(five) == {*OTHERS, *NAMES} == set(GENERATIONS)
    for name in NAMES:
        slowed = dataclasses.replace(two[name], step_seconds=five[name].step_seconds)
        assert five[name] == slowed


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_figures_are_those_of_shapes_and_formulas(toy, others, name):
    plan = toy if name in NAMES else others
    island = plan["islands"][name]["compiled"]
    found = find_slice(island["topology"], "topology")
    flops, hbm = island["flops"], island["hbm"]
    assert island["fits"]
    assert plan["islands"][name]["chips"] == 4
    assert hbm["available"] == found.hbm_bytes
    assert flops["model"] == pytest.approx(flops["analytic"], rel=0.02)
    assert flops["executed"] > flops["model"]
    # A device has its share: of a TPU7x, half of its chip's, and all of the few
    # matrices whose extents eight devices do not divide.
    share = 4 * plan["run"]["params"] / found.devices
    for part in ("parameters", "anchors"):
        assert share <= 1.001 * hbm[part] < (1.4 if name == "tpu7x" else 1.02) * share
    assert hbm["optimizer"] == pytest.approx(2 * hbm["parameters"], rel=0.02)
    assert 0 < hbm["temporaries"] < hbm["used"] < hbm["available"]
    assert island["compile_seconds"] > 0


def kinds_of(island):
    return {c["kind"]: c for c in island["collectives"]}


@pytest.mark.parametrize("name", [*NAMES, *CUT_NAMES, *OTHERS])
def test_collectives_are_those_of_the_mesh_and_takes_are_local(toy, others, name):
    island = (others if name in OTHERS else toy)["islands"][name]["compiled"]
    kinds = kinds_of(island)
    assert {"all-gather", "all-reduce"} <= set(kinds)
    if name not in OTHERS:
        # And all-reduces of which a chip keeps a part; where four chips' parts of a
        # matrix end inside the tiles of a register, they pass on what is over.
        more = {"reduce-scatter", "collective-permute"}
        assert set(kinds) <= {"all-gather", "all-reduce", *more}
    # Nothing reaches beyond the island.
    devices = find_slice(island["topology"], "topology").devices
    assert all(c["largest_group"] <= devices for c in kinds.values())
    assert len(island["exchange"]) >= 6
    assert all(kind["collectives"] == {} for kind in island["exchange"])
    assert name in OTHERS or all(kind["aligned"] for kind in island["exchange"])


@pytest.mark.parametrize("name", NAMES)
def test_gathers_run_beside_matrix_products(toy, name):
    # With the flags of the generation and libtpu; with none, no gather does.
    gathers = kinds_of(toy["islands"][name]["compiled"])["all-gather"]
    assert gathers["overlapping_bytes"] > gathers["sent_bytes"] / 2
    # Seven matrices of each of four layers, forward and backward; both embeddings.
    assert gathers["count"] == 2 * 7 * 4 + 2


def test_a_rule_in_a_file_of_the_users_is_planned(tmp_path):
    """The example of docs/extending.md, with the step compiled for its slice."""
    text = (ROOT / "docs" / "extending.md").read_text()
    rule = re.search(
        r"^`sign_consensus\.py`:.*?^```python\n(.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert rule
    (tmp_path / "rules.py").write_text(rule[1])
    config = load_config(ROOT / "configs" / "mixed_toy.py")
    named = f"{tmp_path / 'rules.py'}:sign_consensus"
    alone = {"v6e": config.islands["v6e"]}
    path = tmp_path / "theirs.json"
    changed = {"sync.merge": named, "islands": alone, "launch.zones": {}}
    write_config_json(config.replace(changed), path)
    code, found = plan(path)
    assert code == 0
    assert found["islands"]["v6e"]["compiled"]["fits"]
    assert found["run"]["coordinator"]["merging"] > 0
    (tmp_path / "rules.py").write_text("")
    assert run_plan(path).returncode == 2


REFUSED = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"


@pytest.mark.parametrize("island", NAMES)
@pytest.mark.parametrize("flag", ["--xla_no_such_flag=1", REFUSED])
def test_flags_that_are_refused_are_named_and_end_with_2(island, flag, tmp_path):
    version = tuple(map(int, metadata.version("libtpu").split(".")))
    if flag == REFUSED and version < (0, 0, 50):
        pytest.skip("libtpu 0.0.42.1 takes it; 0.0.50.1 does not")
    config = load_config(ROOT / "configs" / "mixed_toy.py")
    only = {island: config.islands[island]}
    alone = config.replace({"islands": only, "launch.zones": {}})
    write_config_json(alone, tmp_path / "one.json")
    done = run_plan(tmp_path / "one.json", LIBTPU_INIT_ARGS=flag)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"LIBTPU_INIT_ARGS = '{flag} " in done.stderr
    assert f"libtpu {metadata.version('libtpu')}" in done.stderr
