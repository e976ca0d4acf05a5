"""Makes `kit` importable from every folder of these tests."""
