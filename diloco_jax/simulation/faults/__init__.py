"""Random schedules of faults against the production protocol, in virtual time.

`faults` is the table of faults, `schedule` a run and its faults as data, which `draw`
draws from a seed. `world` plays a schedule on a `disk`, a `network` and `arrays` that
fail. `invariants` must hold at every event. `play` plays many schedules, and shortens
those that fail.
"""
