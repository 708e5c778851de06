"""Full-graph inference, layer by layer."""
