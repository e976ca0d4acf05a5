"""The config of a run with two outposts, and what starts them."""

from __future__ import annotations

import pytest
from outpost_support import make_keys, serving, two_outposts


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def config(certificates):
    return two_outposts(certificates)


@pytest.fixture
def serve(tmp_path):
    with serving(tmp_path) as start:
        yield start
