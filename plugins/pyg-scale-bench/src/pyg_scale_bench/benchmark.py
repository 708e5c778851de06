"""Benchmarks with their options, measurements and reports, and the function that runs one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pyg_scale.ops import library
from pyg_scale.partitioner.report import check_drawable
from pyg_scale_bench import environment
from pyg_scale_bench.report import Report

HIDDEN = ("dir", "json", "png", "report", "npz", "compare_npz")
"""Options that name files of this machine. Reports, which are published, leave them out."""


_PREFIX = "pyg-scale-bench-"  # of folders in --dir


class Option(NamedTuple):
    """An option of a command line.

    Attributes:
        default: Its default value, which determines the type: an integer (also written ``4e7``), a
            float, a list of integers, a switch, else a string.
        help: Text for ``--help``.
        type: Converts the text to the value, if the default does not determine that.
        least: The smallest valid number, also of each in a list.
        choices: All valid values.
        required: True if it must be given.
    """

    default: Any = None
    help: str = ""
    type: Callable[[str], Any] | None = None
    least: float | None = None
    choices: Sequence[str] | None = None
    required: bool = False


Options = Mapping[str, Option]

FOLDER: Options = {
    "dir": Option(
        help="a folder with room for the files; they lie in a new folder in it, which is deleted "
        "at the end, and nothing else is",
        required=True,
    ),
    "keep": Option(False, "keep the files, as DIR/pyg-scale-bench-NAME"),
}
"""Options of benchmarks that write files. They write to ``args.dir``, see :func:`_own_folder`."""


def file(text: str) -> str:
    """The type of an option: the path of a file that can be written."""
    path = Path(text).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is no folder")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return text


def picture(text: str) -> str:
    """The type of an option: the path of a picture that can be drawn and written."""
    try:
        check_drawable(text)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return file(text)


OUTPUT: Options = {
    "json": Option(help="write all results", type=file),
    "png": Option(help="draw it", type=picture),
    "report": Option(help="write the report as Markdown", type=file),
}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: Name in ``pyg-scale bench NAME``.
        about: Text for ``--help``.
        options: Options by title of their group, then by name.
        measure: Takes the options and adds JSON values to the results.
        report: Makes a report of the results.
        quick: Defaults with ``--quick``, for a run of seconds; empty if not supported.
        complaint: Returns the fault of the options, or ``None``.
    """

    name: str
    about: str | None
    options: Mapping[str, Options]
    measure: Callable[[argparse.Namespace, dict[str, Any]], None]
    report: Callable[[Mapping[str, Any]], Report]
    quick: Mapping[str, Any] | None = None
    complaint: Callable[[argparse.Namespace], str | None] = lambda args: None


def run(benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Measure, print the report, and write the requested files.

    Returns:
        The exit status: 1 if the benchmark found something wrong, else 0.

    Raises:
        KernelsError: If there are no compiled kernels.
    """
    args = arguments(benchmark, argv)
    os.environ.setdefault("PYG_SCALE_KERNELS", "require")
    library.compiled()  # raises at once, before a graph is made
    found: dict[str, Any] = {
        "benchmark": benchmark.name,
        "command": environment.command(benchmark.name, argv),
        "environment": environment.describe(),
        "settings": {k: v for k, v in vars(args).items() if k not in HIDDEN},
    }
    others = environment.Others()
    with _cleaned_up_on_sigterm(), _own_folder(benchmark.name, args):
        benchmark.measure(args, found)
    environment.complete(found["environment"], others)
    report = benchmark.report(found)
    print(report.terminal())
    report.write(args.json, args.png, args.report)
    return int(report.failed)


def report_again(make: Callable[[str], Benchmark], argv: Sequence[str]) -> int:
    """Run ``pyg-scale bench report``: the report of an earlier run.

    Args:
        make: Returns the benchmark of a name; raises ``ValueError`` if there is none.
        argv: The arguments.
    """
    parser = argparse.ArgumentParser(
        prog="pyg-scale bench report",
        description="Show the results of an earlier run, and write its report and picture again.",
        allow_abbrev=False,
    )
    parser.add_argument("found", metavar="FILE.json", help="the file that --json wrote")
    for name in ("png", "report"):
        _add(parser, name, OUTPUT[name])
    args = parser.parse_args(argv)
    try:
        found = json.loads(Path(args.found).read_text(encoding="utf-8"))
        report = make(found["benchmark"]).report(found)
        text = report.terminal()
    except OSError as error:
        parser.error(f"{args.found}: {error.strerror or error}")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        parser.error(f"{args.found} is no file that --json wrote, or is damaged: {why}")
    print(text)
    report.write(None, args.png, args.report)
    return 0


def arguments(benchmark: Benchmark, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a benchmark; ends the process if they are wrong."""
    parser = argparse.ArgumentParser(
        prog=f"pyg-scale bench {benchmark.name}",
        description=benchmark.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --quick is looked for among the arguments, and --dir is hidden
    )
    every = {**benchmark.options, "output": OUTPUT}
    for title, options in every.items():
        group = parser.add_argument_group(title)
        for name, option in options.items():
            _add(group, name, option)
    if benchmark.quick is not None:
        about = "a small run, to see that it works"
        parser.add_argument("--quick", action="store_true", help=about)
        if "--quick" in argv:
            parser.set_defaults(**benchmark.quick)
    args = parser.parse_args(argv)
    for options in every.values():
        for name, option in options.items():
            value = getattr(args, name)
            each = value if isinstance(value, list) else [] if value is None else [value]
            if option.least is not None and any(one < option.least for one in each):
                parser.error(f"{_flag(name)} must be at least {option.least}")
    if "dir" in args and (args.keep or _reuses(args)):
        args.dir = str(Path(args.dir).absolute() / f"{_PREFIX}{benchmark.name}")
        if not _reuses(args) and Path(args.dir).exists():
            again = "give --reuse, or delete it" if "reuse" in args else "delete it"
            parser.error(f"{args.dir} is there: an earlier run with --keep left it; {again}")
    if complaint := benchmark.complaint(args):
        parser.error(complaint)
    return args


def count(text: str) -> int:
    """Parse an integer, also written ``4e7``."""
    number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


def numbers(text: str) -> list[int]:
    """Parse integers such as ``15,10,5``."""
    return [int(part) for part in text.split(",")]


def names_of(among: Sequence[str], or_none: bool = False) -> Callable[[str], list[str]]:
    """The type of an option: some of these names, separated by commas, or ``none`` if allowed."""

    def names(text: str) -> list[str]:
        found = [] if or_none and text == "none" else [part.strip() for part in text.split(",")]
        for name in found:
            if name not in among:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(among)}")
        return found

    return names


def size_of(folder: Path) -> int:
    """Size in bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextlib.contextmanager
def _cleaned_up_on_sigterm() -> Iterator[None]:
    """A context that SIGTERM ends as an exception does, so that servers and files do not stay."""
    if threading.current_thread() is not threading.main_thread():  # only that one takes signals
        yield
        return
    own = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != own:  # a worker that was forked has nothing of ours to clean up
            os._exit(128 + number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _own_folder(name: str, args: argparse.Namespace) -> Iterator[None]:
    """Make ``args.dir`` a folder of this run alone, unless files are kept or used again.

    Afterwards it is deleted with what else the run made, and nothing that was there before.
    """
    if "dir" not in args:
        yield
        return
    root = Path(args.dir).absolute()
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not args.keep and not _reuses(args):
            args.dir = tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-", dir=root)
    except OSError as error:
        raise SystemExit(f"pyg-scale bench: --dir {root}: {error.strerror or error}") from None
    own = Path(args.dir)
    try:
        yield
    finally:
        if not args.keep and (own != root or root in made):
            shutil.rmtree(own, ignore_errors=True)
        for path in made:  # the innermost first
            with contextlib.suppress(OSError):  # others have put something there
                path.rmdir()


def _reuses(args: argparse.Namespace) -> bool:
    """True if files of an earlier run are used again."""
    return bool(getattr(args, "reuse", False))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add(group: argparse._ActionsContainer, name: str, option: Option) -> None:
    if option.default is False:
        group.add_argument(_flag(name), action="store_true", help=option.help)
        return
    convert: dict[type, Callable[[str], Any]] = {int: count, float: float, list: numbers}
    group.add_argument(
        _flag(name),
        type=option.type or convert.get(type(option.default), str),
        default=option.default,
        choices=option.choices,
        required=option.required,
        help=option.help,
    )
