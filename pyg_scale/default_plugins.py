"""The built-in names, provided through the same hooks as those of plugins."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_samplers() -> dict[str, str]:
    return {
        "cuda": "pyg_scale.sampler.cuda:CudaSampler",
        "fastgcn": "pyg_scale.sampler.layer_wise:FastGCN",
        "labor": "pyg_scale.sampler.labor:Labor",
        "ladies": "pyg_scale.sampler.layer_wise:Ladies",
        "native": "pyg_scale.sampler.native:NativeSampler",
        "reference": "pyg_scale.sampler.reference:ReferenceSampler",
    }


@hookimpl
def pyg_scale_feature_stores() -> dict[str, str]:
    return {
        "cached": "pyg_scale.store.cache.cached:Cached",
        "disk": "pyg_scale.store.disk:Disk",
        "memory": "pyg_scale.store.memory:MemoryFeatureStore",
        "mmap": "pyg_scale.store.mmap:Mmap",
        "quantized": "pyg_scale.store.quantized:Quantized",
        "shared": "pyg_scale.store.shared:Shared",
    }


@hookimpl
def pyg_scale_graph_stores() -> dict[str, str]:
    return {
        "memory": "pyg_scale.store.memory:MemoryGraphStore",
        "mmap": "pyg_scale.store.mmap_graph:MmapGraph",
        "shared": "pyg_scale.store.shared:SharedGraph",
    }


@hookimpl
def pyg_scale_readers() -> dict[str, str]:
    return {
        "data": "pyg_scale.convert.data:DataReader",
        "generated": "pyg_scale.convert.generated:GeneratedReader",
        "npy": "pyg_scale.convert.npy:NpyReader",
        "npz": "pyg_scale.convert.npz:NpzReader",
        "pyg": "pyg_scale.convert.pyg:PyGReader",
    }


@hookimpl
def pyg_scale_comm_backends() -> dict[str, str]:
    return {
        "local": "pyg_scale.comm.local:Local",
        "gloo": "pyg_scale.comm.gloo:Gloo",
        "nccl": "pyg_scale.comm.nccl:Nccl",
        "hybrid": "pyg_scale.comm.hybrid:Hybrid",
    }


@hookimpl
def pyg_scale_parallel_wrappers() -> dict[str, str]:
    return {
        "async_ps": "pyg_scale.parallel.async_ps:AsyncPS",
        "ddp": "pyg_scale.parallel.ddp:DDP",
        "federated": "pyg_scale.parallel.federated:Federated",
        "feature": "pyg_scale.parallel.feature:FeatureParallel",
        "fsdp": "pyg_scale.parallel.fsdp:FSDP",
        "halo": "pyg_scale.parallel.halo:HaloParallel",
        "layer": "pyg_scale.parallel.layer:LayerParallel",
        "local_sgd": "pyg_scale.parallel.local_sgd:LocalSGD",
        "mesh": "pyg_scale.parallel.mesh:MeshParallel",
    }


@hookimpl
def pyg_scale_partitioners() -> dict[str, str]:
    return {
        "fennel": "pyg_scale.partitioner.stream:Fennel",
        "frequency": "pyg_scale.partitioner.frequency:FrequencyPartitioner",
        "hash": "pyg_scale.partitioner.random:HashPartitioner",
        "ldg": "pyg_scale.partitioner.stream:LDG",
        "multilevel": "pyg_scale.partitioner.multilevel:MultilevelPartitioner",
        "random": "pyg_scale.partitioner.random:RandomPartitioner",
        "random_walk": "pyg_scale.partitioner.random_walk:RandomWalkPartitioner",
        "range": "pyg_scale.partitioner.range:RangePartitioner",
        "spectral": "pyg_scale.partitioner.spectral:SpectralPartitioner",
    }


@hookimpl
def pyg_scale_convs() -> dict[str, str]:
    return {
        "gat": "pyg_scale.nn.conv.gat_conv:GATConv",
        "gatv2": "pyg_scale.nn.conv.gatv2_conv:GATv2Conv",
        "gcn": "pyg_scale.nn.conv.gcn_conv:GCNConv",
        "gin": "pyg_scale.nn.conv.gin_conv:GINConv",
        "graph": "pyg_scale.nn.conv.graph_conv:GraphConv",
        "rgcn": "pyg_scale.nn.conv.rgcn_conv:RGCNConv",
        "sage": "pyg_scale.nn.conv.sage_conv:SAGEConv",
        "transformer": "pyg_scale.nn.conv.transformer_conv:TransformerConv",
    }


@hookimpl
def pyg_scale_commands() -> dict[str, str]:
    return {
        "build": "pyg_scale.cli.build:main",
        "compact": "pyg_scale.cli.compact:main",
        "convert": "pyg_scale.cli.convert:main",
        "doctor": "pyg_scale.cli.doctor.command:main",
        "info": "pyg_scale.cli.info:main",
        "partition": "pyg_scale.cli.partition:main",
        "plugins": "pyg_scale.cli.plugins:main",
        "report": "pyg_scale.cli.report:main",
        "serve": "pyg_scale.cli.serve:main",
    }


@hookimpl
def pyg_scale_checks() -> dict[str, str]:
    return {
        "torch": "pyg_scale.cli.doctor.checks:torch",
        "torch_geometric": "pyg_scale.cli.doctor.checks:torch_geometric",
        "kernels": "pyg_scale.cli.doctor.checks:kernels",
        "compiler": "pyg_scale.cli.doctor.checks:compiler",
        "cuda": "pyg_scale.cli.doctor.checks:cuda_kernels",
        "convs": "pyg_scale.nn.check:convs",
        "pyg-lib": "pyg_scale.cli.doctor.checks:pyg_lib",
        "torch-sparse": "pyg_scale.cli.doctor.checks:torch_sparse",
    }


FIRST_PARTY = {
    ("command", "bench"): "pyg-scale-bench",
    ("command", "predict"): "pyg-scale-http",
    ("comm", "zmq"): "pyg-scale-zmq",
    ("partitioner", "metis"): "pyg-scale-metis",
    ("feature_store", "redis"): "pyg-scale-redis",
    ("reader", "glt"): "pyg-scale-migrate",
    ("reader", "ogb"): "pyg-scale-ogb",
    ("reader", "tgb"): "pyg-scale-ogb",
    ("reader", "arrow"): "pyg-scale-tables",
    ("reader", "csv"): "pyg-scale-tables",
    ("reader", "feather"): "pyg-scale-tables",
    ("reader", "parquet"): "pyg-scale-tables",
    ("reader", "tsv"): "pyg-scale-tables",
    ("reader", "txt"): "pyg-scale-tables",
    ("sampler", "pyg-lib"): "pyg-scale-pyglib",
    ("sampler", "torch-sparse"): "pyg-scale-pyglib",
}
"""Names that our own plugins add, so that an error can name the plugin to install."""
