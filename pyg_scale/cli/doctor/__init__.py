"""``pyg-scale doctor``: what is installed, and what is wrong with ranks before they start."""
