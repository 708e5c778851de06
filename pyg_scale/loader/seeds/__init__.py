"""The seeds of a loader: their order in an epoch, their division among ranks, and resuming."""
