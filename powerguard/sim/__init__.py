"""Public fakes: clock, battery, upsd, faults, world, scenarios."""
