"""Every test of the stores runs on the plain path and on the compiled one."""

from __future__ import annotations

import pytest

from pyg_scale.ops import library


@pytest.fixture(autouse=True, params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
