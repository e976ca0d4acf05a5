"""The benchmarks: each script starts, each row can be run, and the pages of results
agree with the raw results; peers get the same work."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.peers import ours, torchft_group
from benchmarks.peers.work import SCENARIOS, Work
from diloco_jax.config import Config
from diloco_jax.models.build import build, build_plan

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = ROOT / "docs" / "results"
SCRIPTS = sorted(
    path.name
    for path in BENCHMARKS.glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text()
    # These run in an environment of their own.
    and "\nimport torch\n" not in path.read_text()
)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


HELP = """
import contextlib, io, json, runpy, sys

told = {}
for script in sys.argv[1:]:
    sys.argv, out = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        told[script] = ended.code, out.getvalue()
print(json.dumps(told))
"""


def test_none_is_named_like_a_module_of_the_standard_library():
    """It would be taken for that, by mypy too: the benchmarks' folder comes first."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert not names & sys.stdlib_module_names


@pytest.fixture(scope="module")
def told():
    """Exit code and output of each script's --help, from one process."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, *SCRIPTS],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_how_it_is_used(script, told):
    code, printed = told[script]
    assert code == 0
    assert "--out" in printed


@pytest.mark.parametrize("size", ["0.1m", "0.3m", "2m"])
def test_every_row_can_be_run_and_compared(size):
    from quality_configs import SIZES
    from quality_rows import rates, rows

    found = [*rows(SIZES[size]), *rates(SIZES[size])]
    names = [row.name for row in found]
    assert len(names) == len(set(names)) > 100
    plans = {}
    for row in found:
        row.config.validate()
        assert not row.against or row.against in names, row.name
        sync = row.config.run.sync
        plans[sync.fragments, sync.fragment_by] = row.config.run
    for run in plans.values():
        build_plan(run, build(run))


def test_a_run_is_told_by_its_settings_wherever_the_repository_lies():
    from machine import ROOT, commit, provenance

    plain, other = Config(), Config().replace("seed", 1)
    assert provenance(plain) == provenance(Config())
    assert provenance(plain)["config"] != provenance(other)["config"]
    assert provenance(plain)["commit"] == commit()
    assert provenance(f"{ROOT}/rule.py:rule") == provenance("rule.py:rule")


def test_the_page_on_quality_says_what_its_raw_results_hold():
    from quality_report import DETAILS, FINDINGS, told

    runs = json.loads((RESULTS / "raw" / "quality.json").read_bytes())["runs"]
    assert told(FINDINGS, runs) == (RESULTS / "quality.md").read_text()
    details = told(DETAILS, runs)
    assert details in (RESULTS / "raw" / "quality.md").read_text()


def test_the_index_lists_the_raw_results_and_what_holds_of_them():
    from results_index import INDEX, told

    assert told(RESULTS / "raw") == (RESULTS / "raw" / INDEX).read_text()


def test_a_bound_without_rows_does_not_hold(tmp_path, capsys):
    import support

    assert not any(check.holds for check in support.each("x", []))
    held = support.at_most("x", 1.0, 2.0)
    assert support.each("x", iter([held])) == [held]
    for checks, code in (([held], 0), ([], 1)):
        assert support.write_results(tmp_path, "x", "X.", {}, checks, {}) == code
    assert "**NO**" in (tmp_path / "raw" / "x.md").read_text()


def test_no_result_names_one():
    pages = [*RESULTS.glob("*.md"), *(RESULTS / "raw").glob("*.json")]
    commands = [
        line
        for page in pages
        for line in page.read_text().splitlines()
        if line.lstrip('- "').startswith("command")
    ]
    assert len(commands) > 20
    assert [c for c in commands if re.search(r"[ =](/|~)", c)] == []


WORK = Work(scenario="undisturbed", replicas=3, seconds=30.0)


def test_what_is_possible_follows_from_the_steps():
    assert WORK.capacity == pytest.approx(3 * 128 / 0.1)
    slow = Work(scenario="slow", replicas=3, seconds=30.0)
    assert slow.capacity / WORK.capacity == pytest.approx((2 + 1 / 4) / 3)
    assert (WORK.survivors, slow.survivors) == (("r0", "r1", "r2"), ("r0", "r1"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_our_run_is_of_that_work(scenario):
    work = Work(scenario=scenario, replicas=2, seconds=30.0)
    config = ours.config_of(work)
    sync = config.run.sync
    assert (sync.steps_per_cycle, sync.fragments) == (12, 4)
    assert {sync.codec_up, sync.codec_down} == {"f32"}
    steps = [island.step_seconds for island in config.islands.values()]
    assert steps == [work.pace(name) for name in work.names]
    who = {"killed": "r1", "coordinator lost": "coordinator"}.get(scenario)
    assert [fault.partition("@")[0] for fault in config.placement.faults] == (
        [who] if who else []
    )


def test_the_models_are_of_one_size():
    """Torch is not here: its tensors' sizes are those of the script's constants."""
    text = torchft_group.REPLICA.read_text()
    names = "V, D, N, K, H, F_, LAYERS"
    (values,) = re.findall(rf"^{names} = (.*)$", text, re.M)
    v, d, n, k, h, f, layers = map(int, values.split(","))
    layer = 2 * d + d * h * (n + 2 * k) + n * h * d + 3 * d * f
    run = ours.config_of(WORK).run
    assert 2 * v * d + layers * layer + d == sum(build_plan(run, build(run)).sizes)
