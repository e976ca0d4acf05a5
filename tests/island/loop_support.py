"""The loop's network, with the test in its place."""

import numpy as np


class Network:
    """Records what the loop sends, and acts at chosen steps, through `sleep`, which
    the loop calls once per step because step_seconds is above 0."""

    def __init__(self, mailbox):
        self.mailbox, self.now = mailbox, 0.0
        self.sent, self.forgotten, self.at, self.anchors = [], [], {}, []
        self.steps = 0

    def put(self, fragment, tick, encoded):
        self.sent.append((fragment, tick, [np.asarray(a) for a in encoded]))

    def forget(self, fragment, tick):
        self.forgotten.append((fragment, tick))

    def send_anchor(self, asked, version):
        self.anchors.append((asked.fragment, version, self.steps))

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.steps += 1
        if self.steps in self.at:
            self.at[self.steps]()
