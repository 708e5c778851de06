"""The entries of this plugin. Imports nothing heavy, as it is imported to list names."""

from pyg_scale import hookimpl


@hookimpl
def pyg_scale_samplers():
    return {"template": "pyg_scale_template.sampler:TemplateSampler"}


@hookimpl
def pyg_scale_feature_stores():
    return {"template": "pyg_scale_template.feature_store:TemplateFeatureStore"}


@hookimpl
def pyg_scale_graph_stores():
    return {"template": "pyg_scale_template.graph_store:TemplateGraphStore"}


@hookimpl
def pyg_scale_comm_backends():
    return {"template": "pyg_scale_template.comm:TemplateCommunicator"}


@hookimpl
def pyg_scale_parallel_wrappers():
    return {
        "template": "pyg_scale_template.parallel:TemplateParallel",
        "template-graph": "pyg_scale_template.parallel:TemplateGraphParallel",
    }


@hookimpl
def pyg_scale_partitioners():
    return {"template": "pyg_scale_template.partitioner:TemplatePartitioner"}


@hookimpl
def pyg_scale_commands():
    return {"template": "pyg_scale_template.command:main"}


@hookimpl
def pyg_scale_checks():
    return {"template": "pyg_scale_template.check:check"}


@hookimpl
def pyg_scale_readers():
    return {"template": "pyg_scale_template.reader:TemplateReader"}


@hookimpl
def pyg_scale_convs():
    return {"template": "pyg_scale_template.conv:TemplateConv"}
