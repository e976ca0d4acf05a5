"""Weights in and out: files and names as Hugging Face's tools have them.

`families.py` translates config.json, `tensor_files.py` names tensors, reads and writes
safetensors, `first.py` starts a run from weights, and `export.py` gives them back.
`adapted.py` has adapters on weights, `tasks.py` what a run says and its scores.
"""
