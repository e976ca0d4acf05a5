"""Tokenizers: text to tokens and back. `opening.py` finds the one of a path."""
