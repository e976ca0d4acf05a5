"""Seeded emulations give the bits that they gave when their table began."""

import numpy as np
import pytest
from digests import (
    all_digests,
    differences,
    digests_of,
    first_commit,
    known,
    machine_key,
    of_first_commit,
    scenes,
    write_text,
)

from diloco_jax.core.fragment_merge import FragmentMerge


def test_the_bits_are_those_of_before():
    """Where this machine is not in the table, the first commit runs beside this one."""
    before = known().get(machine_key())
    if before is None:
        commit = first_commit()
        if not commit:
            pytest.fail(
                f"digests.json has no {machine_key()!r}, and there is no clone with "
                f"the commit to compare with; fetch all of its history"
            )
        before = of_first_commit(commit)
    assert differences(before, all_digests()) == []


def test_one_ulp_of_a_number_of_the_merges_is_seen(tmp_path, monkeypatch):
    scene = scenes(write_text(tmp_path))["adopt keep"]
    before = digests_of(*scene)
    merge = FragmentMerge.merge

    def nudged(self, *arguments, **options):
        merged = merge(self, *arguments, **options)
        theta = [np.array(piece) for piece in merged.state.theta]
        theta[0].flat[0] = np.nextafter(theta[0].flat[0], np.float32(np.inf))
        return merged._replace(state=merged.state._replace(theta=tuple(theta)))

    monkeypatch.setattr(FragmentMerge, "merge", nudged)
    after = digests_of(*scene)
    assert before["count"] == after["count"]
    assert before["params"] != after["params"]


def test_every_rule_and_codec_has_bits_of_its_own():
    for found in known().values():
        for kind in ("adopt", "merge", "codec up", "codec down", "weighting"):
            of_kind = [
                d["params"] for name, d in found.items() if name.startswith(kind)
            ]
            assert len(set(of_kind)) == len(of_kind) > 2, kind
