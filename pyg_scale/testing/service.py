"""Conformance of the services of a communicator: requests and replies between 1 to 4 ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.comm import Communicator, Counting, Fault, Faulty, Group
from pyg_scale.comm.service import Service
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.testing.ranks import run_ranks

SIZES = [1, 2, 3, 4]
CLOSE_SECONDS = 20.0


class ServiceTests:
    """The tests of :class:`~pyg_scale.testing.CommTests` for backends with ``serve``.

    * ``world_sizes``: Possible numbers of ranks.
    * ``serves``: True if the backend has requests. A class that does not override ``serve`` has
      none.
    """

    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    serves = True

    @pytest.fixture
    def comm(self) -> Any:
        """The factory of communicators, which joins a group."""
        raise NotImplementedError("return a class with join(), such as MyCommunicator")

    def skip_without_requests(self, comm: Any) -> None:
        """Skip the test if the backend has only collectives."""
        kind = comm if isinstance(comm, type) else type(comm)
        if not self.serves or getattr(kind, "serve", None) is Communicator.serve:
            pytest.skip("the backend has no requests")

    def with_services(
        self,
        comm: Any,
        size: int,
        function: Callable[[Service, Communicator], Any],
        timeout: float = 30.0,
        **handlers: Callable[[list[Tensor]], Sequence[Tensor]],
    ) -> list[Any]:
        """Call ``function`` on ``size`` ranks with ``handlers``; ``name`` returns their rank."""
        self.skip_without_requests(comm)
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        join = comm.join if hasattr(comm, "join") else comm

        def work(group: Group) -> Any:
            with join(group) as ranks:
                own = torch.tensor([group.rank])
                service = ranks.serve({"name": lambda _: [own], **handlers})
                assert (service.rank, service.world_size) == (group.rank, size)
                try:
                    return function(service, ranks)
                finally:
                    service.close(wait=CLOSE_SECONDS)

        return run_ranks(size, work, timeout=timeout)

    @pytest.mark.parametrize("size", SIZES)
    def test_everyone_asks_everyone(self, comm: Any, size: int) -> None:
        def work(service: Service, _: Communicator) -> None:
            for dtype in (torch.bool, torch.int32, torch.bfloat16, torch.float64):
                for shape in ((), (0,), (3,), (2, 0, 4), (300, 41)):
                    sent = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
                    asked = [service.request(r, "twice", [sent, sent]) for r in range(size)]
                    for answer in asked:
                        found = answer.wait()
                        assert len(found) == 3 and found[0].shape == shape
                        assert all(torch.equal(each, sent) for each in found[:2])
            for rank in range(size):
                assert service.request(rank, "name", []).wait()[0].tolist() == [rank]

        self.with_services(comm, size, work, twice=lambda got: [*got, torch.tensor([len(got)])])

    @pytest.mark.parametrize("size", [2, 4])
    def test_one_rank_asks_while_the_others_idle(self, comm: Any, size: int) -> None:
        def work(service: Service, ranks: Communicator) -> None:
            if ranks.rank == 0:
                for _ in range(20):
                    for rank in range(size):
                        assert int(service.request(rank, "name", []).wait()[0]) == rank

        self.with_services(comm, size, work)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_many_requests_under_way_from_several_threads(self, comm: Any, size: int) -> None:
        def work(service: Service, ranks: Communicator) -> None:
            errors: list[BaseException] = []

            def ask(number: int) -> None:
                try:
                    sent = [torch.full((1000 * number + 1,), number) for _ in range(size)]
                    asked = [service.request(r, "add", [sent[r]]) for r in range(size)]
                    for answer in reversed(asked):
                        (found,) = answer.wait()
                        assert torch.equal(found, sent[0] + 1)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            assert not errors, errors

        self.with_services(comm, size, work, add=lambda got: [got[0] + 1])

    @pytest.mark.parametrize("size", [1, 2])
    def test_an_error_of_a_handler_reaches_who_asked_and_nobody_else(
        self, comm: Any, size: int
    ) -> None:
        def fail(_: list[Tensor]) -> list[Tensor]:
            raise IndexError("node 7 is not here")

        def work(service: Service, _: Communicator) -> None:
            last = size - 1
            for name, message in (("fail", "node 7 is not here"), ("what", "no handler 'what'")):
                with pytest.raises((CommError, IndexError), match=message):
                    service.request(last, name, []).wait()
            assert int(service.request(last, "name", []).wait()[0]) == last
            with pytest.raises(ValueError, match="no rank"):
                service.request(size, "name", [])

        self.with_services(comm, size, work, fail=fail)

    @pytest.mark.parametrize("size", [1, 2])
    def test_an_answer_that_does_not_come_is_a_timeout_and_harms_nobody(
        self, comm: Any, size: int
    ) -> None:
        released = threading.Event()

        def slow(_: list[Tensor]) -> list[Tensor]:
            released.wait(10)
            return []

        def work(service: Service, _: Communicator) -> None:
            answer = service.request(size - 1, "slow", [])
            start = time.monotonic()
            with pytest.raises(CommTimeoutError, match=f"rank {size - 1} did not answer"):
                answer.wait(0.2)
            assert time.monotonic() - start < 5
            assert int(service.request(size - 1, "name", []).wait()[0]) == size - 1
            released.set()
            assert answer.wait() == []

        self.with_services(comm, size, work, slow=slow)

    @pytest.mark.parametrize("size", [2, 3])
    def test_a_rank_that_is_gone_is_named(self, comm: Any, size: int) -> None:
        self.skip_without_requests(comm)
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        join = comm.join if hasattr(comm, "join") else comm
        asked, gone, done = (threading.Event() for _ in range(3))

        def stuck(_: list[Tensor]) -> list[Tensor]:
            asked.set()
            done.wait(20)
            return []

        def work(group: Group) -> None:
            with join(group) as ranks:
                service = ranks.serve({"stuck": stuck})
                ranks.barrier()
                if ranks.rank == size - 1:
                    assert asked.wait(20)
                    service.close()
                    gone.set()
                elif ranks.rank == 0:
                    answer = service.request(size - 1, "stuck", [])
                    with pytest.raises(CommError, match=f"rank {size - 1}"):
                        answer.wait(20)
                    assert gone.wait(20)
                    with pytest.raises(CommError, match=f"rank {size - 1}"):
                        service.request(size - 1, "stuck", []).wait(20)
                    done.set()
                assert done.wait(30)
                service.close()

        run_ranks(size, work, timeout=10.0)

    @pytest.mark.parametrize("size", [1, 3])
    def test_close_serves_until_all_are_done(self, comm: Any, size: int) -> None:
        late = threading.Event()

        def work(service: Service, ranks: Communicator) -> list[int]:
            ranks.barrier()
            if ranks.rank == 0:
                time.sleep(0.3)
                late.set()
                for rank in range(size):
                    assert int(service.request(rank, "name", []).wait()[0]) == rank
            missing = service.close(wait=CLOSE_SECONDS)
            assert late.is_set(), "a rank stopped serving before all were done"
            with pytest.raises(CommError, match="closed"):
                service.request(ranks.rank, "name", [])
            service.close()
            return missing

        assert self.with_services(comm, size, work) == [[]] * size

    @pytest.mark.parametrize("size", [3])
    def test_a_close_that_waits_is_ended_by_one_that_does_not(self, comm: Any, size: int) -> None:
        def work(service: Service, ranks: Communicator) -> None:
            if ranks.rank == 0:
                thread = threading.Thread(target=service.close, args=(CLOSE_SECONDS,))
                thread.start()
                time.sleep(0.1)
                service.close()
                thread.join(CLOSE_SECONDS / 2)
                assert not thread.is_alive()
            ranks.barrier()

        self.with_services(comm, size, work)

    @pytest.mark.parametrize("size", [2])
    def test_requests_are_counted_and_can_be_made_to_fail(self, comm: Any, size: int) -> None:
        self.skip_without_requests(comm)
        if size not in self.world_sizes:
            pytest.skip(f"there cannot be {size} ranks")
        join = comm.join if hasattr(comm, "join") else comm
        faults = [
            Fault("raise", 1, of="request"),
            Fault("drop", 2, of="request"),
            Fault("delay", 3, 0.2, of="request"),
            Fault("garble", 1, of="answer"),
        ]

        def work(group: Group) -> None:
            counting = Counting(Faulty(join(group), faults))
            with counting as ranks:
                service = ranks.serve({"twice": lambda got: [*got, *got]})
                if ranks.rank == 0:
                    sent = torch.arange(10, dtype=torch.int32)
                    found = service.request(1, "twice", [sent]).wait()
                    assert [each.tolist() for each in found] == [sent.tolist()] * 2
                    assert vars(counting.traffic()["request twice"]) == {
                        "calls": 1,
                        "sent": 40,
                        "received": 80,
                    }
                    with pytest.raises(CommError, match="request 1 .* was told to fail"):
                        service.request(1, "twice", [sent])
                    with pytest.raises(CommTimeoutError, match="rank 1 did not answer"):
                        service.request(1, "twice", [sent]).wait(0.1)
                    start = time.monotonic()
                    garbled = service.request(1, "twice", [sent]).wait()
                    assert time.monotonic() - start >= 0.2
                    assert [each.shape for each in garbled] == [(7,), (3, 2)]
                service.close(wait=CLOSE_SECONDS)

        run_ranks(size, work)
