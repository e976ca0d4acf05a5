"""The committed dashboard is what its script makes, and asks for what there is."""

from __future__ import annotations

import importlib.util
import json
import re

from grafana_support import FOLDER, missing, queries

from diloco_jax.observability.exported import METRICS

OF_PROCESS = {"process_cpu_seconds_total"}


def test_every_query_names_what_is_exported():
    known = {metric.name for metric in METRICS} | OF_PROCESS
    asked = list(queries())
    assert len(asked) > 25
    for panel, expr in asked:
        named = set(re.findall(r"\b(?:diloco|process)_[a-z_]+", expr))
        assert named, panel
        assert named <= known, (panel, named - known)


def test_a_query_is_of_the_chosen_coordinators():
    for panel, expr in queries():
        selectors = re.findall(r"_[a-z]+\{([^}]*)\}", expr)
        assert selectors, panel
        assert all('instance=~"$instance"' in each for each in selectors), panel


def test_the_committed_one_is_what_the_script_makes():
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        missing("grafana-foundation-sdk", "pip install -e '.[test]'")
    spec = importlib.util.spec_from_file_location("made", FOLDER / "dashboard.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = json.loads(json.dumps(script.made()))
    assert json.loads(script.TARGET.read_text()) == made, (
        "run launch/grafana/dashboard.py"
    )
