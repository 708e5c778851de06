"""The check of fused layers in ``pyg-scale doctor``."""

from __future__ import annotations

import warnings

from pyg_scale.hookspecs import Check


def convs() -> Check:
    """Run every installed fused layer, and list the calls that took PyG's own path."""
    import torch

    from pyg_scale.nn.fallback import fallbacks
    from pyg_scale.nn.switch import replacements
    from pyg_scale.ops import library

    failures: list[str] = []
    found = replacements((), failures)
    if failures:
        return Check(False, "; ".join(failures), "pip uninstall the plugin, or fix it")
    if len(found) == 0:
        return Check(None, "there is no fused layer")
    kernels = library.status()
    if kernels["mode"] == "invalid":
        return Check(False, f"layers raise: {kernels['reason']}", kernels["command"])
    counted = [
        f"{name}: {reason} ({number} calls)"
        for name, reasons in fallbacks().items()
        for reason, number in reasons.items()
    ]
    names = sorted(cls.__name__ for cls in found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = next(cls for cls in found.values() if cls.__name__ == "SAGEConv")(4, 4)
        layer.min_work = 0
        layer(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
    broken = fallbacks(layer)
    if broken:
        reason = next(iter(broken[""]))
        return Check(False, f"layers take PyG's path: {reason}", "report it, with this text")
    path = "compiled" if kernels["loaded"] else "plain torch, no faster than PyG's"
    detail = f"{', '.join(names)}: {path}"
    if not kernels["loaded"] and not kernels["command"]:
        detail += f" ({kernels['reason']})"
    if counted:
        detail += "; PyG's path was taken by " + "; ".join(counted)
    return Check(True if path == "compiled" else None, detail, kernels["command"])
