"""powerguard: power-event-aware graceful shutdown for training nodes on a UPS."""

__version__ = "0.1.0"
