"""The deputy of a rank: a process that makes the rank's staged states durable when the rank itself can't.

It imports no torch and touches no device, so nothing that hangs a training process hangs it. It runs as the training
user, who may write the checkpoints; the daemon needs no access to them. ``python -m powerguard.flusher LEDGER``.
"""
