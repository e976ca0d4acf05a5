"""Two speeds of a plan, values that were measured, and what a link's settings cost."""

import re

import msgspec
import pytest
from config_support import load_config
from plan_support import CONFIG, ROOT, planned
from rich.console import Console

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.core.families import CODECS
from diloco_jax.hardware.machines import (
    PROCESS_S,
    MeasuredValue,
    Measurements,
    read_measurements,
)
from diloco_jax.planning import advice
from diloco_jax.planning.command import render
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import fragments_of, plan_run

FRAGMENTS = fragments_of(CONFIG)


def one(value, origin="a run on two cores, today"):
    return {"value": value, "origin": origin}


# ---- two speeds ------------------------------------------------------------------


def test_days_go_by_what_is_expected_and_checks_by_the_bound():
    plan = planned(share=(0.4,))
    island = plan.islands["big"]
    assert island.step_seconds == pytest.approx(1.0)
    assert island.expected_step_seconds == pytest.approx(1 / 0.4)
    assert plan.run.expected_cycle_seconds == pytest.approx(20 / 0.4)
    assert plan.run.cycle_seconds == pytest.approx(20)
    assert plan.run.tokens_per_day == pytest.approx(0.4 * 10_240 * 86400)
    # What the links must carry is by the bound.
    assert island.network == planned().islands["big"].network


def test_who_knows_an_upper_share_has_checks_by_it():
    plan = planned(share=(0.4, 0.65))
    assert plan.run.bound == "at 0.65 of peak"
    assert plan.islands["big"].step_seconds == pytest.approx(1 / 0.65)
    up = planned().islands["big"].network.up
    assert plan.islands["big"].network.up.mean == pytest.approx(0.65 * up.mean)


def test_a_step_that_no_share_makes_shorter():
    """An emulated step, and one that its memory bounds, are no faster at peak."""
    slow = CONFIG.replace({"islands.small.step_seconds": 4.0})
    island = planned(config=slow, share=(0.5,)).islands["small"]
    assert island.step_seconds == island.expected_step_seconds == 4.0


@pytest.mark.parametrize("share", ["0", "1.5", "0.7 0.4", "0.1 0.2 0.3", "nan"])
def test_shares_that_are_none_are_refused(share, capsys):
    path = str(ROOT / "configs" / "mixed_toy.py")
    assert cli.main(["plan", path, "--arithmetic", "--share", *share.split()]) == 2
    said = capsys.readouterr().err
    assert f"share = {share}; give the expected share of peak" in said
    assert "--share 0.4 0.65" in said


def test_alike_islands_are_told_once(capsys):
    path = str(ROOT / "configs" / "sixty_four.py")
    words = ["plan", path, "--arithmetic", "--link-gbit-per-s", "2"]
    assert cli.main([*words, "--share", "0.4", "0.65"]) == 0
    said = capsys.readouterr().err
    assert len(re.findall(r"^\S+ and 31 alike: step ", said, re.MULTILINE)) == 2
    assert said.count("Gbit/s up") == 2 + said.count("of the bytes")
    assert "note [at 0.65 of peak]: 2560 hosts" in said
    assert "REFUSED" not in said
    assert "first start: parameters are drawn in" in said


# ---- measured values -------------------------------------------------------------


def test_what_was_measured_counts_before_what_is_assumed():
    plan = planned(
        measured={
            "step_seconds": {"big": one(1.6)},
            "share_of_peak": {"v5p": one(0.25), "v6e": one(0.9)},
            "link_up_gbit_per_s": one(300.0),
            "link_down_gbit_per_s": one(7.0),
            "disk_write_bytes_per_s": one(5e7),
            "disk_read_bytes_per_s": one(1e9),
            "merge_core_seconds": one(123.0),
            "compile_seconds": one(77.0),
        }
    )
    big, small = plan.islands["big"], plan.islands["small"]
    assert (big.expected_step_seconds, big.expected_from) == (1.6, "measured")
    assert small.expected_step_seconds == pytest.approx(4.0)
    assert small.expected_from == "at 0.25 of peak, measured"
    octets = 8e-9 * 4 * FRAGMENTS.total / 0.99
    assert big.network.join_seconds == pytest.approx(octets / 7.0)
    assert plan.run.coordinator.merges.core_seconds == 123.0
    assert plan.run.first_start.compile_seconds == 77.0
    read = plan.run.outage.restart_seconds
    slow = planned(
        measured={"disk_read_bytes_per_s": one(1e5)}
    ).run.outage.restart_seconds
    assert slow > read + 10
    written = planned(measured={"disk_write_bytes_per_s": one(1e5)})
    assert written.run.outage.gathering_seconds > plan.run.outage.gathering_seconds
    # The state is read after that, whatever process was measured.
    served = planned(measured={"restart_seconds": one(9.0)}).run.outage
    assumed = planned().run.outage
    assert served.restart_seconds == pytest.approx(
        assumed.restart_seconds - PROCESS_S + 9.0
    )
    console = Console(record=True, width=500, markup=False)
    render(plan, console)
    said = console.export_text()
    for name, _ in plan.run.measured.values():
        assert f"measured {name}: " in said
    assert "[a run on two cores, today]" in said
    assert "route xla" not in said


def test_a_measured_step_that_is_faster_than_the_users_bound_counts():
    plan = planned(measured={"step_seconds": {"big": one(1.1)}}, share=(0.4, 0.5))
    assert plan.islands["big"].step_seconds == 1.1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"step_secs": {}}', "unknown field `step_secs`"),
        ('{"restart_seconds": {"value": 3, "origin": "x", "sd": 1}}', "field `sd`"),
        ('{"restart_seconds": {"value": 3}}', "missing required field `origin`"),
        ('{"restart_seconds": 3}', "restart_seconds"),
        ("{", "truncated"),
        ('{"step_seconds": {"bgi": {"value": 3, "origin": "x"}}}', "mean 'big'"),
        ('{"share_of_peak": {"v5": {"value": 0.4, "origin": "x"}}}', "has 'v5'"),
        (
            '{"share_of_peak": {"v5p": {"value": 1.4, "origin": "x"}}}',
            "share_of_peak.v5p = 1.4; it must be finite and above 0 and at most 1",
        ),
        ('{"restart_seconds": {"value": 0, "origin": "x"}}', "restart_seconds = 0"),
        ('{"restart_seconds": {"value": 1, "origin": " "}}', "has no origin"),
    ],
)
def test_a_file_of_measured_values_names_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_measurements(str(path), CONFIG)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    path = str(ROOT / "configs" / "mixed_toy.py")
    missing = str(tmp_path / "none.json")
    assert cli.main(["plan", path, "--arithmetic", "--measured", missing]) == 2
    assert f"--measured {missing}: No such file" in capsys.readouterr().err


def test_what_is_written_is_read(tmp_path):
    step = MeasuredValue(value=0.5, origin="run x")
    wrote = Measurements(step_seconds={"big": step}, restart_seconds=step)
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(wrote))
    assert read_measurements(str(tmp_path / "m.json"), CONFIG) == wrote


# ---- settings of a link ----------------------------------------------------------


def test_every_loss_stands_on_its_page():
    page = " ".join((ROOT / "docs" / "results" / "quality.md").read_text().split())
    for loss in advice.LOSSES:
        assert loss.difference in page, loss
        assert loss.codec in CODECS.table
    assert "int2" not in advice.TRIED_CODECS


def test_settings_that_fit_are_told_by_bytes_with_their_loss_and_its_size():
    config = load_config(ROOT / "configs" / "four_regions.py")
    config = config.replace("sync.codec_down", "int8")
    found = plan_run(
        "x.py", config, fragments_of(config), Assumptions(link_gbit_per_s=2.0)
    ).run.settings
    sizes = [setting.bytes_per_step for setting in found]
    assert sizes == sorted(sizes)
    cheapest = found[0]
    assert cheapest.change == {"sync.codec_down": "int4"}
    assert cheapest.share == pytest.approx(2 * 0.5625 / (0.5625 + 1.0078), rel=0.01)
    assert "+0.2 % ± 0.2 (20) over bf16 both ways, at 0.1 M, 8 M" in cheapest.line
    (own,) = [setting for setting in found if not setting.change]
    assert own.line.startswith("as it is: 1.00 of the bytes")
    # Nobody measured int4 up and int8 down.
    assert "loss not measured" in own.line
    for setting in found:
        assert max(setting.up.peak, setting.down.peak) <= 2.0
        assert setting.share <= 1 or setting.losses


def test_a_link_that_carries_nothing_has_no_settings():
    config = load_config(ROOT / "configs" / "four_regions.py")
    narrow = Assumptions(link_gbit_per_s=0.1)
    assert plan_run("x.py", config, fragments_of(config), narrow).run.settings == []
