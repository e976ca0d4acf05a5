"""A page that shows a run in a browser: a process of its own, which only reads."""
