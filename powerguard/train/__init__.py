"""The hook in the training process; the only room, beside the integrations, that knows torch."""
