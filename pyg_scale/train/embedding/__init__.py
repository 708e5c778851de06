"""Learnable rows of nodes, sharded among ranks, and optimizers that touch few of them."""
