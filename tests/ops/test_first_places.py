"""The first places of numbers: compiled, in plain torch, emulated, as a dictionary says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pyg_scale.ops.first_places import first_places
from tests.ops import emulated


@pytest.fixture(params=["compiled", "plain", "emulated", "emulated backward"])
def way(request, monkeypatch) -> Iterator[Callable[[Tensor], Tensor]]:
    """The ways in which they are found."""
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    if "emulated" not in request.param:
        yield first_places
        return
    order = "backward" if "backward" in request.param else "forward"
    monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
    with emulated.instead_of():
        yield first_places


def wanted(key: Tensor) -> list[int]:
    seen: dict[int, int] = {}
    return [seen.setdefault(number, i) for i, number in enumerate(key.tolist())]


@pytest.mark.parametrize("size", [0, 1, 31, 257, 3000])
@pytest.mark.parametrize("bits", [1, 7, 12, 62])
def test_first_places(way, size, bits):
    generator = torch.Generator().manual_seed(size + bits)
    key = torch.randint(0, 1 << bits, (size,), generator=generator)
    for given in (key, torch.cat([key, key.flip(0)])):
        found = way(given)
        assert found.dtype == torch.int64
        assert found.tolist() == wanted(given)


def test_negative_numbers_are_refused(way):
    with pytest.raises((ValueError, RuntimeError), match="must not be negative|trapped"):
        way(torch.tensor([3, -1]))


FAULTS = ("PYG_SCALE_FAULT_SHARED_SLOTS", "PYG_SCALE_FAULT_ANY_PLACE")


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_alone_under_sanitizers_and_with_faults(fault):
    program = emulated.program("check_places.cpp", ["first_places"], fault=fault, of="first_places")
    done = emulated.run(program)
    if fault:
        assert done.returncode != 0
        assert "a first place is wrong" in done.stdout
    else:
        assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr
