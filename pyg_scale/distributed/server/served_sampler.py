"""A sampler that leaves the work to servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.sampler as pyg
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput, NumNeighbors

from pyg_scale import plugins
from pyg_scale.distributed.server.answers import AnswerCheck
from pyg_scale.distributed.server.loader_record import LoaderRecord, RowsOf, digest
from pyg_scale.distributed.server.servers import ServerRequest
from pyg_scale.errors import UnknownPluginError
from pyg_scale.loader.options import SamplingOptions
from pyg_scale.loader.workers.remote import Pending
from pyg_scale.ops import keys
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.sampler.negative import NegativeSampling
from pyg_scale.store.directory.lazy import EDGE_INDEX, LazyMapping


class ServedSampler(pyg.BaseSampler):
    """Asks servers to sample.

    Args:
        data: The graph of the servers.
        name: The name of a sampler on the servers.
        options: The options of the sampler.
        sampling: The servers, and the number of batches ahead.

    Raises:
        NotImplementedError: If the sampler is not given by name.
        ValueError: If a server does not exist.
    """

    topology = None
    edge_permutation = None
    knows_exclude_positives = True

    def __init__(
        self, data: Any, name: Any, options: Mapping[str, Any], sampling: SamplingOptions | None
    ) -> None:
        if not isinstance(name, str):
            raise NotImplementedError(
                f"neighbor_sampler= must be the name of a sampler that the servers have (got "
                f"{name!r}): code is not sent to them"
            )
        self._data, self._directory = data, data.graph_directory
        self.servers = self._directory.servers
        self.sampling = sampling or SamplingOptions()
        self._among = self.sampling.servers_of(len(self.servers))
        options = dict(options)
        if "num_neighbors" in options and not isinstance(options["num_neighbors"], NumNeighbors):
            options["num_neighbors"] = NumNeighbors(options["num_neighbors"])
        self.num_neighbors = options.get("num_neighbors")
        self._name, self.options = name, options
        self._packed: dict[Any, tuple[list[Tensor], Tensor]] = {}
        self._fingerprint = self._directory.fingerprint.pack()
        self.leave_out: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": {}}

    @property
    def redraw(self) -> bool:
        """See :class:`MayKeepDraws <pyg_scale.sampler.capabilities.MayKeepDraws>`."""
        return bool(self.options.get("redraw", True))

    @property
    def draws_by_node(self) -> bool:
        """See :class:`DrawsByNode <pyg_scale.sampler.capabilities.DrawsByNode>`."""
        try:
            sampler = plugins.get("sampler", self._name)
        except UnknownPluginError:
            return False
        disjoint = self.options.get("disjoint") or self.options.get("time_attr") is not None
        by_node = not disjoint or not self.redraw
        return isinstance(sampler, type) and issubclass(sampler, HopSampler) and by_node

    # PyG's methods #########################################################################

    def sample_from_nodes(
        self, index: NodeSamplerInput, key: int | None = None, **kwargs: Any
    ) -> Any:
        """See :meth:`NeighborSampler.sample_from_nodes
        <pyg_scale.sampler.base.NeighborSampler.sample_from_nodes>`."""
        return self.ask_from_nodes(NodeSamplerInput.cast(index), _key(key)).wait()

    def sample_from_edges(
        self,
        index: EdgeSamplerInput,
        neg_sampling: Any = None,
        key: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """See :meth:`NeighborSampler.sample_from_edges
        <pyg_scale.sampler.base.NeighborSampler.sample_from_edges>`."""
        inputs = EdgeSamplerInput.cast(index)
        return self.ask_from_edges(inputs, neg_sampling, _key(key)).wait()

    # Asking ################################################################################

    def ask_from_nodes(self, inputs: NodeSamplerInput, key: int) -> Pending:
        """The same, without waiting.

        Args:
            inputs: The seeds.
            key: The key of the batch.
        """
        rows, timed = self._rows(), inputs.time is not None
        record, name = self._record(False, inputs.input_type, timed, rows, None)
        message = [name, _flags(key, timed, False), inputs.node]
        if inputs.time is not None:
            message.append(inputs.time)
        check = AnswerCheck(self._directory.meta, rows, inputs)
        return self._ask("nodes", message, check, record)

    def ask_from_edges(self, inputs: EdgeSamplerInput, neg_sampling: Any, key: int) -> Pending:
        """The same for links.

        Args:
            inputs: The links.
            neg_sampling: Their negatives.
            key: The key of the batch.
        """
        negatives = NegativeSampling.cast(neg_sampling)
        rows, timed = self._rows(), inputs.time is not None
        labelled = inputs.label is not None
        record, name = self._record(True, inputs.input_type, timed, rows, negatives)
        message = [name, _flags(key, timed, labelled), inputs.row, inputs.col]
        message += [each for each in (inputs.label, inputs.time) if each is not None]
        check = AnswerCheck(self._directory.meta, rows, inputs, negatives)
        return self._ask("links", message, check, record)

    def check_seeds(self, seed_type: Any, timed: bool) -> None:
        """Have a server check that it can do the sampling of the loader.

        Raises:
            ValueError: If arguments do not fit the graph; likewise ``TypeError`` and
                ``NotImplementedError``.
            CommTimeoutError: If no server answers.
        """
        record, _ = self._record(False, seed_type, timed, self._rows(), None)
        self.servers.call("agree", [self._fingerprint, *record], among=self._among)

    def _ask(
        self, handler: str, message: list[Tensor], check: AnswerCheck, record: list[Tensor]
    ) -> Pending:
        def agree(server: int, seconds: float) -> None:
            self.servers.call_one(server, "agree", [self._fingerprint, *record], seconds)

        return _Batch(
            self.servers.ask(handler, message, among=self._among, check=check, agree=agree)
        )

    def _rows(self) -> tuple[RowsOf, ...]:
        """The attributes of a batch that servers must send, as this process does not have them."""
        if not self.sampling.collect_features:
            return ()
        out = []
        for store in self._data.stores:
            mapping = store._mapping
            for entry in mapping.entries() if isinstance(mapping, LazyMapping) else ():
                name = entry.address[2]
                if not entry.made and name != EDGE_INDEX and name not in self.leave_out:
                    out.append(entry.address)
        return tuple(out)

    def _record(
        self,
        links: bool,
        seed_type: Any,
        timed: bool,
        rows: tuple[RowsOf, ...],
        negatives: NegativeSampling | None,
    ) -> tuple[list[Tensor], Tensor]:
        """A record as a message, and its name."""
        known = (links, seed_type, timed, rows, id(negatives))
        if known not in self._packed:
            record = LoaderRecord(
                self._name, self.options, links, seed_type, timed, rows, negatives
            )
            packed = record.pack()
            self._packed = {known: (packed, digest(packed))}  # only the one in use
            self._negatives = negatives  # kept alive, so that its id stays unique
        return self._packed[known]


class _Batch(Pending):
    """A requested batch."""

    def __init__(self, asked: ServerRequest) -> None:
        self._asked = asked

    def wait(self) -> Any:
        return self._asked.wait()

    @property
    def ready(self) -> bool:
        return self._asked.answered

    @property
    def nbytes(self) -> int:
        return self._asked.nbytes

    def abandon(self) -> None:
        self._asked.abandon()


def _flags(key: int, timed: bool, labelled: bool) -> Tensor:
    return torch.tensor([keys.to_signed(key), int(timed), int(labelled)])


def _key(key: int | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_()) if key is None else key
