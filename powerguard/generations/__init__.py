"""Checkpoint generations on disk: names, records, seals, the scan that trusts no pointer. Knows no torch.

The layout, and what each byte means to another program, is in docs/format.md.
"""

from powerguard.generations.names import generation_name
from powerguard.generations.retire import retire
from powerguard.generations.scan import Generation, Skipped, latest, scan
from powerguard.generations.seal import seal
from powerguard.generations.verify import Problem, verify

__all__ = ["Generation", "Problem", "Skipped", "generation_name", "latest", "retire", "scan", "seal", "verify"]
