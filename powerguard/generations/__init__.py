"""Checkpoint generations on disk: names, records, seals, the scan that trusts no pointer. Knows no torch."""
