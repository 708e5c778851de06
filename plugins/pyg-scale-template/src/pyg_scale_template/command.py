"""Print the numbers of in-edges of the nodes of a saved graph."""

import argparse


def main(argv):
    """Run `pyg-scale template`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pyg-scale template", description=__doc__)
    parser.add_argument("edges", help="a .npy file of source and destination ids, [2, num_edges]")
    args = parser.parse_args(argv)

    import numpy as np  # imported now, so that --help stays quick

    degree = np.bincount(np.load(args.edges, mmap_mode="r")[1])
    print(f"{len(degree)} nodes, {degree.mean():.1f} in-edges on average, {degree.max()} at most")
    return 0
