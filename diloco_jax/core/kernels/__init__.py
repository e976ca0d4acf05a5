"""The merge route "native": passes over tiles in C, for rules, codecs and optimizers of
the package."""
