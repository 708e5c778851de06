"""A run that believes that its tensors are on CUDA, and what it would launch there.

The tensors are on the CPU, and the ops are those of the emulator. What our Python and PyG's do
because of the device is what they do on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_scale.nn import by_number
from pyg_scale.ops import aggregate_rules, edge_formula, fused
from tests.ops import emulated

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ANSWERS = {torch.Tensor.is_cpu: False, torch.Tensor.is_cuda: True, torch.Tensor.device: CUDA}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique_dim", "_unique2"}
NOTHING = {"detach", "_unsafe_view", "lift_fresh"}
"""Operations that return what they got; those that begin with ``empty`` do no work either."""
READS = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy)


class _Pretend(TorchFunctionMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for of, answer in ANSWERS.items():
            if func == of.__get__:  # type: ignore[attr-defined]
                return answer

        self._launches.waits += func in READS

        def here(value: Any) -> Any:
            return CPU if isinstance(value, torch.device) else value

        kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
        return func(*map(here, args), **kwargs)


class Launches(TorchDispatchMode):
    """Counts what is launched within it.

    An operation of torch counts as one kernel, though it may have more; ours as the kernels that
    they launch in the emulator.

    Attributes:
        names: The operations in their order.
        waits: How many of them wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema, name = func._schema, func._schema.name.removeprefix("aten::")
        emulated.launches()
        out = func(*args, **(kwargs or {}))
        if name.startswith("pyg_scale::"):
            self.names += [name] * emulated.launches()
            return out
        writes = [each.alias_info.is_write for each in schema.returns if each.alias_info]
        view = any(not each for each in writes)
        # Indices that are masks are counted first.
        masked = name in ("index", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        self.waits += name in WAITS or masked
        if not view and name not in NOTHING and not name.startswith(("empty", "new_empty")):
            self.names.append(name)
        return out


@contextlib.contextmanager
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Within it tensors say that they are on CUDA; what is launched is counted."""
    emulated.load()
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        stack.enter_context(emulated.instead_of())
        patch.setattr(fused, "_on_cuda", lambda device: True)
        # Rules of rows of edges run without the mode that lets tensors pretend.
        patch.setattr(by_number, "_is_elsewhere", lambda value, rows: False)
        patch.setattr(edge_formula, "_run_interpreted", edge_formula._run_generated)
        patch.setattr(fused, "why_not_generated", lambda device: "")
        on_device = {"csr_transpose": aggregate_rules._transpose_on_cuda}
        stack.enter_context(emulated.overridden(on_device))
        launches = Launches()
        with _Pretend(launches), launches:
            yield launches
