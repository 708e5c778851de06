"""Samplers that make a wrong subgraph: the conformance kit sees each, by the test meant for it.

Each mutant is the reference sampler with one thing wrong. That the reference itself passes all
tests is checked in ``tests/conformance``. See also ``test_mutants_draws.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.sampler import hop as hops
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.sampler.times import TimeLimits
from pyg_scale.testing import SamplerTests
from pyg_scale.testing.run import failures

MUTANTS: list[tuple[type[NeighborSampler], str]] = []


def caught_by(*tests):
    """Say which tests must fail on a mutant."""

    def register(mutant):
        MUTANTS.extend((mutant, test) for test in tests)
        return mutant

    return register


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_is_caught(mutant, test):
    failure = next(failures(SamplerTests, test, sampler=mutant()), None)
    assert failure is not None, f"{mutant.__name__} ({mutant.__doc__}) passes {test}"
    assert isinstance(failure[1], (AssertionError, pytest.fail.Exception)), failure


def test_all_are_there():
    assert len({mutant for mutant, _ in MUTANTS}) == 26
    assert all(hasattr(SamplerTests, test) for _, test in MUTANTS)


# The subgraph ##################################################################################


class Changed(ReferenceSampler):
    """Spoils a sample that was right."""

    def sample(self, seed, seed_time, key):
        out = super().sample(seed, seed_time, key)
        if out.num_sampled_edges is not None and None in out.node:
            self.spoil(out)
        return out

    def spoil(self, out):
        raise NotImplementedError


@caught_by("test_every_graph")
class Reversed(Changed):
    """Calls sources destinations."""

    def spoil(self, out):
        out.row[None], out.col[None], out.colptr = out.col[None], out.row[None], None


@caught_by("test_every_graph", "test_the_whole_neighborhood")
class FollowsOutEdges(ReferenceSampler):
    """Samples out-edges: real edges, in the wrong direction."""

    def bind(self, data, **options):
        other = {"forward": "backward", "backward": "forward"}
        direction = other[options.pop("sample_direction", "forward")]
        return super().bind(data, sample_direction=direction, **options)


@caught_by("test_every_graph")
class PositionsForEdgeIds(Changed):
    """Gives positions in the sorted edges instead of edge ids."""

    def spoil(self, out):
        edge_id = self.topology.csc[None].edge_id
        if edge_id is not None:
            out.edge[None] = edge_id.long().argsort()[out.edge[None]]


@caught_by("test_every_graph")
class DuplicatesNode(Changed):
    """Gives a node that is reached again another row."""

    def spoil(self, out):
        row = out.row[None]
        if row.numel() and int(row[-1]) != out.node[None].numel() - 1:
            out.node[None] = torch.cat([out.node[None], out.node[None][row[-1:].long()]])
            row[-1] = out.node[None].numel() - 1
            out.num_sampled_nodes[None][-1] += 1
            if out.batch is not None:
                out.batch[None] = torch.cat([out.batch[None], out.batch[None][row[-1:] - 1]])


@caught_by("test_every_graph", "test_options")
class Revisits(ReferenceSampler):
    """Expands all nodes of the batch in every hop, not only the new ones."""

    def sample(self, seed, seed_time, key):
        graph, num_neighbors = self.topology, self.hops()
        nodes, time = self._seeds(graph, seed, seed_time)
        edges = {t: hops._Edges() for t in graph.edge_types}
        for hop in range(max(map(len, num_neighbors.values()))):
            size = {t: nodes[t].size for t in graph.node_types}
            for t in graph.edge_types:
                row = torch.arange(size[graph.expanded_type(t)])
                ask = hops._ask(graph, t, hop, num_neighbors[t][hop], key, nodes, row, time)
                edges[t].add(graph, t, nodes, row, self.expand([ask])[0])
            for t, n in nodes.items():
                n.per_hop.append(n.size - size[t])
        for e in edges.values():  # so that only the repetition is wrong
            order = torch.cat(e.col).argsort(stable=True)
            e.row = list(torch.cat(e.row)[order].split([len(r) for r in e.row]))
            e.edge = list(torch.cat(e.edge)[order].split([len(c) for c in e.col]))
            e.col = list(torch.cat(e.col)[order].split([len(c) for c in e.col]))
        return self._finish(hops._sample(graph, nodes, edges, size))


@caught_by("test_options", "test_types")
class SeedsSorted(ReferenceSampler):
    """Sorts the seeds."""

    def sample(self, seed, seed_time, key):
        order = {t: node.argsort(stable=True) for t, node in seed.items()}
        time = None if seed_time is None else {t: v[order[t]] for t, v in seed_time.items()}
        return super().sample({t: node[order[t]] for t, node in seed.items()}, time, key)


@caught_by("test_repeated_seeds")
class SeedsOnce(ReferenceSampler):
    """Drops repeated seeds."""

    def sample(self, seed, seed_time, key):
        if seed_time is not None:
            return super().sample(seed, seed_time, key)
        once = {
            t: torch.tensor(list(dict.fromkeys(v.tolist())), dtype=torch.int64)
            for t, v in seed.items()
        }
        return super().sample(once, None, key)


@caught_by("test_repeated_seeds")
class LastRowOfARepeatedSeed(Changed):
    """Lets edges come from the last row of a repeated seed."""

    def spoil(self, out):
        if out.batch is None:
            last = {v: row for row, v in enumerate(out.node[None].tolist())}
            rows = [last[v] for v in out.node[None][out.row[None].long()].tolist()]
            out.row[None] = torch.tensor(rows, dtype=out.row[None].dtype)


@caught_by("test_repeated_seeds")
class RepeatedSeedsAreNotExpanded(Changed):
    """Gives in-edges only to the first row of a repeated seed."""

    def spoil(self, out):
        if out.batch is not None:
            return
        seeds = out.node[None][: out.num_sampled_nodes[None][0]].tolist()
        again = torch.tensor([v in seeds[:i] for i, v in enumerate(seeds)], dtype=torch.bool)
        again = torch.cat([again, again.new_zeros(out.node[None].numel() - len(seeds))])
        keep = ~again[out.col[None].long()]
        out.num_sampled_edges[None][0] -= int((~keep).sum())
        for values in (out.row, out.col, out.edge):
            values[None] = values[None][keep]
        out.colptr = None


@caught_by("test_options", "test_repeated_seeds")
class ComponentsTouch(Changed):
    """Lets the last edge of a disjoint sample come from the first component."""

    def spoil(self, out):
        if out.batch is not None and out.row[None].numel():
            node = out.node[None][out.row[None][-1].long()]
            out.row[None][-1] = (out.node[None] == node).nonzero()[0, 0]


@caught_by("test_options", "test_repeated_seeds")
class BatchOfNodeIds(Changed):
    """Numbers components by the id of the seed instead of its position."""

    def spoil(self, out):
        if out.batch is not None:
            out.batch[None] = out.node[None].long()[out.batch[None]]


@caught_by("test_every_graph")
class MiscountsNodes(Changed):
    """Counts a node of the last hop to the hop before."""

    def spoil(self, out):
        number = out.num_sampled_nodes[None]
        if len(number) > 2 and number[-1]:
            number[-1] -= 1
            number[-2] += 1


@caught_by("test_every_graph")
class NodesNotInOrder(Changed):
    """Exchanges two nodes that were reached in the same hop."""

    def spoil(self, out):
        number = out.num_sampled_nodes[None]
        if len(number) > 1 and number[1] > 1:
            a = number[0]
            order = torch.arange(out.node[None].numel())
            order[a], order[a + 1] = a + 1, a
            out.node[None] = out.node[None][order]
            for end in (out.row, out.col):
                end[None] = order.to(end[None].dtype)[end[None].long()]


@caught_by("test_every_graph")
class PointersAreOff(Changed):
    """Gives one edge too many to the first node."""

    def spoil(self, out):
        colptr = out.colptr[None] if out.colptr else torch.empty(0)
        if colptr.numel() > 2 and int(colptr[-1]) > int(colptr[1]):
            colptr[1] += 1


@caught_by("test_every_graph")
class AlwaysInt64(ReferenceSampler):
    """Gives 64-bit rows for a graph of 32 bits."""

    def sample(self, seed, seed_time, key):
        out = super().sample(seed, seed_time, key)
        out.row = {t: row.long() for t, row in out.row.items()}
        return out


@caught_by("test_types")
class ForgetsTypesThatWereNotReached(ReferenceSampler):
    """Leaves out edge types without edges."""

    def sample(self, seed, seed_time, key):
        out = super().sample(seed, seed_time, key)
        out.row = {t: row for t, row in out.row.items() if row.numel() or t is None}
        return out


@caught_by("test_induced")
class InducedWithoutSelfLoops(ReferenceSampler):
    """Leaves self-loops out of induced subgraphs."""

    def sample(self, seed, seed_time, key):
        out = super().sample(seed, seed_time, key)
        if None in out.node and self.subgraph_type == SubgraphType.induced:
            keep = out.row[None] != out.col[None]
            for values in (out.row, out.col, out.edge):
                values[None] = values[None][keep]
        return out


@caught_by("test_options", "test_types", "test_windows_of_some_edge_types", "test_induced")
class LooksBackForEver(ReferenceSampler):
    """Ignores how far a seed looks back."""

    def time_limits(self, seed_time):
        return dataclasses.replace(super().time_limits(seed_time), after={})


@caught_by("test_options", "test_types", "test_induced")
class LooksBackTooFar(ReferenceSampler):
    """Takes what is exactly a window before the seed."""

    def time_limits(self, seed_time):
        limits = super().time_limits(seed_time)
        after = {edge_type: time - 1 for edge_type, time in limits.after.items()}
        return dataclasses.replace(limits, after=after)


@caught_by("test_a_link_is_not_in_its_own_neighborhood", "test_options")
class SeesTheAnswer(ReferenceSampler):
    """Lets a seed see what is as late as itself, whatever it was asked."""

    def time_limits(self, seed_time):
        limits = super().time_limits(seed_time)
        return dataclasses.replace(limits, latest=seed_time, strict=False)


@caught_by("test_induced")
class InducedIgnoresTime(ReferenceSampler):
    """Puts edges that are later than the seed into induced subgraphs."""

    def sample(self, seed, seed_time, key):
        if self.subgraph_type == SubgraphType.induced and self.topology.has_edge_time:
            was, self.subgraph_type = self.subgraph_type, SubgraphType.directional
            out = super().sample(seed, seed_time, key)
            self.subgraph_type = was
            graph = self.topology
            nodes = {
                t: hops._Nodes(graph.num_nodes[t], 99, out.node[t].long(), out.batch[t], [])
                for t in graph.node_types
            }
            edges = self._induced(graph, nodes, TimeLimits(torch.full((99,), 99)), key)
            size = {t: nodes[t].size for t in graph.node_types}
            return self._finish(hops._sample(graph, nodes, edges, size))
        return super().sample(seed, seed_time, key)


@caught_by("test_bidirectional")
class BidirectionalOneWay(ReferenceSampler):
    """Takes ``bidirectional`` for ``directional``."""

    def _finish(self, sample):
        return sample


# The contract ##################################################################################


@caught_by("test_what_is_not_declared_raises")
class SilentlyIgnores(ReferenceSampler):
    """Does not support weights, and does not say so when asked for them."""

    supports = ReferenceSampler.supports - {"weighted"}

    def _check_supported(self):
        pass


@caught_by("test_declares_known_capabilities")
class DeclaresNonsense(ReferenceSampler):
    """Declares what nobody knows."""

    supports = ReferenceSampler.supports | {"wieghted"}


@caught_by("test_seeds_that_are_none_raise")
class TakesAnySeed(ReferenceSampler):
    """Wraps seeds that are out of range round."""

    def sample_checked(self, seed, time, key):
        seed = {t: v.long().view(-1) % self.topology.num_nodes[t] for t, v in seed.items()}
        return super().sample_checked(seed, time, key)


@caught_by("test_can_be_pickled")
class ForgetsItsOptionsWhenPickled(ReferenceSampler):
    """Comes out of a pickle with another fan-out."""

    def __setstate__(self, state):
        vars(self).update(state)
        if self.is_bound:
            self.num_neighbors = [1, 1]
