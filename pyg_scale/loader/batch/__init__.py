"""A sampled subgraph becomes a batch: features, format, device, and its form on the wire."""
