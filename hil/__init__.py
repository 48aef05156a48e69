"""The bench: real hardware whose power is really cut, and rigs that stand in for it where there is none."""
