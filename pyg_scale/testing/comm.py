"""Conformance of communicators: every collective on 1 to 4 ranks, against plain torch."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.comm import Communicator, Counting, Fault, Faulty, Group
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.testing.ranks import run_ranks
from pyg_scale.testing.service import ServiceTests

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SHAPES = [(0,), (1,), (7,), (3, 2), (0, 5), (2, 0), (), (5, 1, 2), (4096, 33)]
"""Shapes of tensors that ranks send to each other."""


class CommTests(ServiceTests):
    """Tests of a communicator.

    ``comm`` joins a group: a subclass of :class:`~pyg_scale.comm.Communicator` or any function of a
    :class:`~pyg_scale.comm.Group`, without state. Ranks are threads of one process.

    * ``world_sizes``: Possible numbers of ranks.
    * ``device``: Device of tensors.
    * ``names_who_is_missing``: True if the error of a time limit names the rank that did not
      answer.
    * ``matches_by_tag``: True if calls with tags may be made in a different order on each rank.
    * ``serves``: True if it has requests and replies.

    Example::

        class TestMine(CommTests):
            @pytest.fixture
            def comm(self):
                return MyCommunicator.join
    """

    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    device = "cpu"
    names_who_is_missing = True
    matches_by_tag = True

    @pytest.fixture
    def comm(self) -> Any:
        """The factory of communicators, which joins a group."""
        raise NotImplementedError("return a class with join(), such as MyCommunicator")

    def on_ranks(
        self, comm: Any, size: int, function: Callable[[Communicator], Any], timeout: float = 30.0
    ) -> list[Any]:
        """Call ``function`` on each of ``size`` ranks with its communicator."""
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        join = comm.join if hasattr(comm, "join") else comm

        def work(group: Group) -> Any:
            with join(group) as joined:
                assert isinstance(joined, Communicator)
                assert (joined.rank, joined.world_size) == (group.rank, group.world_size)
                found = function(joined)
                joined.barrier()  # a rank that closes first must not break the others
                return found

        return run_ranks(size, work, timeout=timeout)

    def tensor(self, source: int, target: int, number: int, dtype: torch.dtype) -> Tensor:
        """The tensor from ``source`` to ``target``; every pair has its own shape and values."""
        shape = SHAPES[(3 * source + target + number) % len(SHAPES)]
        size = torch.Size(shape).numel()
        value = (torch.arange(size) * 7 + 31 * source + 5 * target + number) % 101
        return value.to(dtype).view(shape).to(self.device)

    # Collectives ###########################################################################

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_all_to_all(self, comm: Any, size: int, dtype: torch.dtype) -> None:
        def work(ranks: Communicator) -> None:
            for number in range(len(SHAPES)):
                sent = [self.tensor(ranks.rank, r, number, dtype) for r in range(size)]
                kept = [tensor.clone() for tensor in sent]
                found = ranks.all_to_all(sent)
                assert all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True))
                for source, tensor in enumerate(found):
                    expected = self.tensor(source, ranks.rank, number, dtype)
                    assert tensor.dtype == dtype and tensor.shape == expected.shape
                    assert tensor.device.type == self.device and torch.equal(tensor, expected)

        self.on_ranks(comm, size, work)

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_all_gather_broadcast_and_all_reduce(self, comm: Any, size: int) -> None:
        def work(ranks: Communicator) -> list[Tensor]:
            mine = self.tensor(ranks.rank, 0, 6, torch.float32)
            gathered = ranks.all_gather(mine)
            for source, tensor in enumerate(gathered):
                assert torch.equal(tensor, self.tensor(source, 0, 6, torch.float32))
            for source in range(size):
                sent = mine if source == ranks.rank else None
                found = ranks.broadcast(sent, source)
                assert torch.equal(found, self.tensor(source, 0, 6, torch.float32))
            generator = torch.Generator().manual_seed(0)
            everyone = torch.randn(size, 5, 3, generator=generator).to(self.device)
            own = everyone[ranks.rank].clone()
            total = everyone[0].clone()
            for row in everyone[1:]:
                total += row
            reduced = ranks.all_reduce(own)
            assert torch.equal(own, everyone[ranks.rank]), "the input was changed"
            assert torch.equal(reduced, total), "sums are taken in the order of the ranks"
            assert torch.equal(ranks.all_reduce(own, "max"), everyone.amax(0))
            assert torch.equal(ranks.all_reduce(own, "min"), everyone.amin(0))
            few = torch.tensor([ranks.rank + 1], device=self.device)
            assert ranks.all_reduce(few).tolist() == [size * (size + 1) // 2]
            assert ranks.all_reduce(few[:0]).shape == (0,)
            return reduced

        found = self.on_ranks(comm, size, work)
        assert all(torch.equal(found[0], each) for each in found)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_what_is_not_contiguous_is_sent_as_it_looks(self, comm: Any, size: int) -> None:
        def work(ranks: Communicator) -> None:
            base = torch.arange(12, device=self.device).view(3, 4)
            for view in (base.t(), base[:, 1], base[::2], base[0].expand(5, 4)):
                assert all(torch.equal(found, view) for found in ranks.all_gather(view))

        self.on_ranks(comm, size, work)

    # Calls under way #######################################################################

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_several_calls_under_way(self, comm: Any, size: int) -> None:
        def work(ranks: Communicator) -> None:
            calls = [
                ranks.all_to_all(
                    [self.tensor(ranks.rank, r, n, torch.int64) for r in range(size)], async_op=True
                )
                for n in range(6)
            ]
            for number in range(6) if ranks.rank % 2 else reversed(range(6)):
                for _ in range(2):  # the result may be asked for again
                    for source, tensor in enumerate(calls[number].wait()):
                        expected = self.tensor(source, ranks.rank, number, torch.int64)
                        assert torch.equal(tensor, expected)

        self.on_ranks(comm, size, work)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_threads_with_tags_need_no_order(self, comm: Any, size: int) -> None:
        if not self.matches_by_tag:
            pytest.skip("calls are matched by their order")

        def work(ranks: Communicator) -> None:
            errors: list[BaseException] = []

            def thread(number: int) -> None:
                try:
                    time.sleep(0.01 * ((number * 7 + ranks.rank * 3) % 5))
                    sent = [self.tensor(ranks.rank, r, number, torch.int32) for r in range(size)]
                    for source, tensor in enumerate(ranks.all_to_all(sent, tag=number)):
                        expected = self.tensor(source, ranks.rank, number, torch.int32)
                        assert torch.equal(tensor, expected)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=thread, args=(n,), daemon=True) for n in range(8)]
            for each in threads:
                each.start()
            for each in threads:
                each.join(30)
                assert not each.is_alive()
            assert not errors, errors

        self.on_ranks(comm, size, work)

    @pytest.mark.parametrize("size", [2, 4])
    def test_a_barrier_waits_for_the_last(self, comm: Any, size: int) -> None:
        arrived: list[int] = []

        def work(ranks: Communicator) -> None:
            ranks.barrier()
            if ranks.rank == size - 1:
                time.sleep(0.2)
            arrived.append(ranks.rank)
            ranks.barrier()
            assert len(arrived) == size, "a rank left the barrier before all had arrived"

        self.on_ranks(comm, size, work)

    # Failures ##############################################################################

    @pytest.mark.parametrize("size", [2, 3])
    def test_a_rank_that_does_not_answer_is_named_in_time(self, comm: Any, size: int) -> None:
        join = comm.join if hasattr(comm, "join") else comm
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        done = threading.Event()

        def work(group: Group) -> None:
            with join(group) as ranks:
                ranks.barrier()
                if ranks.rank != 0:
                    assert done.wait(20)
                    return
                start = time.monotonic()
                call = ranks.all_gather(torch.ones(3, device=self.device), async_op=True)
                with pytest.raises(CommTimeoutError) as raised:
                    call.wait(0.5)
                done.set()
                assert time.monotonic() - start < 20
                assert isinstance(raised.value, TimeoutError)
                if self.names_who_is_missing:
                    assert re.search(r"rank [1-9]\b", str(raised.value))
                with pytest.raises(CommError, match="cannot be used any more"):
                    ranks.barrier()

        run_ranks(size, work, timeout=15.0)

    @pytest.mark.parametrize("size", [2, 3])
    def test_ranks_that_call_different_things_are_told(self, comm: Any, size: int) -> None:
        join = comm.join if hasattr(comm, "join") else comm

        def work(group: Group) -> None:
            with join(group) as ranks:
                x = torch.ones(2, device=self.device)
                call = ranks.all_gather if ranks.rank == 0 else ranks.all_to_all
                with pytest.raises(CommError, match="another collective"):
                    call(x if ranks.rank == 0 else [x] * size)
                time.sleep(0.2)

        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        run_ranks(size, work, timeout=5.0)

    def test_what_cannot_be_sent_is_refused_before_anything_is(self, comm: Any) -> None:
        def work(ranks: Communicator) -> None:
            x = torch.ones(1, device=self.device)
            with pytest.raises(ValueError, match="one tensor for each of the"):
                ranks.all_to_all([x] * (ranks.world_size + 1))
            with pytest.raises(TypeError, match="dense tensors"):
                ranks.all_gather("x")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="dense tensors"):
                ranks.all_gather(torch.ones(2, 2).to_sparse())
            with pytest.raises(TypeError, match="meta"):
                ranks.all_gather(torch.ones(2, device="meta"))
            with pytest.raises(ValueError, match="dimensions"):
                ranks.all_gather(torch.ones([1] * 9, device=self.device))
            with pytest.raises(ValueError, match="tag"):
                ranks.all_gather(x, tag=-1)
            with pytest.raises(ValueError, match="op must be"):
                ranks.all_reduce(x, "mean")
            with pytest.raises(ValueError, match="src must be"):
                ranks.broadcast(x, ranks.world_size)
            assert len(ranks.all_gather(x)) == ranks.world_size

        self.on_ranks(comm, self.world_sizes[-1], work)

    def test_close_may_be_called_again_and_another_group_can_be_made(self, comm: Any) -> None:
        join = comm.join if hasattr(comm, "join") else comm

        def work(ranks: Communicator) -> None:
            ranks.barrier()

        for _ in range(2):
            self.on_ranks(comm, self.world_sizes[-1], work)

        def closed(group: Group) -> None:
            ranks = join(group)
            ranks.close()
            ranks.close()
            with pytest.raises(CommError, match="closed"):
                ranks.barrier()

        run_ranks(1, closed)

    # Wrappers ##############################################################################

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_counting_counts_what_goes_to_others(self, comm: Any, size: int) -> None:
        def work(ranks: Communicator) -> None:
            counting = Counting(ranks)
            for _ in range(3):
                counting.all_to_all([torch.ones(r + 1, device=self.device) for r in range(size)])
            traffic = counting.traffic()["all_to_all"]
            others = [r for r in range(size) if r != ranks.rank]
            assert traffic.calls == 3
            assert traffic.sent == 3 * 4 * sum(r + 1 for r in others)
            assert traffic.received == 3 * 4 * (ranks.rank + 1) * len(others)

        self.on_ranks(comm, size, work)

    def test_faults_happen_when_they_are_told_to(self, comm: Any) -> None:
        def work(ranks: Communicator) -> None:
            x = torch.full((2,), float(ranks.rank), device=self.device)
            slow = Faulty(ranks, [Fault("delay", 1, 0.2 * ranks.rank)])
            for _ in range(3):
                found = slow.all_gather(x)
                assert [int(each[0]) for each in found] == list(range(ranks.world_size))
            with pytest.raises(CommError, match="told to fail at call 0"):
                Faulty(ranks, [Fault("raise", 0)]).barrier()

        self.on_ranks(comm, self.world_sizes[-1], work)
