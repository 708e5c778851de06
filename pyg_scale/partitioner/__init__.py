"""Partitioners: which part of a graph goes where."""
