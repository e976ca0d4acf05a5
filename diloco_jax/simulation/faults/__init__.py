"""Random schedules of faults against the production protocol, in virtual time.

`schedule` holds a run and its faults as data; `strike` says what each does. `world`
plays a schedule with `disk`, `network` and `arrays` that fail. `invariants` must hold
at every event. `play` plays many schedules, and shortens those that fail.
"""
