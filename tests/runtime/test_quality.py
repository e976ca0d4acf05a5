"""The study of quality: runs of two texts are not put together."""

import argparse

import pytest
import quality


@pytest.mark.parametrize("size", ["0.04m", "0.1m"])
def test_another_text_than_that_of_known_runs_is_refused_before_a_run(
    size, tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("some text " * 100)
    run = {"size": "0.04m", "row": "data-parallel", "seed": 0, "text": "d1"}
    options = argparse.Namespace(
        size=size,
        text=[str(tmp_path / "a.txt")],
        only=["data-parallel"],
        first_seed=1,
        seeds=1,
        minutes=1.0,
        jobs=1,
    )

    class RunsError(Exception):
        pass

    def pool(jobs):
        raise RunsError

    monkeypatch.setattr(quality, "_pool", pool)
    path = tmp_path / "quality.json"
    refused = pytest.raises(
        SystemExit, match=r"0.04m are of the text d1, given is \w{16}"
    )
    runs = pytest.raises(RunsError)
    with refused if size == run["size"] else runs:
        quality._work(options, path, [run])
    assert not path.exists()
