"""Comparison of a feature store with a dict, over sequences of calls from hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch_geometric.data import FeatureStore

from pyg_scale.testing.store_content import assert_holds

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
