"""SuperGATConv in training: its loss, its logits and their gradients, without gathered pairs."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import seed_everything

from pyg_scale.nn import FusedConv, accelerate, fallbacks
from pyg_scale.nn.conv import supergat
from tests.nn.oracle import distance


def trained(layer, x, *given, seed=3):
    """The result, the logits and the gradients of a step with the layer's loss."""
    seed_everything(seed)  # pairs that are no edges are drawn by NumPy
    x = x.clone().requires_grad_()
    out = layer(x, *given)
    loss = layer.get_attention_loss()
    (out.square().mean() + loss).backward()
    grads = [each.grad for each in layer.parameters()]
    return [out, layer.att_x, layer.att_y, loss, x.grad, *grads]


def compared(theirs, *given):
    torch.manual_seed(0)
    theirs = theirs.double()
    for each in theirs.parameters():
        torch.nn.init.normal_(each)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for mine, right in zip(trained(ours, *given), trained(theirs, *given), strict=True):
        assert distance(mine, right) < 1e-11
    return ours


@pytest.fixture
def no_rows(monkeypatch):
    """Pairs that are gathered are an error."""
    plain = supergat._products

    def checked(x, pairs, gathered):
        assert not gathered
        return plain(x, pairs, gathered)

    monkeypatch.setattr(supergat, "_products", checked)


LAYERS = {
    "mixed": lambda: pyg.SuperGATConv(8, 5, 2),
    "scaled": lambda: pyg.SuperGATConv(8, 5, 2, attention_type="SD"),
    "mean": lambda: pyg.SuperGATConv(8, 5, 2, concat=False, bias=False),
    "no loops": lambda: pyg.SuperGATConv(8, 5, 2, add_self_loops=False, is_undirected=True),
    "dropout": lambda: pyg.SuperGATConv(8, 5, 2, dropout=0.5, edge_sample_ratio=0.5),
}


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize("name", LAYERS)
def test_equals_pyg(name, x, edge_index):
    assert not fallbacks(compared(LAYERS[name](), x, edge_index))


@pytest.mark.usefixtures("no_rows")
def test_pairs_that_are_given(x, edge_index):
    negative = torch.randint(100, (2, 70), generator=torch.Generator().manual_seed(0))
    compared(LAYERS["mixed"](), x, edge_index, negative)
    compared(LAYERS["mixed"](), x, edge_index, None, torch.arange(100) // 50)


def test_a_small_graph(x, edge_index, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    compared(LAYERS["mixed"](), x, edge_index)


def test_pairs_counted_from_the_end_are_gathered(x, edge_index):
    compared(LAYERS["mixed"](), x, edge_index, torch.tensor([[0, -1], [5, 3]]))


def test_pairs_that_do_not_exist(x, edge_index):
    layer = LAYERS["mixed"]().double()
    accelerate(layer)
    with pytest.raises(IndexError):
        layer(x, edge_index, torch.tensor([[0], [100]]))


def test_logits_of_ones_own(x, edge_index):
    class Own(pyg.SuperGATConv):
        def get_attention(self, *args, **kwargs):
            return 2 * super().get_attention(*args, **kwargs)

    compared(Own(8, 5, 2), x, edge_index)


def test_without_training_there_is_no_loss(x, edge_index):
    theirs = LAYERS["mixed"]().double().eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert ours.att_x is None


def test_autocast(x, edge_index):
    theirs = LAYERS["mixed"]()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (theirs, ours):
            seed_everything(3)
            layer(x.float(), edge_index)
    assert ours.att_x.dtype == theirs.att_x.dtype
    torch.testing.assert_close(ours.att_x, theirs.att_x)


def test_copies_and_restored_layers(x, edge_index):
    layer = LAYERS["mixed"]().double()
    report = accelerate(layer)
    copied = copy.deepcopy(layer)
    assert type(copied).forward is supergat.SuperGATForward.forward
    for mine, right in zip(
        trained(copied, x, edge_index), trained(layer, x, edge_index), strict=True
    ):
        assert distance(mine, right) == 0
    report.restore()
    assert type(layer) is pyg.SuperGATConv
