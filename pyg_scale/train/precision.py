"""Mixed precision: the forward in 16 bits, parameters and their gradients in 32."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import DeviceError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions by name."""


class Precision:
    """The precision of a training, with the scaling of losses that 16-bit floats need.

    ```python
    precision = Precision("fp16", device)
    for batch in loader:
        optimizer.zero_grad()
        with precision.autocast():
            loss = ...
        precision.scale(loss).backward()        # or model.backward(precision.scale(loss), ...)
        precision.step(optimizer)               # left out if a gradient overflowed
    ```

    ``fp16`` has few exponents: losses are multiplied by a factor, gradients divided by it, and a
    step whose gradients are not finite is left out and halves the factor (Micikevicius et al.,
    "Mixed Precision Training", ICLR 2018, section 3.2); torch's ``GradScaler`` does it. On several
    ranks a gradient that is not finite is so on all of them once it was exchanged, so all leave out
    the same step. ``bf16`` has the exponents of ``fp32`` and needs none of this; then, and with
    ``fp32``, the same loop does nothing of it.

    It has ``state_dict`` and ``load_state_dict``: add it to the state of a
    :class:`~pyg_scale.train.Checkpoint`.

    Args:
        name: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        device: The device of the model.
        init_scale: The first factor of ``fp16``.
        growth_interval: After how many steps without overflow it is doubled.

    Attributes:
        skipped: How many steps were left out.

    Raises:
        ValueError: If there is no such precision, or a number is not positive.
        DeviceError: If the device is not there, or has no such precision.
    """

    def __init__(
        self,
        name: str = "bf16",
        device: torch.device | str = "cpu",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        if name not in DTYPES:
            raise ValueError(f"precision must be one of {', '.join(DTYPES)} (got {name!r})")
        if not (math.isfinite(init_scale) and init_scale > 0 and growth_interval > 0):
            raise ValueError(
                f"init_scale and growth_interval must be above 0 (got {init_scale} and "
                f"{growth_interval})"
            )
        self.name, self.device, self.skipped = name, torch.device(device), 0
        _check(name, self.device)
        self._scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=init_scale,
            growth_interval=growth_interval,
            enabled=name == "fp16",
        )
        self.scale(torch.ones((), device=self.device))  # a rank without batches makes steps, too

    def autocast(self) -> torch.autocast:
        """A context in which ops compute in this precision where torch holds that to be safe."""
        enabled = self.name != "fp32"
        return torch.autocast(self.device.type, DTYPES[self.name], enabled=enabled)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor; its ``backward`` gives gradients times the factor."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the factor now, as clipping them needs; once before a step."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make a step of the optimizer, unless a gradient is not finite.

        Returns:
            False if the step was left out.
        """
        if not self._scaler.is_enabled():
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        with warnings.catch_warnings():
            # Torch's schedulers warn of a first step that was left out, which is usual here.
            warnings.filterwarnings("ignore", "Detected call of")
            self._scaler.step(optimizer)
            self._scaler.update()
        made = self._scaler.get_scale() >= before
        self.skipped += not made
        return made

    def state_dict(self) -> dict[str, Any]:
        """The precision, the factor and the steps since it last changed."""
        return {"name": self.name, "skipped": self.skipped, "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a state.

        Raises:
            ValueError: If it is that of another precision.
        """
        if state["name"] != self.name:
            raise ValueError(
                f"the state is of a training in {state['name']}, and this one is in {self.name}"
            )
        self.skipped = state["skipped"]
        self._scaler.load_state_dict(state["scaler"])


def _check(name: str, device: torch.device) -> None:
    """Refuse a device that is not there or computes in other precisions only."""
    kind = device.type
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device {str(device)!r}: there is no CUDA here; device='cpu' is there")
    if name == "fp32":
        return
    if kind not in ("cpu", "cuda"):
        raise DeviceError(
            f"precision {name!r} is supported on cpu and cuda, not on {kind!r}: use 'fp32' there"
        )
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        least = (8, 0) if name == "bf16" else (5, 3)
        if (major, minor) < least:
            other = "'fp16' or 'fp32'" if name == "bf16" and (major, minor) >= (5, 3) else "'fp32'"
            raise DeviceError(
                f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
                f"{name!r} needs {least[0]}.{least[1]}: use {other}"
            )
