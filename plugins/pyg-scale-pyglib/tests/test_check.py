import importlib.util

import pytest

from pyg_scale_pyglib import check, sampler

LIBRARIES = [("pyg_lib", check.pyg_lib), ("torch_sparse", check.torch_sparse)]


@pytest.mark.parametrize(("module", "function"), LIBRARIES)
def test_says_whether_the_library_samples(module, function):
    found = function()
    if importlib.util.find_spec(module) is None:
        assert found.ok is None
        assert "not installed" in found.detail
        assert found.fix.startswith("pip install")
    else:
        assert found.ok, found


def test_a_library_that_is_broken_is_reported(monkeypatch):
    monkeypatch.setattr(sampler.TorchSparseSampler, "module", "this")  # can be found
    monkeypatch.setattr(
        sampler.TorchSparseSampler, "_require", lambda self: (_ for _ in ()).throw(OSError("bad"))
    )
    found = check.torch_sparse()
    assert found.ok is False
    assert "OSError: bad" in found.detail
    assert "reinstall torch-sparse" in found.fix
