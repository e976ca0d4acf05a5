"""Worker processes: the same digests as without them, and one that is killed."""

from __future__ import annotations

from runtime_support import make_config, placed, run_scripted


def digests(tape: list[dict]) -> dict[tuple, str]:
    """Digest of Theta by fragment and version."""
    return {
        (r["fragment"], *r["version"]): r["digest"]
        for r in tape
        if r["kind"] == "digested"
    }


def test_two_workers_merge_to_the_bits_of_one_process(text, tmp_path):
    config = make_config(text, cycles=2)
    alone = run_scripted(config, tmp_path / "alone")
    spread = run_scripted(placed(config, workers=2), tmp_path / "spread")
    assert digests(alone) == digests(spread)
    assert {fragment for fragment, *_ in digests(alone)} == {0, 1}
