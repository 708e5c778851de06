"""Layers whose messages are traced, in what surrounds a model: results and gradients are PyG's.

One layer of each kind of message runs always; ``slow`` runs every layer of PyG.
"""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer

from pyg_scale.nn import accelerate, fallbacks, restore
from pyg_scale.nn.conv import FusedConv
from pyg_scale.nn.conv.traced import TracedConv
from pyg_scale.testing import graphs
from pyg_scale.testing.layers import LAYERS
from tests.nn.oracle import distance

CHANNELS = 8
PER_KIND = {
    "ClusterGCNConv": "weighted rows",
    "AGNNConv": "pieces: a softmax on grouped edges",
    "GINEConv": "steps on single numbers",
    "PointGNNConv": "a map of every edge",
}
DRAWS = {"SuperGATConv", "GPSConv"}  # random numbers in every call
# PyG explains it only in a process that has not made an RGCNConv, whose propagate it then calls.
BY_ORDER = {"FastRGCNConv"}
pytestmark = pytest.mark.filterwarnings("ignore")


def every(names=LAYERS, but=()):
    """All layers, of which one of each kind is quick."""
    return [
        name if name in PER_KIND else pytest.param(name, marks=pytest.mark.slow)
        for name in names
        if name not in but
    ]


class Model(nn.Module):
    """A layer, and a linear map of its result."""

    def __init__(self, layer, inputs):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(CHANNELS, 3)
        self.rest = [None if each is inputs[0] else each for each in inputs]

    def forward(self, x, edge_index):
        given = [x if each is None else each for each in self.rest]
        given = [edge_index if is_edges(each) else each for each in given]
        out = self.layer(*given)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out[..., :CHANNELS])


def is_edges(each):
    return isinstance(each, torch.Tensor) and each.dtype is torch.int64 and each.dim() == 2


@pytest.fixture(params=[None, 0], ids=["small", "fused"])
def min_work(request):
    """PyG's steps for small graphs, and traced messages."""
    return request.param


def models(name, min_work=0, dtype=torch.float64):
    """PyG's model, an accelerated one of the same state, and their arguments."""
    torch.manual_seed(3)
    edge_index = graphs.hostile().edge_index
    x = torch.randn(100, CHANNELS, dtype=dtype)
    inputs = LAYERS[name].inputs(x, edge_index)
    if name == "SignedConv":  # two sets of edges
        inputs = (x, edge_index, edge_index)
    theirs = Model(LAYERS[name].make(CHANNELS), inputs).to(dtype).eval()
    ours = copy.deepcopy(theirs)
    ours.rest = theirs.rest
    accelerate(ours, min_work=min_work)
    return theirs, ours, (inputs[0], edge_index)


def grown(model, given):
    """The result, and the gradients of the input and of the parameters that have one."""
    x = given[0].detach().clone().requires_grad_()
    torch.manual_seed(5)
    out = model(x, *given[1:])
    parameters = [each for each in model.parameters() if each.requires_grad]
    rate = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * rate).sum(), [x, *parameters], allow_unused=True)
    return [out, *grads]


def assert_same(found, expected, tolerance=1e-10):
    floor = max(float(each.norm()) for each in expected if each is not None) / 10
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs, floor) < tolerance


@pytest.mark.parametrize("name", every())
def test_hooks_on_modules_and_on_steps(name, min_work):
    theirs, ours, given = models(name, min_work)
    seen = []
    for model in (theirs, ours):
        mine = []
        seen.append(mine)
        model.layer.register_forward_hook(lambda m, a, out, to=mine: to.append("layer"))
        for layer in model.modules():
            if hasattr(layer, "register_message_forward_hook"):
                layer.register_message_forward_hook(lambda m, a, out, to=mine: to.append(out.shape))
    assert_same(grown(ours, given), grown(theirs, given))
    assert seen[0] == seen[1] and seen[0]


@pytest.mark.parametrize("name", every())
def test_state_and_files(name, min_work):
    theirs, ours, given = models(name, min_work)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        for each in theirs.parameters():
            each.mul_(1.5)
    ours.load_state_dict(theirs.state_dict())
    expected = grown(theirs, given)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert any(isinstance(each, FusedConv) for each in loaded.modules())
    for model in (ours, loaded):
        assert_same(grown(model, given), expected)
    assert restore(loaded) and not any(isinstance(each, FusedConv) for each in loaded.modules())
    assert_same(grown(loaded, given), expected)


@pytest.mark.parametrize("name", every(but=DRAWS))
def test_autocast(name, min_work):
    """As far from double precision as PyG's, and of the same type."""
    exact, _, wide = models(name)
    theirs, ours, given = models(name, min_work, torch.float32)
    theirs.load_state_dict(exact.state_dict())
    ours.load_state_dict(exact.state_dict())
    given = wide[0].float(), given[1]
    expected = exact(*wide)
    of_pyg, refusal = None, ""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            of_pyg = theirs(*given)
    except RuntimeError as error:  # PyG's layer adds up rows of two types
        refusal = str(error)
    if refusal:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError) as found:
            ours(*given)
        assert str(found.value) == refusal
        return
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*given)
    assert out.dtype is of_pyg.dtype
    assert distance(out, expected) < 1.5 * distance(of_pyg, expected) + 1e-3


@pytest.mark.parametrize("name", every(but=DRAWS | BY_ORDER))
def test_explanations(name, min_work):
    theirs, ours, given = models(name, min_work, torch.float32)
    found = []
    for model in (theirs, ours):
        torch.manual_seed(7)
        explainer = Explainer(
            model=model,
            algorithm=GNNExplainer(epochs=3),
            explanation_type="model",
            node_mask_type=None if given[0].dim() == 3 else "attributes",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        try:
            explanation = explainer(given[0], given[1], index=4)
        except (ValueError, RuntimeError, IndexError, TypeError, AssertionError) as error:
            found.append(f"{type(error).__name__}: {error}")  # of layers that PyG cannot explain
            continue
        found.append(explanation)
    if isinstance(found[0], str):
        assert found[1] == found[0]
        return
    assert isinstance(found[0].edge_mask, torch.Tensor)
    assert distance(found[1].edge_mask, found[0].edge_mask) < 1e-3
    assert Data.from_dict(found[1].to_dict()).num_nodes == found[0].num_nodes


@pytest.mark.parametrize("name", every(but=DRAWS))
def test_compiled_with_gradients(name):
    theirs, ours, given = models(name)
    torch._dynamo.reset()
    try:
        torch.compile(theirs, backend="aot_eager", fullgraph=True)(*given)
    except Exception as error:  # whatever PyG's layer does that torch cannot compile
        pytest.skip(f"PyG's layer does not compile: {type(error).__name__}")
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(grown(compiled, given), grown(theirs, given))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", every(but=DRAWS))
def test_exported(name):
    theirs, ours, given = models(name)
    try:
        torch.export.export(theirs, given)
    except Exception as error:  # as above
        pytest.skip(f"PyG's layer is not exported: {type(error).__name__}")
    file = io.BytesIO()
    torch.export.save(torch.export.export(ours, given), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert distance(loaded(*given), theirs(*given)) < 1e-10


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("ddp") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", every())
def test_data_parallel(name, min_work, one_rank):
    theirs, ours, given = models(name, min_work)
    expected = grown(theirs, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = DistributedDataParallel(ours, find_unused_parameters=True)
    x = given[0].detach().clone().requires_grad_()
    torch.manual_seed(5)
    out = wrapped(x, *given[1:])
    rate = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * rate).sum().backward()
    grads = [each.grad for each in ours.parameters() if each.requires_grad]
    zeros = [None if g is None or float(g.abs().max()) == 0 else g for g in grads]
    wanted = [None if g is None or float(g.abs().max()) == 0 else g for g in expected[2:]]
    assert_same([out, x.grad, *zeros], [*expected[:2], *wanted])


@pytest.mark.parametrize("name", PER_KIND)
def test_these_are_traced_and_fused(name):
    _, ours, given = models(name)
    assert isinstance(ours.layer, TracedConv)
    grown(ours, given)
    reasons = {why for counts in fallbacks(ours).values() for why in counts}
    assert all(why.startswith("rows of features gathered") for why in reasons)
