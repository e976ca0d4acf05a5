"""Random schedules of faults against the production policy, in virtual time.

`schedule` is what a run is and what goes wrong in it, as data; `kinds` what can go
wrong; `world` plays it with `disk`, `network` and `arrays` that fail; `invariants` is
what must hold at every event; `play` plays many, `shrink` shortens what fails.
"""
