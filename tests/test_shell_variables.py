"""Variables of the user's shell that would end or silence a command."""

import warnings

import pytest

from diloco_jax import shell_variables
from diloco_jax.shell_variables import set_variables_right


@pytest.fixture(autouse=True)
def found(monkeypatch):
    monkeypatch.setattr(shell_variables, "set_right", {})
    with warnings.catch_warnings():
        yield


def left(**environment):
    set_variables_right(environment)
    return environment


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("value", ["0", "00", "7", "1000000"])
def test_an_absurd_size_of_the_terminal_is_not_heeded(name, value):
    assert left(**{name: value}) == {}
    assert shell_variables.set_right == {name: value}


@pytest.mark.parametrize(
    "usual",
    [
        {"COLUMNS": "80"},
        {"COLUMNS": "212", "LINES": ""},
        {"JAX_NUMPY_DTYPE_PROMOTION": "standard"},
        {"JAX_TRANSFER_GUARD": "log"},
        {"JAX_NUMPY_RANK_PROMOTION": "raise"},
        {"PYTHONWARNINGS": "ignore::DeprecationWarning"},
        {"PYTHONWARNINGS": "default,once::UserWarning"},
    ],
    ids=str,
)
def test_usual_variables_stay(usual):
    assert left(**usual) == usual
    assert shell_variables.set_right == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_NUMPY_DTYPE_PROMOTION", "strict"),
        ("JAX_TRANSFER_GUARD", "disallow"),
        ("JAX_TRANSFER_GUARD_HOST_TO_DEVICE", "disallow_explicit"),
    ],
)
def test_settings_with_which_no_step_compiles_are_taken_out(name, value):
    assert left(**{name: value}) == {}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("error", "default"),
        ("ignore::UserWarning,error", "ignore::UserWarning,default"),
        ("error::DeprecationWarning", "default::DeprecationWarning"),
        ("e", "default"),
    ],
)
def test_warnings_are_printed_that_were_to_be_errors(given, kept):
    """Packages warn as they are imported."""
    assert left(PYTHONWARNINGS=given) == {"PYTHONWARNINGS": kept}
    with pytest.warns(DeprecationWarning, match="own"):
        warnings.warn("a package's own", DeprecationWarning, stacklevel=1)
