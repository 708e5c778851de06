"""Files of rows and columns: edge lists and tables of nodes."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Column:
    """The role of a column.

    Attributes:
        dtype: As in ``torch.float32``, or ``"text"`` where only ids can be made of it.
        row: Shape of one entry: ``()`` for a number.
    """

    dtype: str
    row: tuple[int, ...] = ()


class Table(abc.ABC):
    """A file of rows. The first two columns of an edge list are its sources and destinations.

    Args:
        path: The file.
        **options: Of the format, as the user gave them.
    """

    fast: ClassVar[bool] = True
    """True if rows can be read again, and from anywhere, at little cost. What is slow to read is
    copied to plain files once."""

    positions: ClassVar[bool] = False
    """True if node ids are row numbers, so that they are never mapped."""

    path: Path

    columns: dict[str, Column]
    """By name, in the order of the file."""

    num_rows: int | None = None
    """``None`` if it is known only after reading them all."""

    @abc.abstractmethod
    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        """Yield the named columns of consecutive rows, from row ``begin`` on.

        No chunk is empty, or longer than ``rows``. Text is an array of dtype ``S`` (UTF-8); dtypes
        that NumPy lacks are their bits.

        Raises:
            ValueError: If a row is wrong; names the file and the row.
        """

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        return [self.path]

    def row_name(self, row: int) -> str:
        """The name of a row in errors."""
        return f"row {row} of {self.path}"

    def column_file(self, name: str) -> Path | None:
        """A ``.npy`` file that holds exactly a column, if there is one: it can be linked."""
        return None

    def close(self) -> None:  # noqa: B027
        """Let go of the file."""
