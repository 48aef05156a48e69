"""Drills: scenarios on real processes, with a verdict and a report."""
