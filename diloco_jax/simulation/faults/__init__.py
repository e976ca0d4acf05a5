"""Random schedules of faults against the production protocol, in virtual time.

`schedule` holds a run and its faults as data; `kinds` defines the faults. `world` plays
a schedule with `disk`, `network` and `arrays` that fail. `invariants` must hold at
every event. `play` plays many schedules, and `shrink` shortens those that fail.
"""
