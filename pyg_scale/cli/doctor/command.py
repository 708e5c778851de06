"""Report what is installed, compiled and missing, as a block to paste into an issue.

With ``--dist``, under torchrun or srun, the ranks compare their versions, directories and limits,
and measure the network between them: ``torchrun --nproc-per-node=4 -m pyg_scale.cli doctor --dist``

Exit status: 0 if nothing is broken, 1 otherwise. Missing optional parts do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

from pyg_scale import __version__, plugins
from pyg_scale.cli.doctor.checks import version
from pyg_scale.cli.doctor.ranks import doctor_dist
from pyg_scale.hookspecs import Check
from pyg_scale.kinds import why_no_check

DISTRIBUTIONS = ("torch", "torch_geometric", "numpy", "pluggy", "tqdm")
_MARK = {True: "ok", False: "BROKEN", None: "absent"}


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale doctor``."""
    parser = argparse.ArgumentParser(prog="pyg-scale doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--dist",
        metavar="DIR",
        nargs="?",
        const="",
        help="compare all ranks, and their copies of a graph directory; takes about 30 seconds",
    )
    args = parser.parse_args(argv)
    if args.dist is not None:
        return doctor_dist(args.dist or None, args.json)
    found = examine()
    print(json.dumps(found, indent=2) if args.json else _block(found))
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything that ``pyg-scale doctor`` prints, as plain values. Never raises."""
    failures = [str(failure) for failure in plugins.failures()]
    checks = {}
    for name in plugins.names("check"):
        checks[name] = _run(name)._asdict()
    third_party = sorted(
        {(e.provider, e.version) for e in plugins.entries() if e.provider != plugins.BUILTIN}
    )
    return {
        "ok": not failures and all(check["ok"] is not False for check in checks.values()),
        "versions": {
            "pyg_scale": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in DISTRIBUTIONS},
        },
        "system": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "usable_cpus": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PYG_SCALE_")},
        "plugins": [
            {
                "provider": provider,
                "version": release,
                "names": [
                    f"{e.kind} {e.name}" for e in plugins.entries() if e.provider == provider
                ],
            }
            for provider, release in third_party
        ],
        "failures": failures,
        "checks": checks,
    }


def _run(name: str) -> Check:
    """The result of a check; a check that raises is reported as failed."""
    try:
        found = plugins.get("check", name)()
        wrong = why_no_check(found)
        return Check(False, wrong) if wrong else found
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        return Check(False, f"the check itself failed: {type(error).__name__}: {first}")


def _block(found: dict[str, Any]) -> str:
    system = found["system"]
    lines = ["```", "pyg-scale doctor", ""]
    for name, release in found["versions"].items():
        lines.append(f"{name:<16} {release or 'not installed'}")
    lines.append(f"{'system':<16} {system['platform']}")
    lines.append(f"{'CPUs':<16} {system['usable_cpus']} of {system['cpus']}")
    for name, value in found["environment"].items():
        lines.append(f"{name}={value}")
    lines += ["", "checks"]
    for name, check in found["checks"].items():
        lines.append(f"  {_MARK[check['ok']]:<7} {name:<16} {check['detail']}")
        if check["fix"]:
            lines.append(f"  {'':<7} {'':<16} fix: {check['fix']}")
    lines += ["", "plugins"]
    for plugin in found["plugins"]:
        title = f"{plugin['provider']} {plugin['version']}".strip()
        lines.append(f"  {title}: {', '.join(plugin['names'])}")
    lines += [f"  BROKEN  {failure}" for failure in found["failures"]]
    if not found["plugins"] and not found["failures"]:
        lines.append("  none but what is built in")
    return "\n".join([*lines, "```"])
