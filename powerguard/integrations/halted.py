"""How an adapter leaves a framework's loop: nothing that follows a training is to run, the node's power is going."""

from __future__ import annotations

from powerguard.train.verdict import Verdict


class Halted(SystemExit):
    """The node halts and the state is durable. Uncaught, the process exits with the verdict's code, 75.

    An exception and not a flag: after a loop that was told to stop, frameworks evaluate, load the best model, save once
    more and push to a hub, and the script goes on as if training had finished.
    """

    def __init__(self, verdict: Verdict, step: int) -> None:
        super().__init__(verdict.code)
        self.verdict, self.step = verdict, step
