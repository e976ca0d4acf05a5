"""Seeded emulations give the bits that they gave when their scenes were written."""

import numpy as np
import pytest
from digests import (
    all_digests,
    differences,
    digests_of,
    first_commit,
    of_first_commit,
    scenes,
    write_text,
)

from diloco_jax.core.fragment_merge import FragmentMerge


@pytest.fixture(scope="module")
def now():
    return all_digests()


def test_the_bits_are_those_of_before(now):
    commit = first_commit()
    assert commit, "there is no clone with the commit to compare with; fetch all of it"
    assert differences(of_first_commit(commit), now) == []


def test_one_ulp_of_a_number_of_the_merges_is_seen(now, tmp_path, monkeypatch):
    merge = FragmentMerge.merge

    def nudged(self, *arguments, **options):
        merged = merge(self, *arguments, **options)
        theta = [np.array(piece) for piece in merged.state.theta]
        theta[0].flat[0] = np.nextafter(theta[0].flat[0], np.float32(np.inf))
        return merged._replace(state=merged.state._replace(theta=tuple(theta)))

    monkeypatch.setattr(FragmentMerge, "merge", nudged)
    before = now["adopt keep"]
    after = digests_of(*scenes(write_text(tmp_path))["adopt keep"])
    assert before["count"] == after["count"]
    assert before["params"] != after["params"]


@pytest.mark.parametrize(
    "kind", ["adopt", "merge", "codec up", "codec down", "weighting"]
)
def test_every_rule_and_codec_has_bits_of_its_own(now, kind):
    of_kind = [d["params"] for name, d in now.items() if name.startswith(kind)]
    assert len(set(of_kind)) == len(of_kind) > 2
