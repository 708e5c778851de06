"""What the tests of layers share: two layers of the same state, and how far they are apart."""

import copy

import torch

from pyg_scale.nn import accelerate, fallbacks


def pair(conv, build, dtype=torch.float64, train=False):
    """PyG's layer and ours, with the same parameters."""
    torch.manual_seed(11)
    theirs = build(conv.replaces).to(dtype).train(train)
    ours = build(conv).to(dtype).train(train)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def leaves(arguments):
    """The arguments of one call: floating point tensors as leaves of their own, with gradients."""
    return [
        tuple(leaves(a)) if isinstance(a, tuple) else leaf(a) if is_feature(a) else a
        for a in arguments
    ]


def is_feature(a):
    return isinstance(a, torch.Tensor) and a.is_floating_point() and a.layout == torch.strided


def leaf(a):
    return a.detach().clone().requires_grad_()


def flat(arguments):
    for a in arguments:
        if isinstance(a, tuple):
            yield from flat(a)
        elif is_feature(a):
            yield a


def run(layer, arguments, kwargs):
    """The result of a layer, and the gradients of all its inputs and parameters."""
    inputs = leaves(arguments)
    out = layer(*inputs, **kwargs)
    main = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(12)
    gradient = torch.randn(main.shape, generator=generator, dtype=torch.float64)
    main.backward(gradient.to(main.dtype))
    grads = [x.grad for x in flat(inputs)] + [p.grad for p in layer.parameters()]
    return out, grads


def distance(ours, theirs, floor=0.0):
    """The relative error in the norm; of what is zero in exact arithmetic, relative to floor."""
    if ours is None or theirs is None:
        there = ours if theirs is None else theirs
        return 0.0 if there is None or float(there.norm()) == 0 else float("inf")
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm()) / max(float(theirs.norm()), floor, 1e-6)


def compared(theirs, arguments, tolerance=1e-12):
    """The accelerated copy of a layer of PyG, whose results and gradients are as near as that."""
    theirs = theirs.double()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    out, grads = run(theirs, arguments, {})
    out_ours, grads_ours = run(ours, arguments, {})
    assert distance(out_ours, out) < tolerance
    floor = max(float(g.norm()) for g in grads if g is not None) / 10
    for mine, right in zip(grads_ours, grads, strict=True):
        assert distance(mine, right, floor) < tolerance
    return ours


def assert_equal(conv, build, arguments, kwargs=None, tolerance=1e-11, falls_back=False):
    """Results and all gradients of ours are PyG's, and came by the path that was expected."""
    kwargs = kwargs or {}
    theirs, ours = pair(conv, build)
    out, grads = run(theirs, arguments, kwargs)
    out_ours, grads_ours = run(ours, arguments, kwargs)
    assert bool(fallbacks(ours)) == falls_back, fallbacks(ours)
    assert type(out_ours) is type(out)
    if isinstance(out, tuple):
        (out, weights), (out_ours, weights_ours) = out, out_ours
        assert torch.equal(weights_ours[0], weights[0])
        assert distance(weights_ours[1], weights[1]) < tolerance
    assert distance(out_ours, out) < tolerance
    floor = max(float(g.norm()) for g in grads if g is not None) / 10
    for ours_, theirs_ in zip(grads_ours, grads, strict=True):
        assert distance(ours_, theirs_, floor) < tolerance


class Square(torch.autograd.Function):
    """A function that asks for rows without a function of torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad
