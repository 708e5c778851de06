"""Mini-batches of clusters: a graph cut into parts, and the subgraphs of several of them."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.cluster import Partition
from torch_geometric.utils import select

from pyg_scale import plugins
from pyg_scale.loader.archive import ADVICE, edges_hash, load_archive, save_archive
from pyg_scale.loader.base import SubgraphLoader
from pyg_scale.loader.batch.build import put, select_rows
from pyg_scale.loader.batch.source import rows_in_huge_pages
from pyg_scale.loader.induced import has_edge_attrs, refuse_overrides
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.seeds.sharding import fingerprint
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import memory
from pyg_scale.ops.induced_edges import Induced
from pyg_scale.ops.join_clusters import join_clusters
from pyg_scale.partitioner import Partitioner, partition
from pyg_scale.partitioner.base import check_num_parts
from pyg_scale.sampler.base import flag, one_of
from pyg_scale.store.directory.data import OpenedGraph

_FORMAT = "pyg_scale clusters 1"


class ClusterData(torch_geometric.loader.ClusterData):
    """A graph cut into clusters, with the nodes of a cluster next to each other.

    As :class:`torch_geometric.loader.ClusterData`, and a subclass of it, but needs nothing besides
    this package: it takes any partitioner. The method is that of Chiang et al.: "Cluster-GCN: An
    Efficient Algorithm for Training Deep and Large Graph Convolutional Networks", KDD 2019.
    ``cluster_data[i]`` is the subgraph of cluster ``i``; :class:`ClusterLoader` merges several.

    With ``save_dir`` the cluster of every node is kept in a file, which is read the next
    time: ``part_<num_parts>/clusters.npz`` (``part_<num_parts>_recursive`` if so). It holds arrays
    and no pickle, and files that PyG wrote are left alone.

    Attributes of an opened graph directory stay in their files: ``data`` has them in the order of
    the directory, and batches read their own rows. Its edges come into memory.

    Args:
        data: ``Data`` with ``edge_index`` ``[2, num_edges]``.
        num_parts: Number of clusters, at most that of nodes.
        recursive: Whether METIS bisects recursively, instead of cutting k ways at once.
        save_dir: The folder of the file; ``None``: nothing is kept.
        filename: The name of the file, instead of ``clusters.npz``.
        log: Whether to say on stderr when partitioning begins and ends.
        keep_inter_cluster_edges: Whether ``cluster_data[i]`` has the edges to other clusters, too,
            whose other ends keep their numbers in the permuted graph.
        sparse_format: ``"csr"`` to group edges by source, ``"csc"`` by destination.
        method: The name of a partitioner or an instance, see :func:`pyg_scale.partition`. ``None``:
            ``"metis"`` if pyg-scale-metis is installed, else ``"multilevel"``; or whatever the
            file was made by.

    Raises:
        NotImplementedError: If the graph has types, or ``recursive`` is asked of another method
            than METIS.
        TypeError: If an argument has a wrong type.
        ValueError: If there are more clusters than nodes, an argument is out of range, or the file
            is of another graph or another method.
        UnknownPluginError: If there is no such method.
    """

    def __init__(
        self,
        data: Data,
        num_parts: int,
        recursive: bool = False,
        save_dir: str | None = None,
        filename: str | None = None,
        log: bool = True,
        keep_inter_cluster_edges: bool = False,
        sparse_format: Literal["csr", "csc"] = "csr",
        *,
        method: str | Partitioner | None = None,
    ):
        refuse_overrides(self, "_metis")
        _check_graph(data)
        check_num_parts(num_parts, data.num_nodes or 0)
        self.num_parts = num_parts
        self.recursive = flag("recursive", recursive)
        self.keep_inter_cluster_edges = flag("keep_inter_cluster_edges", keep_inter_cluster_edges)
        self.sparse_format = one_of("sparse_format", sparse_format, ("csr", "csc"))
        name, partitioner = cutter_of(method, self.recursive)
        file = None
        if save_dir is not None:
            folder = f"part_{num_parts}{'_recursive' if recursive else ''}"
            file = Path(save_dir) / folder / (filename or "clusters.npz")
        if file is not None and file.exists():
            cluster = _read(file, data, num_parts, None if method is None else name)
        else:
            if log:
                print(f"Partitioning by {name} into {num_parts} clusters...", file=sys.stderr)
            graph = Data(edge_index=data.edge_index.cpu(), num_nodes=data.num_nodes)
            found = partition(graph, num_parts, partitioner)
            assert isinstance(found, Tensor)
            cluster = found
            if file is not None:
                array = cluster.to(torch.int32).numpy()
                save_archive(file, _FORMAT, edges_hash(data.edge_index), cluster=array, method=name)
            if log:
                print("Done!", file=sys.stderr)
        cluster = cluster.to(data.edge_index.device, torch.int64)
        self.partition = self._partition(data.edge_index, cluster)
        if not isinstance(data, OpenedGraph):
            self.data = self._permute_data(data, self.partition)
            return
        self.data = copy.copy(data)
        self.data.edge_index = None
        self._places = copy.copy(self)
        self._places.data = Data(
            node_place=self.partition.node_perm,
            edge_place=self.partition.edge_perm,
            num_nodes=self.partition.node_perm.numel(),
        )

    _places: ClusterData | None = None
    """Clusters of positions in a graph directory, in the place of its attributes."""

    def __getitem__(self, idx: int) -> Data:
        if self._places is None:
            return super().__getitem__(idx)
        places = self._places[idx]
        out = Induced(places.node_place, places.edge_index, places.edge_place)
        return _batch(self.data, out, Stats())

    @property
    def in_files(self) -> bool:
        """True if attributes are in the files of a graph directory, in its order."""
        return self._places is not None


class ClusterLoader(SubgraphLoader, torch_geometric.loader.ClusterLoader):
    """Loads the subgraphs of several clusters together, with all edges among their nodes.

    As :class:`torch_geometric.loader.ClusterLoader`, and a subclass of it. ``batch_size`` counts
    clusters. ``num_workers=k`` means k threads; ``seed=``, ``state_dict()`` and
    ``stats()`` are as in :class:`NodeLoader`.

    Args:
        cluster_data: A :class:`ClusterData`, ours or PyG's.
        seed: See :class:`NodeLoader`; it decides the order of clusters with ``shuffle=True``.
        worker_type: See :class:`NodeLoader`.
        kwargs: ``split_seeds`` (but ``"part"``), ``uneven``, ``split_batches``, ``comm``, see
            :class:`NodeLoader`, and arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        TypeError: If ``cluster_data`` is something else.
        ValueError: If arguments contradict each other.
    """

    def __init__(
        self,
        cluster_data: torch_geometric.loader.ClusterData,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        **kwargs: Any,
    ):
        refuse_overrides(self, "_collate")
        if not isinstance(cluster_data, torch_geometric.loader.ClusterData):
            raise TypeError(
                f"cluster_data must be a ClusterData (got {type(cluster_data).__name__}): wrap the "
                "graph, ClusterLoader(ClusterData(data, num_parts=...))"
            )
        for name in ("sampling", "feature_store", "transform"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"{name}= is not for ClusterLoader, which samples nothing: leave it out"
                )
        if kwargs.get("split_seeds") == "part":
            raise ValueError(
                "split_seeds='part' is for seeds of a graph in parts, and clusters are none: use "
                "split_seeds='global'"
            )
        self.cluster_data = cluster_data
        rows_in_huge_pages(cluster_data.data)
        self._index = _narrow(cluster_data.partition)
        self._start(len(cluster_data), seed=seed, worker_type=worker_type, **kwargs)
        self._publish()

    def _seed_tensors(self) -> list[Tensor]:
        return [self.cluster_data.partition.partptr[1:].cpu()]

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"clusters": self._clusters}

    @functools.cached_property
    def _clusters(self) -> str:
        found = self.cluster_data.partition
        return fingerprint([found.partptr.cpu(), found.node_perm.cpu()])

    def _parts_of_seeds(self) -> Tensor | None:
        return None

    def _draws(self) -> dict[str, str]:
        return {"sparse_format": self.cluster_data.partition.sparse_format}

    def _sample(self, batch: BatchIndex) -> Induced:
        found = self.cluster_data.partition
        return join_clusters(
            found.partptr,
            found.indptr,
            self._index,
            batch.index.to(found.partptr.device),
            own_first=found.sparse_format == "csr",
            positions=has_edge_attrs(self.cluster_data.data),
        )

    def _fetch(self, out: Induced, stats: Stats) -> Data:
        clusters = self.cluster_data
        if isinstance(clusters, ClusterData) and clusters.in_files:
            node = clusters.partition.node_perm[out.node]
            edge = None if out.edge is None else clusters.partition.edge_perm[out.edge]
            out = Induced(node, out.edge_index, edge)
        return _batch(clusters.data, out, stats)


def _narrow(partition: Partition) -> Tensor:
    """The other end of each edge: in 32 bits if all ids fit, so that batches read half the bytes.

    Args:
        partition: The clusters of a :class:`ClusterData`.
    """
    index, most = partition.index, torch.iinfo(torch.int32).max
    fits = max(index.numel(), partition.indptr.numel()) <= most
    return memory.in_huge_pages(index.to(torch.int32) if fits else index)


# Clusters ##################################################################################


def _batch(data: Data, out: Induced, stats: Stats) -> Data:
    """A batch with rows of attributes of nodes and edges; what it reads is counted."""
    batch, store = copy.copy(data), data._store
    values: dict[str, Any] = {"edge_index": out.edge_index}
    for key, value in store.items():
        if key == "num_nodes":
            values[key] = out.node.numel()
        elif data.is_node_attr(key):
            values[key] = _rows(data, key, value, out.node, stats)
        elif data.is_edge_attr(key):
            assert out.edge is not None
            values[key] = _rows(data, key, value, out.edge, stats)
    put(batch._store, values)
    return batch


def _rows(data: Data, key: str, value: Any, index: Tensor, stats: Stats) -> Any:
    if isinstance(value, Tensor):
        return select_rows(data._store, key, value, index, stats)
    return select(value, index, dim=data.__cat_dim__(key, value))


# Partitioning ##############################################################################


def _check_graph(data: Any) -> None:
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            "ClusterData does not take HeteroData: pass data.to_homogeneous(), or use "
            "NeighborLoader"
        )
    if not isinstance(data, Data):
        raise TypeError(f"data must be a Data (got {type(data).__name__})")
    if not isinstance(data.get("edge_index"), Tensor):
        raise ValueError(
            "data has no edge_index: set data.edge_index to [2, num_edges] (of an adj_t, "
            "torch.stack(data.adj_t.t().coo()[:2]))"
        )


def cutter_of(method: Any, recursive: bool) -> tuple[str, str | Partitioner]:
    """The name of a method of clusters, and what :func:`pyg_scale.partition` takes for it."""
    if method is None:
        method = "metis" if "metis" in plugins.names("partitioner") else "multilevel"
    if not isinstance(method, str | Partitioner):
        raise TypeError(f"method must be a name or a Partitioner (got {method!r})")
    if isinstance(method, str):
        made = plugins.get("partitioner", method)
        if method.rpartition(":")[2] == "metis":
            return method, made(algorithm="recursive" if recursive else "k-way")
    name = method if isinstance(method, str) else type(method).__name__
    if recursive:
        raise NotImplementedError(
            f"recursive=True is for method='metis', which pyg-scale-metis provides (the method is "
            f"{name!r}): install it, or leave recursive out"
        )
    return name, method


# The file ##################################################################################


def _read(file: Path, data: Data, num_parts: int, method: str | None) -> Tensor:
    """The cluster of every node, checked; ``int64`` ``[num_nodes]``."""
    cluster, made_by = load_archive(file, _FORMAT, edges_hash(data.edge_index), "cluster", "method")
    if cluster.shape != (data.num_nodes,) or cluster.dtype != np.int32:
        raise ValueError(
            f"{file} has clusters of {cluster.size} nodes, but the graph has {data.num_nodes}: "
            f"{ADVICE}"
        )
    if cluster.size and not 0 <= cluster.min() <= cluster.max() < num_parts:
        raise ValueError(f"{file} has clusters that are not 0 to {num_parts - 1}: {ADVICE}")
    if method is not None and method != str(made_by):
        raise ValueError(f"{file} was made by method={str(made_by)!r}, not {method!r}: {ADVICE}")
    return torch.from_numpy(cluster).to(torch.int64)
