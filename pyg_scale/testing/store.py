"""Conformance of feature stores, which must return what was put, also to eight threads at once."""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr
from torch_geometric.data.feature_store import _FieldStatus

from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.store.base import (
    DeclaresCapacity,
    LendsRows,
    LooksAhead,
    RowReader,
    RowRequester,
    is_read_only,
    returns_views,
)
from pyg_scale.testing.graph_store import GraphStoreTests
from pyg_scale.testing.store_content import (
    assert_equal,
    assert_holds,
    assert_same,
    bound_of,
    check_cache,
    forked,
    numbers,
    read_rows,
    takes,
)

__all__ = ["FeatureStoreTests", "GraphStoreTests"]

Content = Mapping[tuple[Any, str], Tensor]
"""Content of a store: tensors by group (a node type, an edge type or ``None``) and name."""

ROWS = 50
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (1,), (7,), (3, 2)]
BUYS = ("user", "buys", "item")

INDICES: dict[str, Any] = {
    "all": None,
    "every row": slice(None),
    "slice": slice(3, 40),
    "slice with a step": slice(1, 30, 4),
    "empty slice": slice(5, 5),
    "slice from the end": slice(-4, None),
    "one row": 7,
    "unsorted": torch.tensor([30, 2, 49, 0]),
    "repeated": torch.tensor([4, 4, 9, 4]),
    "empty": torch.empty(0, dtype=torch.int64),
    "int32": torch.tensor([30, 2, 2], dtype=torch.int32),
    "not contiguous": torch.arange(40).view(20, 2)[:, 1],
    "many": torch.arange(5000) * 7 % ROWS,
    "numpy": np.array([30]),  # PyG's is_fully_specified fails on more than one
}
"""The kinds of indices by which rows can be read."""


class FeatureStoreTests:
    """Tests of a feature store that is initially empty.

    The capabilities of :mod:`pyg_scale.store.base` that a store has are tested too, and are what
    it may do beyond the contract: without ``DeclaresViews`` it returns copies, without
    ``DeclaresDtypes`` it takes every dtype, without ``DeclaresError`` numbers are equal to those
    that were put. With ``DeclaresReadOnly``, override :meth:`fill` to make a store.

    Example::

        class TestMyStore(FeatureStoreTests):
            @pytest.fixture
            def feature_store(self):
                return MyStore()
    """

    @pytest.fixture
    def feature_store(self) -> FeatureStore:
        """An empty store."""
        raise NotImplementedError("return an empty feature store, such as MyStore()")

    def fill(self, store: FeatureStore, content: Content) -> FeatureStore:
        """A store with ``content``; override it for a read-only store."""
        for (group, name), tensor in content.items():
            assert store.put_tensor(tensor, group_name=group, attr_name=name, index=None), (
                "put_tensor must return True"
            )
        return store

    def reopen(self, store: FeatureStore) -> FeatureStore | None:
        """A second store of the same content; override it for a persistent store."""
        return None

    # Reading ###############################################################################

    def test_is_a_feature_store(self, feature_store: FeatureStore) -> None:
        assert isinstance(feature_store, FeatureStore)
        assert feature_store.get_all_tensor_attrs() == [], "the store must be initially empty"

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gives_what_was_put(
        self, feature_store: FeatureStore, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        tensor = numbers(ROWS, *shape).to(dtype)
        if not takes(feature_store, dtype):
            with pytest.raises(TypeError):
                self.fill(feature_store, {("user", "x"): tensor})
            assert feature_store.get_all_tensor_attrs() == []
            return
        store = self.fill(feature_store, {("user", "x"): tensor})
        assert_holds(store, "user", "x", tensor)
        index = torch.tensor([3, 1, 3])
        assert_holds(store, "user", "x", tensor[index], index)
        assert tuple(store.get_tensor_size("user", "x")) == tuple(tensor.shape)

    @pytest.mark.parametrize("index", INDICES)
    def test_indices(self, feature_store: FeatureStore, index: str) -> None:
        tensor, wanted = numbers(ROWS, 3), INDICES[index]
        store = self.fill(feature_store, {("user", "x"): tensor})
        got = store.get_tensor("user", "x", wanted, convert_type=index == "numpy")
        if index == "numpy":
            assert isinstance(got, np.ndarray), "convert_type=True: NumPy in, NumPy out"
            got = torch.from_numpy(got)
        rows = wanted if not isinstance(wanted, np.ndarray) else torch.from_numpy(wanted)
        expected = tensor if rows is None else tensor[rows]
        assert_same(got, expected, bound_of(store, "user", "x", rows))

    def test_tensors_that_are_not_contiguous(self, feature_store: FeatureStore) -> None:
        tensor = numbers(4, ROWS).t()
        store = self.fill(feature_store, {("user", "x"): tensor})
        assert_holds(store, "user", "x", tensor[[5, 0]], torch.tensor([5, 0]))

    def test_groups(self, feature_store: FeatureStore) -> None:
        content = {
            ("user", "x"): numbers(4, 2),
            ("item", "x"): -numbers(5, 2),
            ("user", "y"): numbers(4).long() if takes(feature_store, torch.int64) else numbers(4),
            (BUYS, "edge_attr"): numbers(9, 1),
            (None, "x"): 7 + numbers(3),
        }
        store = self.fill(feature_store, content)
        for (group, name), tensor in content.items():
            assert_holds(store, group, name, tensor)
            assert tuple(store.get_tensor_size(group, name)) == tuple(tensor.shape)
        listed = [(attr.group_name, attr.attr_name) for attr in store.get_all_tensor_attrs()]
        assert sorted(map(str, listed)) == sorted(map(str, content))

    def test_listed_attributes_are_fresh(self, feature_store: FeatureStore) -> None:
        store = self.fill(feature_store, {("user", "x"): numbers(ROWS)})
        for attr in store.get_all_tensor_attrs():  # loaders write to them
            attr.index = torch.tensor([0])
        again = store.get_all_tensor_attrs()[0]
        assert not isinstance(again.index, Tensor), "get_all_tensor_attrs must return new objects"

    def test_many_at_once(self, feature_store: FeatureStore) -> None:
        content = {("user", "x"): numbers(ROWS, 2), ("item", "x"): -numbers(ROWS, 3)}
        store = self.fill(feature_store, content)
        index = torch.tensor([8, 2, 8])
        asked = [
            ("item", "x", index),
            ("user", "x", None),
            ("item", "x", index.flip(0)),
            ("user", "x", index[:0]),
        ]
        got = store.multi_get_tensor([TensorAttr(*attr) for attr in asked])
        assert len(got) == len(asked)
        for tensor, (group, name, rows) in zip(got, asked):
            expected = content[group, name]
            expected = expected if rows is None else expected[rows]
            assert_same(tensor, expected, bound_of(store, group, name, rows))
        assert store.multi_get_tensor([]) == []

    @pytest.mark.parametrize(
        "index", [[ROWS], [0, ROWS + 3, 1], [-ROWS - 1], [2**40], [-1]], ids=str
    )
    def test_rows_that_do_not_exist(self, feature_store: FeatureStore, index: list[int]) -> None:
        tensor = numbers(ROWS, 2)
        store = self.fill(feature_store, {("user", "x"): tensor})
        with pytest.raises(IndexError) as error:
            store["user", "x", torch.tensor(index)]
        wrong = next(i for i in index if not 0 <= i < ROWS)
        for number in (wrong, ROWS):
            assert str(number) in str(error.value), f"the error must name {number}"

    def test_what_was_never_put(self, feature_store: FeatureStore) -> None:
        store = self.fill(feature_store, {("user", "x"): numbers(ROWS)})
        for group, name in (("user", "z"), ("item", "x"), (None, "x")):
            with pytest.raises(KeyError):
                store[group, name, None]
        with pytest.raises(ValueError, match="not fully specified"):
            store.get_tensor(TensorAttr("user", _FieldStatus.UNSET, None))

    def test_rows_are_copies(self, feature_store: FeatureStore) -> None:
        tensor = numbers(ROWS, 2)
        store = self.fill(feature_store, {("user", "x"): tensor.clone()})
        before = store["user", "x", None].clone()
        indices: list[Any] = [torch.arange(ROWS), torch.tensor([3])]
        if not returns_views(store):
            indices += [None, slice(0, 10)]
        for index in indices:
            got = store["user", "x", index]
            with contextlib.suppress(RuntimeError):  # a read-only tensor is no alias
                got.fill_(-1)
            assert torch.equal(store["user", "x", None], before), (
                f"the result of get_tensor for index {index} shares memory with the store; "
                f"copy it, or declare returns_views = True for a whole tensor and slices"
            )

    def test_rows_are_written_where_they_belong(self, feature_store: FeatureStore) -> None:
        tensor, index = numbers(ROWS, 3), torch.tensor([7, 0, 7])
        store = self.fill(feature_store, {("user", "x"): tensor})
        if not isinstance(store, RowReader):
            pytest.skip("the store has no read_rows: it is not a RowReader")
        out = torch.full((5, 3), -1.0)
        raw = out.view(torch.uint8).view(5, -1)
        store.read_rows(TensorAttr("user", "x"), index, torch.tensor([4, 0, 2]), raw)
        expected = torch.full((5, 3), -1.0)
        expected[[4, 0, 2]] = tensor[index]
        assert torch.equal(out, expected), "read_rows must write these rows and no others"

    def test_rows_that_are_asked_for_come(self, feature_store: FeatureStore) -> None:
        content = {("user", "x"): numbers(ROWS, 3), ("item", "x"): -numbers(ROWS, 2)}
        store, index = self.fill(feature_store, content), torch.tensor([7, 0, 7])
        if not isinstance(store, RowRequester):
            pytest.skip("the store has no ask_rows: it is not a RowRequester")
        asked = store.ask_rows([(TensorAttr(*key), index) for key in content])
        assert len(asked) == len(content), "ask_rows returns one function for each tensor"
        for take, tensor in zip(reversed(asked), reversed(content.values())):
            rows = take()
            assert rows.dtype == torch.uint8 and rows.dim() == 2, "rows are uint8 [n, row_bytes]"
            assert torch.equal(rows.contiguous().view(tensor.dtype), tensor[index])

    def test_lent_rows_are_those_that_are_read(self, feature_store: FeatureStore) -> None:
        tensor = numbers(ROWS, 5).to(torch.float32)
        store = filled = self.fill(feature_store, {("user", "x"): tensor})
        if not isinstance(store, LendsRows) or not store.lends_rows:
            pytest.skip("the store has no lend_rows, or lends none: it is not a LendsRows")
        kept = []
        for rows in ([3, 1, 3], [0], [], [9, 3, 8, 1], list(range(ROWS)), [3, 1, 0]):
            index = torch.tensor(rows, dtype=torch.int64)
            lent = store.lend_rows(TensorAttr("user", "x", index=index))
            if lent is not None:
                kept.append((LazyRows(*lent), filled.get_tensor("user", "x", index)))
        for lazy, read in kept:  # all at once: what was lent stays
            assert torch.equal(lazy, read)

    def test_announced_batches_are_those_that_are_read(self, feature_store: FeatureStore) -> None:
        tensor = numbers(ROWS, 3)
        store = filled = self.fill(feature_store, {("user", "x"): tensor})
        if not isinstance(store, LooksAhead):
            pytest.skip("the store has no look_ahead and schedule: it does not look ahead")
        if store.look_ahead < 1:
            pytest.skip("the store does not look ahead")
        batches = [torch.tensor(rows) for rows in ([3, 1, 3], [0], [9, 8])]
        with contextlib.closing(store.schedule()) as schedule:
            for number, index in enumerate(batches):
                schedule.announce(number, [TensorAttr("user", "x", index=index)])
            assert isinstance(schedule.suffices(len(batches) - 1), bool)
            schedule.paused = False
            for number, index in enumerate(batches):
                with schedule.serving(number):
                    (got,) = filled.multi_get_tensor([TensorAttr("user", "x", index=index)])
                assert_same(got, tensor[index], bound_of(filled, "user", "x", index))

    def test_can_be_pickled(self, feature_store: FeatureStore) -> None:
        content = {("user", "x"): numbers(ROWS, 2), (BUYS, "edge_attr"): numbers(9)}
        store = pickle.loads(pickle.dumps(self.fill(feature_store, content)))
        for (group, name), tensor in content.items():
            assert_holds(store, group, name, tensor)

    def test_is_read_after_a_fork(self, feature_store: FeatureStore) -> None:
        tensor, index = numbers(ROWS, 2), torch.tensor([5, 0, 5])
        store = self.fill(feature_store, {("user", "x"): tensor})
        here = store["user", "x", index]
        same = forked(lambda: torch.equal(store["user", "x", index], here))
        assert same, "a forked process (a worker of a DataLoader) must read the same"
        assert_holds(store, "user", "x", tensor[index], index)

    def test_is_there_when_opened_again(self, feature_store: FeatureStore) -> None:
        content = {("user", "x"): numbers(ROWS, 2), (BUYS, "edge_attr"): numbers(9)}
        store = self.reopen(self.fill(feature_store, content))
        if store is None:
            pytest.skip("the store ends with its process")
        for (group, name), tensor in content.items():
            assert_holds(store, group, name, tensor)

    def test_a_cache_gives_the_same_and_keeps_to_its_capacity(
        self, feature_store: FeatureStore
    ) -> None:
        content = {("user", "x"): numbers(2000, 8), ("item", "x"): -numbers(500, 2)}
        store = self.fill(feature_store, content)
        if not isinstance(store, DeclaresCapacity):
            pytest.skip("the store declares no capacity")
        counts = [read_rows(store, content, seed) for seed in range(12)]
        check_cache(store, sum(counts))

    # Writing ###############################################################################

    def test_replacing(self, feature_store: FeatureStore) -> None:
        store = self.writable(feature_store)
        store.update_tensor(numbers(7, 3), "user", "x", None)
        assert_holds(store, "user", "x", numbers(7, 3))
        store.put_tensor(-numbers(4), "user", "x", None)
        assert_holds(store, "user", "x", -numbers(4))
        assert tuple(store.get_tensor_size("user", "x")) == (4,)

    def test_updating_rows(self, feature_store: FeatureStore) -> None:
        store, index = self.writable(feature_store), torch.tensor([4, 0])
        before = store["user", "x", None].clone()
        try:
            store.update_tensor(torch.full((2, 2), -5.0), "user", "x", index)
        except NotImplementedError:
            assert_equal(store["user", "x", None], before)
            return
        left = [attr.attr_name for attr in store.get_all_tensor_attrs()]
        assert left == ["x"], (
            "updating rows removed the tensor: PyG's update_tensor removes and puts. Override it, "
            "or let it raise NotImplementedError for an index that is not None"
        )
        before[index] = -5.0
        assert_holds(store, "user", "x", before)

    def test_removing(self, feature_store: FeatureStore) -> None:
        store = self.writable(feature_store)
        store.put_tensor(numbers(3), "item", "x", None)
        assert store.remove_tensor("user", "x", None) is True
        with pytest.raises(KeyError):
            store["user", "x", None]
        assert store.remove_tensor("user", "x", None) is False, "there was nothing left to remove"
        assert [attr.group_name for attr in store.get_all_tensor_attrs()] == ["item"]

    def test_read_only_means_it(self, feature_store: FeatureStore) -> None:
        store = self.fill(feature_store, {("user", "x"): numbers(5)})
        if not is_read_only(store):
            pytest.skip("the store can be written to")
        for write in (
            lambda: store.put_tensor(numbers(5), "user", "x", None),
            lambda: store.update_tensor(numbers(5), "user", "x", None),
            lambda: store.remove_tensor("user", "x", None),
        ):
            with pytest.raises((NotImplementedError, PermissionError, RuntimeError)):
                write()
        assert_holds(store, "user", "x", numbers(5))

    def writable(self, store: FeatureStore) -> FeatureStore:
        """A store with ``x`` ``[5, 2]`` of users; skips the test if the store is read-only."""
        if is_read_only(store):
            pytest.skip("the store declares read_only = True")
        return self.fill(store, {("user", "x"): numbers(5, 2)})

    # Concurrency ###########################################################################

    def test_eight_threads_read(self, feature_store: FeatureStore) -> None:
        tensor = numbers(2000, 8)
        store = self.fill(feature_store, {("user", "x"): tensor})
        assert_holds(store, "user", "x", tensor)
        held = store["user", "x", None].clone()

        def read(seed: int) -> bool:
            generator = torch.Generator().manual_seed(seed)
            index = torch.randint(0, 2000, (300,), generator=generator)
            return torch.equal(store["user", "x", index], held[index])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(200))), "a thread got rows of another thread"

    def test_readers_see_the_old_or_the_new(self, feature_store: FeatureStore) -> None:
        store = self.writable(feature_store)
        versions = [torch.full((200, 4), float(i)) for i in range(30)]
        store.put_tensor(versions[0], "user", "x", None)
        done, torn = threading.Event(), []

        def read() -> None:
            while not done.is_set():
                got = store["user", "x", torch.arange(200)]
                if got.unique().numel() != 1:
                    torn.append(got.unique().tolist())

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read) for _ in range(4)]
            try:
                for version in versions:
                    store.put_tensor(version, "user", "x", None)
            finally:
                done.set()
            for reader in readers:
                reader.result(timeout=60)
        assert not torn, f"a reader got rows of versions {torn[0]} of a tensor at once"

    def test_any_sequence_of_calls(self, feature_store: FeatureStore) -> None:
        """Random puts, updates, removals and reads give the same as with a dict."""
        if importlib.util.find_spec("hypothesis") is None:
            pytest.skip("needs hypothesis")
        if is_read_only(feature_store):
            pytest.skip("the store declares read_only = True")

        run(feature_store)


KEYS = [("user", "x"), ("user", "y"), ("item", "x"), (("user", "buys", "item"), "edge_attr")]


def run(store: FeatureStore) -> None:
    """Run many sequences of calls on the store, which is emptied before each.

    Raises:
        AssertionError: If the store and a dict differ; shows a shortest sequence.
    """

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            for attr in store.get_all_tensor_attrs():
                store.remove_tensor(attr.group_name, attr.attr_name, None)
            self.expected: dict[Any, Tensor] = {}
            self.number = 0

        def fresh(self, rows: int) -> Tensor:
            self.number += 1
            return torch.arange(rows * 2.0).view(rows, 2) + 1000 * self.number

        @rule(key=st.sampled_from(KEYS), rows=st.integers(0, 6))
        def put(self, key: Any, rows: int) -> None:
            self.expected[key] = self.fresh(rows)
            assert store.put_tensor(self.expected[key].clone(), *key, None)

        @rule(key=st.sampled_from(KEYS), rows=st.integers(0, 6))
        def update(self, key: Any, rows: int) -> None:
            if key in self.expected:
                self.expected[key] = self.fresh(rows)
                store.update_tensor(self.expected[key].clone(), *key, None)

        @rule(key=st.sampled_from(KEYS))
        def remove(self, key: Any) -> None:
            there = self.expected.pop(key, None) is not None
            assert store.remove_tensor(*key, None) is there

        @precondition(lambda self: self.expected)
        @rule(key=st.sampled_from(KEYS), index=st.lists(st.integers(0, 5), max_size=8))
        def get(self, key: Any, index: list[int]) -> None:
            rows = torch.tensor(index, dtype=torch.int64)
            if key not in self.expected:
                with pytest.raises(KeyError):
                    store.get_tensor(*key, rows)
            elif index and max(index) >= self.expected[key].size(0):
                with pytest.raises(IndexError):
                    store.get_tensor(*key, rows)
            else:
                assert_holds(store, key[0], key[1], self.expected[key][rows], rows)

        @rule()
        def listing(self) -> None:
            listed = {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()}
            assert listed == set(self.expected)
            for key, tensor in self.expected.items():
                assert tuple(store.get_tensor_size(*key)) == tuple(tensor.shape)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
