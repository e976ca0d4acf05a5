"""Coordinator and islands as processes of one machine: what `diloco run` does."""
