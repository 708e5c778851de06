"""What `pyg-scale bench gpu` checks of loading, without a GPU."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.draw_neighbors import draw_along_types
from pyg_scale.sampler import cuda
from pyg_scale.store.device import table
from pyg_scale_bench import gpu_loading
from pyg_scale_bench.gpu_check import attempt
from tests.ops import emulated

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiled():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")


def test_every_check_passes():
    found = [attempt(name, run) for name, run in gpu_loading.checks(CPU).items()]
    assert [check for check in found if not check.ok] == []
    by_options = gpu_loading.OPTIONS, gpu_loading.HETERO_OPTIONS, gpu_loading.ON_HOST
    assert len(found) == 4 + sum(map(len, by_options)) + 6


@pytest.mark.parametrize("options", gpu_loading.OPTIONS, ids=str)
def test_draws_pass_in_the_emulator(options):
    with emulated.instead_of():
        assert "equal" in gpu_loading._draws(options, CPU)


@pytest.mark.parametrize("options", gpu_loading.HETERO_OPTIONS[1::3], ids=str)
def test_draws_of_several_types_pass_in_the_emulator(options):
    with emulated.instead_of():
        assert "equal" in gpu_loading._draws(options, CPU, of=gpu_loading.hetero_graph)


def test_what_is_wrong_is_found(monkeypatch):
    def other_draws(wanted, replace):
        return draw_along_types([each._replace(key=each.key + 1) for each in wanted], replace)

    monkeypatch.setattr(cuda, "draw_along_types", other_draws)
    monkeypatch.setattr(table, "gather_cached", lambda cached, rest, place: rest[place.abs() - 1])
    found = [attempt(name, run) for name, run in gpu_loading.checks(CPU).items()]
    assert [check.name for check in found if not check.ok][:2] == [
        "rows from the device and staged",
        "draws of the sampler",
    ]
    assert "differ" in found[1].detail
