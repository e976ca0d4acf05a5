"""Fragments where they are held: deltas, arrays, merges and files. It knows no lead."""
