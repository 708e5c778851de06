"""Names that stand for something else than their kind asks for, where users ask for them."""

import types

import pytest
import torch
from torch_geometric.testing import MyFeatureStore

import pyg_scale
from pyg_scale import cli, comm, hookimpl, plugins
from pyg_scale.convert import convert
from pyg_scale.convert.data import DataReader
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.sampler.reference import ReferenceSampler


class TakesNothing(MyFeatureStore):
    def _put_tensor(self, tensor, attr):
        return False


class ForgetsItsBase(ReferenceSampler):
    def __init__(self):
        self.strength = 1


class NeedsStrength(ReferenceSampler):
    def __init__(self, strength):
        super().__init__()


class FilesAreText(DataReader):
    def __init__(self, source):
        super().__init__(planted_communities(10, 20, 2, 2, progress=False))
        self.source = source

    def files(self):
        return self.source if self.source == "text" else [self.source]


@pytest.fixture(autouse=True)
def registered():
    targets = {
        "pyg_scale_samplers": {
            "forgets": ForgetsItsBase,
            "needs": NeedsStrength,
            "odd": dict,
            "function": lambda: 3,
        },
        "pyg_scale_readers": {"none": lambda source: None, "text-files": FilesAreText},
        "pyg_scale_commands": {"text": lambda argv: "text", "no-function": dict, "nothing": None},
        "pyg_scale_feature_stores": {
            "refuses": TakesNothing,
            "odd": dict,
            "instance": MyFeatureStore(),
        },
        "pyg_scale_partitioners": {"odd": dict, "function": lambda: 3, "nothing": None},
        "pyg_scale_comm_backends": {"odd": dict},
    }
    hooks = {name: hookimpl(lambda found=found: found) for name, found in targets.items()}
    name = plugins.register(types.SimpleNamespace(**hooks), "wrong-targets")
    yield
    plugins.unregister(name)


@pytest.fixture(scope="module")
def data():
    return planted_communities(100, 1_000, 4, 8, progress=False)


def batch(data, **options):
    return next(iter(NeighborLoader(data, [3, 2], batch_size=10, seed=1, **options)))


def test_a_store_that_does_not_take_a_feature_is_not_passed_over(data):
    with pytest.raises(RuntimeError, match=r"TakesNothing.put_tensor did not take .*accepts"):
        batch(data, feature_store="refuses")


@pytest.mark.parametrize("name", ["odd", "instance"])
def test_a_feature_store_must_be_a_class_of_stores(data, name):
    with pytest.raises(TypeError, match=f"feature_store='{name}' must stand for a subclass"):
        batch(data, feature_store=name)


@pytest.mark.parametrize("name", ["odd", "function", "nothing"])
@pytest.mark.parametrize("options", [{}, {"path": "parts"}])
def test_a_partitioner_must_be_a_class_of_partitioners(data, name, options):
    with pytest.raises(TypeError, match=f"method='{name}' must name a subclass"):
        pyg_scale.partition(data, 2, method=name, **options)


def test_a_communicator_must_join():
    with pytest.raises(TypeError, match=r"comm 'odd' cannot join ranks"):
        comm.connect("odd")


def test_a_sampler_must_call_the_constructor_of_its_base(data):
    with pytest.raises(TypeError, match=r"ForgetsItsBase.__init__ must call super\(\).__init__"):
        batch(data, neighbor_sampler="forgets", input_nodes=torch.arange(10))


@pytest.mark.parametrize("name", ["odd", "function"])
def test_a_sampler_must_be_a_class_of_samplers(data, name):
    message = f"neighbor_sampler='{name}' must stand for a subclass of NeighborSampler"
    with pytest.raises(TypeError, match=message):
        batch(data, neighbor_sampler=name)


@pytest.mark.parametrize("sampler", ["needs", NeedsStrength])
def test_a_sampler_must_be_made_without_arguments(data, sampler):
    message = "NeedsStrength cannot be made without arguments .*'strength'.* NeedsStrength"
    with pytest.raises(TypeError, match=message):
        batch(data, neighbor_sampler=sampler)


def test_a_reader_must_be_a_reader(tmp_path):
    with pytest.raises(TypeError, match="reader 'none' must stand for a subclass of Reader"):
        convert("none:x", tmp_path / "graph", quiet=True)


@pytest.mark.parametrize("source", ["text", "list"])
def test_the_files_of_a_reader_must_be_paths(tmp_path, source):
    with pytest.raises(TypeError, match=r"FilesAreText.files\(\) must return a list of pathlib"):
        convert(f"text-files:{source}", tmp_path / "graph", quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "must return an exit status, an integer or None (got 'text', a fault of"),
        ("nothing", "must stand for a function (it is None, a fault of the plugin)"),
        ("no-function", "must return an exit status, an integer or None (got {}, a fault of"),
    ],
)
def test_a_command_must_be_a_function_that_returns_its_status(capsys, name, message):
    assert cli.main([name]) == cli.FAILED
    assert f"pyg-scale: command {name!r} {message}" in capsys.readouterr().err
