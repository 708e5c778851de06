"""Servers that make batches for clients on other machines."""
