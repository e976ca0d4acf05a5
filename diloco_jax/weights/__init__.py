"""Weights in and out: files and names as Hugging Face's tools have them.

`families.py` translates config.json, `names.py` tensors, `files.py` reads and writes
safetensors, `first.py` starts a run from weights, and `export.py` gives them back.
"""
