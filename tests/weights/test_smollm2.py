"""SmolLM2-135M's published weights: logits and continuations against float64 numpy.

`benchmarks/smollm2.py` makes the folder, whose name SMOLLM2 says.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))
import reference_forward as reference

from diloco_jax import cli
from diloco_jax.models.generation import Cache, generate, make_decode
from diloco_jax.weights.tasks import open_model

FOLDER = Path(os.environ.get("SMOLLM2", ""))
pytestmark = pytest.mark.skipif(
    not os.environ.get("SMOLLM2"),
    reason="SMOLLM2 names no folder; benchmarks/smollm2.py makes it",
)
PROMPTS = {
    "The capital of France is": " Paris",
    "def fibonacci(n):\n": "\ndef fibonacci(n):",
    "Water boils at": "",
}
CONTINUED = 12


@pytest.fixture(scope="module")
def text_model():
    return open_model(FOLDER)


@pytest.fixture(scope="module")
def formulas():
    return reference.load(FOLDER)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_are_those_of_the_formulas(prompt, text_model, formulas):
    tokens = np.array([text_model.encode(prompt)])
    cache = Cache.empty(text_model.model, 1, tokens.shape[1], "float32")
    found, _ = make_decode(text_model.model)(text_model.params, tokens, cache, 0)
    expected = reference.logits(*formulas, tokens[0])
    largest = np.abs(expected).max()
    assert np.abs(np.asarray(found[0]) - expected).max() < 1e-4 * largest


@pytest.mark.parametrize("prompt", PROMPTS)
def test_continuations_are_those_of_the_formulas(prompt, text_model, formulas):
    """By induction: the likeliest token after each of its beginnings is its next."""
    tokens = text_model.encode(prompt)
    found = list(generate(text_model.model, text_model.params, tokens, CONTINUED))
    logits = reference.logits(*formulas, np.array([*tokens, *found]))
    likeliest = np.argmax(logits[len(tokens) - 1 : -1], axis=-1)
    assert found == likeliest.tolist()
    assert text_model.decode(found).startswith(PROMPTS[prompt])


def test_the_command_says_what_comes_next(capsys):
    arguments = ["generate", str(FOLDER), "--prompt", "The capital of France is"]
    assert cli.main([*arguments, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == " Paris.\n"
