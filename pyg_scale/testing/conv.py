"""Conformance of a fused layer, which is compared with PyG's layer of the same parameters."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_scale.nn import FusedConv, accelerate, fallbacks
from pyg_scale.testing import graphs

CHANNELS = 8


def _data(data: Data) -> Data:
    """The same graph, with features of :data:`CHANNELS` channels."""
    generator = torch.Generator().manual_seed(3)
    size = int(data.num_nodes or 0)
    return Data(
        edge_index=data.edge_index,
        num_nodes=size,
        x=torch.randn(size, CHANNELS, generator=generator, dtype=torch.float64),
    )


GRAPHS: dict[str, Callable[[], Data]] = {
    "hostile": graphs.hostile,
    "int32": lambda: graphs.hostile(torch.int32),
    "written_out": graphs.written_out,
    "no edges": lambda: graphs.nothing(5),
    "one loop": graphs.one_loop,
    "one edge into many nodes": lambda: graphs.copies(7, 1),
}
"""Directed graphs with hubs, isolated nodes, self-loops and parallel edges, unsorted."""


class ConvTests:
    """Tests of a layer with a fused path, against the layer of PyG that it replaces.

    Example::

        class TestMyConv(ConvTests):
            @pytest.fixture
            def conv(self):
                return MyConv

            def make(self, cls):
                return cls(8, 5)  # arguments of both classes: 8 input channels
    """

    @pytest.fixture(autouse=True)
    def fused_at_any_size(self, conv: type[FusedConv], monkeypatch: pytest.MonkeyPatch) -> None:
        """Prevent calls from being left to PyG because the test graphs are small."""
        monkeypatch.setattr(conv, "min_work", 0)

    @pytest.fixture
    def conv(self) -> type[FusedConv]:
        """The class under test."""
        raise NotImplementedError("return your subclass of pyg_scale.nn.FusedConv")

    def make(self, cls: Any) -> Any:
        """An instance of the class, or of the one that it replaces, for 8 input channels."""
        try:
            return cls(CHANNELS, 5)
        except TypeError:  # a layer without numbers of channels
            return cls()

    def arguments(self, x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
        """The arguments of ``forward``."""
        return x, edge_index

    # The contract ##########################################################################

    def test_is_a_subclass_of_what_it_replaces(self, conv: type[FusedConv]) -> None:
        assert issubclass(conv, FusedConv)
        assert issubclass(conv, conv.replaces), f"{conv.__name__} must inherit from its replaces"
        assert conv.replaces in conv.__bases__

    def test_takes_the_same_arguments(self, conv: type[FusedConv]) -> None:
        for method in ("__init__", "forward"):
            ours = inspect.signature(getattr(conv, method)).parameters
            theirs = inspect.signature(getattr(conv.replaces, method)).parameters
            assert list(ours) == list(theirs), method
            assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]

    def test_has_the_same_state(self, conv: type[FusedConv]) -> None:
        ours, theirs = self.make(conv), self.make(conv.replaces)
        shapes = {name: value.shape for name, value in theirs.state_dict().items()}
        assert {name: value.shape for name, value in ours.state_dict().items()} == shapes
        # accelerate() only replaces the class
        assert set(vars(ours)) == set(vars(theirs))
        assert repr(ours).partition("(")[2] == repr(theirs).partition("(")[2]

    # Results ###############################################################################

    @pytest.mark.parametrize("name", GRAPHS)
    def test_equals_pyg(self, conv: type[FusedConv], name: str) -> None:
        data = _data(GRAPHS[name]())
        self._compare(conv, data.x, data.edge_index, torch.float64, 1e-11)

    def test_equals_pyg_in_single_precision(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        self._compare(conv, data.x.float(), data.edge_index, torch.float32, 1e-5)

    def test_edge_weights(self, conv: type[FusedConv]) -> None:
        """Results with edge weights, and the gradients of the weights."""
        data = _data(graphs.hostile())
        given = self.arguments(data.x, data.edge_index)
        names = list(inspect.signature(conv.replaces.forward).parameters)[1:]  # type: ignore[attr-defined]
        if "edge_weight" not in names[len(given) :]:
            pytest.skip("forward has no edge_weight, or arguments() gives it")
        theirs, ours = self._pair(conv)
        found = []
        for layer in (theirs, ours):
            weight = torch.linspace(0.5, 2, data.edge_index.size(1), dtype=torch.float64)
            weight.requires_grad_()
            out = layer(*self.arguments(data.x, data.edge_index), edge_weight=weight)
            assert out.requires_grad, "edge_weight gets no gradient"
            (
                out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
            ).sum().backward()
            found.append((out.detach(), weight.grad))
        _close(found[1][0], found[0][0], 1e-11)
        _close(found[1][1], found[0][1], 1e-11)

    def test_edges_that_are_followed_backwards(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        theirs, ours = self._pair(conv)
        for layer in (theirs, ours):
            layer.flow = "target_to_source"
        arguments = self.arguments(data.x, data.edge_index)
        _close(ours(*arguments), theirs(*arguments), 1e-11)

    def test_sparse_matrices(self, conv: type[FusedConv]) -> None:
        """All sparse matrices that PyG's layer accepts are accepted by ours."""
        data = _data(graphs.hostile())
        edge_index = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
        size = data.x.size(0)
        values = torch.ones(edge_index.size(1), dtype=torch.float64)
        theirs, ours = self._pair(conv)
        given = self.arguments(data.x, edge_index)[:1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of sparse tensors
            matrix = torch.sparse_coo_tensor(edge_index.flip(0), values, (size, size)).coalesce()
            for adj_t in (matrix, matrix.to_sparse_csr()):
                try:
                    expected = theirs(*given, adj_t)
                except Exception as error:
                    pytest.skip(f"PyG's layer accepts no matrix: {type(error).__name__}: {error}")
                _close(ours(*given, adj_t), expected, 1e-11)

    def test_leaves_its_arguments_alone(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        layer = self.make(conv).double()
        arguments = self.arguments(data.x, data.edge_index)
        before = copy.deepcopy(arguments)
        layer(*arguments)
        for one, other in zip(arguments, before):
            same = not isinstance(one, Tensor) or torch.equal(one, other)
            assert same, "forward changed one of its arguments"

    def test_takes_the_fused_path(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        layer = self.make(conv).double()
        layer(*self.arguments(data.x, data.edge_index))
        assert not fallbacks(layer), f"took PyG's path: {fallbacks(layer)}"

    def test_the_same_edges_again(self, conv: type[FusedConv]) -> None:
        """Data that is kept with edges must not outlive a change of them."""
        data = _data(graphs.hostile())
        layer = self.make(conv).double()
        before = layer(*self.arguments(data.x, data.edge_index)).detach()
        assert torch.equal(layer(*self.arguments(data.x, data.edge_index)), before)
        data.edge_index[0] = data.edge_index[0].flip(0)
        after = layer(*self.arguments(data.x, data.edge_index)).detach()
        expected = layer(*self.arguments(data.x, data.edge_index.clone())).detach()
        assert torch.equal(after, expected)
        assert not torch.equal(after, before)

    def test_nodes_that_are_not_there_raise_what_pyg_raises(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.written_out())
        ours, theirs = self.make(conv).double(), self.make(conv.replaces).double()
        for wrong in (7, -1):
            edge_index = data.edge_index.clone()
            edge_index[0, 0] = wrong
            errors = []
            for layer in (theirs, ours):
                with pytest.raises((IndexError, RuntimeError)) as error:
                    layer(*self.arguments(data.x, edge_index))
                errors.append(error.type)
            assert errors[0] is errors[1]

    # Everything else is PyG's ##############################################################

    def test_hooks_take_the_path_of_pyg(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        layer = self.make(conv).double()
        expected = layer(*self.arguments(data.x, data.edge_index))
        seen: list[Any] = []
        handle = layer.register_message_forward_hook(lambda *inputs: seen.append(inputs[-1]))
        _close(layer(*self.arguments(data.x, data.edge_index)), expected, 1e-11)
        assert seen
        assert sum(fallbacks(layer)[""].values()) == 1, "the fallback must be counted"
        handle.remove()
        layer(*self.arguments(data.x, data.edge_index))
        assert sum(fallbacks(layer)[""].values()) == 1

    def test_overridden_methods_take_the_path_of_pyg(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        layer = self.make(conv).double()
        calls: list[int] = []
        update = layer.update

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return update(*args, **kwargs)

        layer.update = counted
        layer(*self.arguments(data.x, data.edge_index))
        assert calls and fallbacks(layer)

    def test_explanations_take_the_path_of_pyg(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        self.make(conv.replaces)  # so that PyG generates code for its class
        layer = self.make(conv).double()
        expected = layer(*self.arguments(data.x, data.edge_index))
        layer.explain = True
        layer._edge_mask = nn.Parameter(torch.ones(data.edge_index.size(1), dtype=torch.float64))
        layer._loop_mask = data.edge_index[0] != data.edge_index[1]
        layer._apply_sigmoid = True
        try:
            masked = layer(*self.arguments(data.x, data.edge_index))
        except (AssertionError, NotImplementedError):  # PyG cannot explain this layer either
            assert fallbacks(layer)
            return
        assert not torch.allclose(masked, expected), "the mask of edges was ignored"
        layer.explain = False
        _close(layer(*self.arguments(data.x, data.edge_index)), expected, 1e-11)

    # In place and back #####################################################################

    def test_accelerate_and_restore(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        layer: Any = self.make(conv.replaces)
        model = nn.ModuleDict({"inner": nn.ModuleList([layer])}).double()
        expected = layer(*self.arguments(data.x, data.edge_index))
        kept = {name: id(value) for name, value in model.named_parameters()}
        report = accelerate(model, [conv])
        assert report.num_switched == 1
        assert [type(m) for m in model.modules()][2] is conv
        _close(layer(*self.arguments(data.x, data.edge_index)), expected, 1e-11)
        assert {name: id(value) for name, value in model.named_parameters()} == kept
        assert not report.fallbacks()
        report.restore()
        assert [type(m) for m in model.modules()][2] is conv.replaces
        _close(layer(*self.arguments(data.x, data.edge_index)), expected, 1e-11)

    def test_can_be_copied_and_saved(self, conv: type[FusedConv]) -> None:
        data = _data(graphs.hostile())
        layer: Any = self.make(conv).double()
        expected = layer(*self.arguments(data.x, data.edge_index))
        again = self.make(conv.replaces).double()
        again.load_state_dict(layer.state_dict())
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copy.deepcopy(layer), loaded, again):
            _close(other(*self.arguments(data.x, data.edge_index)), expected, 1e-11)

    # Parts #################################################################################

    def _pair(self, conv: type[FusedConv]) -> tuple[Any, Any]:
        """PyG's layer and ours, with the same parameters, in double precision."""
        theirs, ours = self.make(conv.replaces).double(), self.make(conv).double()
        ours.load_state_dict(theirs.state_dict())
        return theirs.eval(), ours.eval()

    def _compare(
        self,
        conv: type[FusedConv],
        x: Tensor,
        edge_index: Tensor,
        dtype: torch.dtype,
        tolerance: float,
    ) -> None:
        theirs = self.make(conv.replaces).to(dtype)
        ours = self.make(conv).to(dtype)
        ours.load_state_dict(theirs.state_dict())
        found = []
        for layer in (theirs, ours):
            layer.train(False)
            features = x.clone().requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # kernels that are not compiled
                # torch's own gradients through int32 edges are wrong (torch 2.13)
                edges = edge_index.long() if layer is theirs else edge_index
                out = layer(*self.arguments(features, edges))
            generator = torch.Generator().manual_seed(4)
            gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            out.backward(gradient.to(out.dtype))
            grads = {name: p.grad for name, p in layer.named_parameters()}
            found.append((out.detach(), features.grad, grads))
        (out, grad, grads), (out_ours, grad_ours, grads_ours) = found
        assert out_ours.dtype == out.dtype
        _close(out_ours, out, tolerance)
        _close(grad_ours, grad, tolerance)
        # Some gradients are 0 in exact arithmetic, such as those of a bias that softmax cancels.
        floor = max((float(g.norm()) for g in grads.values() if g is not None), default=0.0)
        for name, value in grads.items():
            _close(grads_ours[name], value, tolerance, floor / 10)


def _close(
    ours: Tensor | None, theirs: Tensor | None, tolerance: float, floor: float = 0.0
) -> None:
    """Check that two tensors are equal up to a relative error of their norm, or of ``floor``."""
    if theirs is None or ours is None:
        assert (0 if ours is None else float(ours.norm())) == 0
        assert (0 if theirs is None else float(theirs.norm())) == 0
        return
    assert ours.shape == theirs.shape
    difference = float((ours.detach().double() - theirs.detach().double()).norm())
    scale = max(float(theirs.detach().double().norm()), floor, 1e-3)
    assert difference <= tolerance * scale, f"differs from PyG by {difference / scale:.2g}"
