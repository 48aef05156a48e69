"""Rigs that run anywhere: `make hil-virtual`. Each says why where it can't."""
