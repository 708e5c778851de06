"""States come back as they were, and nothing that is read can run code."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from pyg_scale.train.tree import flatten, names_of, unflatten


def there_and_back(tree):
    found, tensors = flatten(tree, "state")
    assert sorted(names_of(found)) == sorted(tensors)
    return unflatten(
        json.loads(json.dumps(found, allow_nan=False)), lambda name: tensors[name].values
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**80),
        1.0,
        0.1 + 0.2,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "ü\x00\ud7ff",
        b"\x00\xff",
        [],
        (),
        {},
        [1, (2, [3, ()]), {"a": {1: 2, "1": 3, None: 4, False: 5, (1, "x"): 6}}],
        Counter({3: 2, 7: 1}),
        random.Random(0).getstate(),
        {"tensor": "not one", "dict": ["neither"]},
        [{"tuple": 3}],
    ],
    ids=repr,
)
def test_what_is_no_tensor(value):
    found = there_and_back(value)
    assert found == value and type(found) is type(value)
    if isinstance(value, float):
        assert math.copysign(1, found) == math.copysign(1, value)
    if isinstance(value, dict):
        assert list(map(type, found)) == list(map(type, value))


def test_nan():
    assert math.isnan(there_and_back([math.nan])[0])


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"],
)
def test_tensors(dtype):
    dtype = getattr(torch, dtype)
    for shape in ((), (0,), (3,), (2, 0, 3), (2, 3)):
        value = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
        found = there_and_back({"a": [value, value.t() if len(shape) == 2 else value]})
        assert found["a"][0].dtype == dtype and torch.equal(found["a"][0], value)
        assert found["a"][1].shape == (value.t().shape if len(shape) == 2 else value.shape)


def test_copies_are_made():
    tensor, array = torch.zeros(2, requires_grad=True), np.zeros(2)
    _, tensors = flatten([tensor, array], "s")
    with torch.no_grad():
        tensor += 1
    array += 1
    assert not any(piece.values.any() for piece in tensors.values())
    assert not any(piece.values.requires_grad for piece in tensors.values())


def test_arrays_and_numbers_of_numpy():
    value = {
        "a": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "b": np.float32(0.1),
        "c": np.int8(3),
    }
    found = there_and_back(value)
    assert found["a"].dtype == np.uint32 and (found["a"] == value["a"]).all()
    assert found["b"].dtype == np.float32 and found["b"] == value["b"] and found["c"] == 3
    state = there_and_back(np.random.RandomState(3).get_state())
    other = np.random.RandomState()
    other.set_state(state)
    assert other.randint(1000) == np.random.RandomState(3).randint(1000)


def test_what_has_the_same_name_is_kept_apart():
    value = {
        1: torch.tensor(1),
        "1": torch.tensor(2),
        "a.b": torch.tensor(3),
        "a": {"b": torch.tensor(4)},
    }
    found = there_and_back(value)
    assert [int(found[1]), int(found["1"]), int(found["a.b"]), int(found["a"]["b"])] == [1, 2, 3, 4]


def test_states_of_torch_come_back():
    model = torch.nn.Linear(3, 2)
    for optimizer in (
        torch.optim.Adam(model.parameters(), amsgrad=True),
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True),
    ):
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            [4],
        )
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            schedule.step()
        for part in (model, optimizer, schedule):
            state, found = part.state_dict(), there_and_back(part.state_dict())
            assert str(found) == str(dict(state) if isinstance(state, OrderedDict) else state)
            part.load_state_dict(found)


class Odd:
    pass


def test_what_it_cannot_hold_is_named():
    for value, match in (
        ({"a": [1, Odd()]}, r"state\.a\.1 is a Odd"),
        ({Odd: 1}, "state has the key"),
        (np.array([Odd()]), "state is an array of object"),
        ({"x": torch.eye(2).to_sparse()}, r"state\.x is not dense"),
        ({"x": torch.ones(2, device="meta")}, r"state\.x is not dense"),
        ({1, 2}, "state is a set"),
        (lambda: 1, "state is a function"),
    ):
        with pytest.raises((TypeError, NotImplementedError), match=match):
            flatten(value, "state")


@pytest.mark.parametrize("found", [{"call": ["os.system", "true"]}, {"a": 1, "b": 2}, {}])
def test_what_flatten_does_not_make_is_refused(found):
    with pytest.raises(ValueError, match="not the state"):
        unflatten(found, {}.__getitem__)
