"""Graphs as samplers and loaders see them: a topology, and contracts of graphs from elsewhere."""
