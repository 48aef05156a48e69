"""The policy benchmark: one world, many policies, one table. See docs/simulation.md."""
