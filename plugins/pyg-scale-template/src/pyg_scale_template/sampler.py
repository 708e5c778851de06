"""A sampler that takes the in-edges of a node with the smallest random numbers."""

import torch

from pyg_scale.ops.keys import draw
from pyg_scale.sampler.hop import Chosen, Frontier, HopSampler


class TemplateSampler(HopSampler):
    """Gives every in-edge of a node a random number and takes the `k` smallest.

    This is uniform sampling without replacement. Change the numbers to change the probabilities.
    They must be drawn from the keys of `frontier`, so that batches do not depend on workers.
    """

    def pick(self, frontier: Frontier, k: int) -> Chosen:
        row, position = frontier.candidates()
        number = draw(frontier.key[row], position - frontier.begin[row])

        order = number.argsort()
        order = order[row[order].argsort(stable=True)]  # by row, and within a row by number
        row, position = row[order], position[order]

        first = frontier.num_candidates.cumsum(0) - frontier.num_candidates
        taken = torch.arange(row.numel()) - first[row] < k
        return Chosen(row[taken], position[taken])
