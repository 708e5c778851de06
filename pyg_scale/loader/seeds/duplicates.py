"""Ranks that all iterate over the same seeds are told so, once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import Group
from pyg_scale.comm.time_limit import within
from pyg_scale.loader.seeds.sharding import fingerprint

_LOOKS = 2  # a rank that comes first cannot see the others before its second epoch
_SECONDS = 10.0  # for the store, whose process may be stopped


class DuplicateSeedCheck:
    """Notices when every rank iterates over the same seeds. Never waits for a rank.

    Args:
        name: The loader, for the warning.
        group: The ranks, more than one.
        seeds: The seeds.
    """

    def __init__(self, name: str, group: Group, seeds: Sequence[Tensor]) -> None:
        self._name, self._group = name, group
        self._num_seeds = seeds[0].numel()
        self._topic = f"{name}/{fingerprint(seeds)}"
        self._looks = 0

    def look(self) -> None:
        """An epoch begins: say that this rank has these seeds, and see who else has."""
        self._looks += 1
        if self._looks > _LOOKS or not self._num_seeds:
            return
        try:
            here, said = within(_SECONDS, self._tell)
        except (RuntimeError, TimeoutError):  # the store is gone, and the reason to say something
            here, said = True, True
        if not here:
            return
        self._looks = _LOOKS
        if not said:
            warnings.warn(
                f"all {self._group.world_size} ranks iterate over the same {self._num_seeds} seeds "
                f"in this {self._name}, so that an epoch has each of them "
                f"{self._group.world_size} times: pass split_seeds='global' to share them, or "
                "split input_nodes yourself",
                stacklevel=2,
            )

    def _tell(self) -> tuple[bool, bool]:
        """A pair: True if all ranks have these seeds, and True if one of them has said so."""
        store: Any = PrefixStore("unsplit", self._group.store)
        store.set(f"{self._topic}/{self._group.rank}", "here")
        if not store.check([f"{self._topic}/{rank}" for rank in range(self._group.world_size)]):
            return False, False
        return True, int(store.add(f"{self._topic}/said", 1)) > 1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_group": None, "_looks": _LOOKS}
