"""`bash launch/test.sh --fast` runs what is cheapest, and all that is new."""

import json

import fast
import pytest

pytest_plugins = ["pytester"]


def test_the_cheapest_files_are_taken_until_the_budget_is_spent():
    seconds = {"a": 0.3, "b": 0.1, "c": 0.5, "d": 0.2}
    assert fast.chosen(seconds, 0.65) == {"a", "b", "d"}
    assert fast.chosen(seconds, 0.55) == {"b", "d"}
    assert fast.chosen({}, 1.0) == set()


def test_the_list_is_that_of_this_checkout():
    """A file that is not on the list runs, so new ones may be missing for a while."""
    known = fast.read_list()
    gone = [name for name in known if not (fast.ROOT / name).is_file()]
    assert not gone, "bash launch/test.sh --measure"
    files = {
        path.relative_to(fast.ROOT).as_posix()
        for path in (fast.ROOT / "tests").rglob("test_*.py")
    }
    assert len(files - known.keys()) < len(files) / 2, "bash launch/test.sh --measure"


def test_the_greater_part_of_core_and_protocol_is_fast():
    known = fast.read_list()
    taken = fast.chosen(known, fast.BUDGET_S)
    for folder in ("core", "protocol", "config", "wire"):
        here = [name for name in known if name.startswith(f"tests/{folder}/")]
        assert 2 * len(taken.intersection(here)) > len(here), folder


@pytest.fixture
def suite(pytester, monkeypatch):
    """Three files: one cheap, one dear, one new; each has a test with a marker."""
    text = """
import pytest

def test_plain(): pass

@pytest.mark.dist
def test_marked(): pass
"""
    names = ("cheap", "dear", "new")
    pytester.makepyfile(**{f"test_{name}": text for name in names})
    pytester.makeconftest(
        "import fast\npytest_addoption = fast.add_options\n"
        "pytest_configure = fast.register"
    )
    pytester.makeini("[pytest]\nmarkers = dist")
    path = pytester.path / "seconds.json"
    path.write_text(json.dumps({"test_cheap.py": 1, "test_dear.py": 1000}))
    monkeypatch.setattr(fast, "ROOT", pytester.path)
    monkeypatch.setattr(fast, "LIST", path)
    return pytester


def test_fast_leaves_out_what_is_dear_or_marked(suite):
    done = suite.inline_run("--fast")
    passed = [report.nodeid for report in done.getreports() if report.when == "call"]
    assert sorted(passed) == ["test_cheap.py::test_plain", "test_new.py::test_plain"]
