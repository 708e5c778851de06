"""Servers that die, hang, answer garbage or forget: batches stay the same, or an error says why."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pyg_scale
from pyg_scale.comm import Communicator
from pyg_scale.distributed.server.graph_server import NotAgreed
from pyg_scale.distributed.server.servers import Servers, addresses_of
from pyg_scale.errors import (
    CommError,
    CommTimeoutError,
    GraphDirectoryError,
    RequestError,
    UnknownPluginError,
)
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.loader.batch import wire
from tests.distributed.network import Network, until
from tests.distributed.served import TOKEN, graph, hetero
from tests.loader.batches import assert_same_batches

pytestmark = pytest.mark.matrix(3)

NODES: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 7, "shuffle": True}


def check(data: Any, served: Any, **options: Any) -> None:
    assert_same_batches(
        NeighborLoader(data, **NODES | options), NeighborLoader(served, **NODES | options)
    )


# Another one does it ###########################################################################


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_dies_in_the_middle(serve: Callable[..., Any], workers: int) -> None:
    data = graph()
    servers = serve(data, 2)
    loader = NeighborLoader(servers.open(), **NODES, num_workers=workers)
    found = []
    for number, batch in enumerate(loader):
        found.append(batch)
        if number == 2:
            servers.listeners[0].close()
    assert_same_batches(NeighborLoader(data, **NODES), found)
    assert servers.counts()[1] > servers.counts()[0] > 0


def test_a_server_that_comes_back_is_asked_again(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data, 2)
    served = servers.open()
    servers.listeners[0].close()
    check(data, served)
    assert servers.counts()[0] == 0
    servers.listeners[0] = servers.listen(0)
    time.sleep(0.2)
    check(data, served)
    assert servers.counts()[0] > 0


def test_a_server_that_restarts_is_told_again_what_is_wanted(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data)
    loader = NeighborLoader(servers.open(), **NODES)
    iterator, found = iter(loader), []
    found.append(next(iterator))
    servers.listeners[0].close()
    servers.servers[0] = type(servers.servers[0])(pyg_scale.open(servers.path), parallel=False)
    servers.listeners[0] = servers.listen(0)
    found += list(iterator)
    assert_same_batches(NeighborLoader(data, **NODES), found)


def test_servers_that_forget_loaders(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data, server={"max_loaders": 1})
    served = servers.open()
    loaders = [NeighborLoader(served, **NODES | {"num_neighbors": [k]}) for k in (1, 2, 3)]
    expected = [NeighborLoader(data, **NODES | {"num_neighbors": [k]}) for k in (1, 2, 3)]
    for ours, theirs in zip(zip(*loaders), zip(*expected), strict=True):
        assert_same_batches(ours, theirs)
    assert servers.counts("loaders") == [1]


def test_a_server_that_hangs(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data, 2)
    served = servers.open(timeout=4.0)
    hang = {"nodes": 0}

    def fault(_: int, name: str, answer: Any) -> Any:
        hang["nodes"] += name == "nodes"
        return None if name == "nodes" and hang["nodes"] > 1 else answer

    servers.network.fault[servers.addresses[0]] = fault
    check(data, served)


def test_time_that_went_to_a_server_that_hangs_is_not_taken_from_the_other() -> None:
    """Two requests are under way: one hangs, the other was answered at once that its sender must
    agree first, which who waits for it learns when the time of the first is over."""
    network, agreed = Network(), threading.Event()

    def nodes(message: list[Tensor]) -> list[Tensor]:
        if not agreed.is_set():
            raise NotAgreed
        return message

    handlers = {"nodes": nodes, "agree": lambda _: agreed.set() or []}
    listeners = [network.listen(f"tcp://{i}", handlers, token=TOKEN) for i in range(2)]
    network.fault["tcp://0"] = lambda *_: None
    servers = Servers(["tcp://0", "tcp://1"], TOKEN, timeout=3.0, transport=network)

    def agree(server: int, seconds: float) -> None:
        servers.call_one(server, "agree", seconds=seconds)

    asked = [servers.ask("nodes", [torch.tensor(i)], agree=agree) for i in range(2)]
    until(lambda: asked[1].answered)
    time.sleep(3.1)
    assert asked[1].wait() == [torch.tensor(1)]
    assert asked[0].wait() == [torch.tensor(0)]
    assert network.asked.count(("tcp://0", "nodes")) == 1
    for each in (servers, *listeners):
        each.close()


def wrong_rows(answer: list[Tensor]) -> list[Tensor]:
    return [answer[0], *(t[:-1] if t.dim() == 2 and t.size(1) == 7 else t for t in answer[1:])]


def wrong_seeds(answer: list[Tensor]) -> list[Tensor]:
    changed = [t.clone() for t in answer]
    for tensor in changed[1:]:
        if tensor.dtype == torch.int64 and tensor.dim() == 1 and tensor.numel():
            tensor[0] = (tensor[0] + 1) % 300
    return changed


def out_of_range(answer: list[Tensor]) -> list[Tensor]:
    return [t + 1000 if t.dtype == torch.int64 else t for t in answer]


GARBAGE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: [],
    "noise": lambda _: [torch.randint(256, (500,), dtype=torch.uint8)],
    "no text": lambda answer: answer[1:],
    "another answer": lambda _: [wire.bytes_tensor(b'{"$dict":[]}')],
    "deep": lambda _: [wire.bytes_tensor(b"[" * 100_000)],
    "too few tensors": lambda answer: answer[:-1],
    "too many": lambda answer: [*answer, torch.ones(1)],
    "wrong rows": wrong_rows,
    "wrong seeds": wrong_seeds,
    "out of range": out_of_range,
    "half": lambda answer: [t[: t.size(0) // 2] for t in answer],
    "reals": lambda answer: [answer[0], *(t.float() for t in answer[1:])],
    "an error": lambda _: RequestError("server0", "MemoryError", "there is none left"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_server_that_answers_garbage(serve: Callable[..., Any], name: str) -> None:
    data = graph()
    servers = serve(data, 2)
    served = servers.open()
    servers.network.fault[servers.addresses[0]] = lambda _, handler, answer: (
        GARBAGE[name](answer) if handler in ("nodes", "links") else answer
    )
    check(data, served)
    links: dict[str, Any] = NODES | {
        "edge_label_index": data.edge_index[:, :90],
        "neg_sampling": "binary",
    }
    assert_same_batches(LinkNeighborLoader(data, **links), LinkNeighborLoader(served, **links))


def test_every_flipped_byte_of_an_answers_text_is_noticed_or_harmless(
    serve: Callable[..., Any],
) -> None:
    data = hetero()
    servers = serve(data, 2)
    served = servers.open()
    generator = torch.Generator().manual_seed(1)

    def fault(_: int, name: str, answer: Any) -> Any:
        if name != "nodes":
            return answer
        text = answer[0].clone()
        at = int(torch.randint(text.numel(), (), generator=generator))
        text[at] = int(torch.randint(32, 127, (), generator=generator))
        return [text, *answer[1:]]

    servers.network.fault[servers.addresses[0]] = fault
    loader = NeighborLoader(served, **NODES | {"input_nodes": "paper", "batch_size": 5})
    expected = NeighborLoader(data, **NODES | {"input_nodes": "paper", "batch_size": 5})
    for ours, theirs in zip(loader, expected, strict=True):
        assert torch.equal(ours["paper"].n_id, theirs["paper"].n_id)
        assert torch.equal(ours["paper"].x, theirs["paper"].x)


# Nobody does ###################################################################################


def test_all_dead_is_said_in_time_and_names_them(serve: Callable[..., Any]) -> None:
    servers = serve(graph(), 2)
    loader = NeighborLoader(servers.open(timeout=1.0), **NODES)
    iterator = iter(loader)
    next(iterator)
    for each in servers.listeners:
        each.close()
    start = time.monotonic()
    with pytest.raises(CommTimeoutError, match="within 1 seconds.*server0.*server1"):
        list(iterator)
    assert time.monotonic() - start < 20


def test_opening_where_nobody_is(serve: Callable[..., Any]) -> None:
    servers = serve(graph(), 2)
    for each in servers.listeners:
        each.close()
    with pytest.raises(CommTimeoutError, match="'hello'.*server0.*cannot be reached"):
        servers.open(timeout=0.5)


def test_opening_waits_for_servers_that_are_late(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data)
    servers.listeners[0].close()
    late = threading.Timer(0.5, lambda: servers.listeners.append(servers.listen(0)))
    late.start()
    check(data, servers.open(timeout=30.0))
    late.join()


def test_errors_of_the_asker_are_raised_as_ever(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data, 2)
    served = servers.open()
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "time_attr", {"time_attr": "nothing"}),
        (ValueError, "num_neighbors must be -1", {"num_neighbors": [-3]}),
        (TypeError, "replace must be", {"replace": "yes"}),
        (IndexError, "has node 300", {"input_nodes": torch.tensor([300])}),
        (ValueError, "not installed on the server", {"neighbor_sampler": "nonsense"}),
        (NotImplementedError, "must be the name", {"neighbor_sampler": object()}),
        (ValueError, "edges are not sorted|sorted", {"is_sorted": True}),
    ]
    for error, match, options in wrong:
        with pytest.raises(error, match=match):
            NeighborLoader(served, **NODES | options)
    assert servers.network.fault == {}


def test_what_no_server_has_is_said_at_once(serve: Callable[..., Any]) -> None:
    servers = serve(graph(), 2)
    served = servers.open(timeout=60.0)
    for address in servers.addresses:
        error = RequestError(address, "GraphDirectoryError", "'x' is spread over ranks")
        servers.network.fault[address] = lambda *_, error=error: error
    start = time.monotonic()
    with pytest.raises(GraphDirectoryError, match="spread over ranks"):
        served.x  # noqa: B018
    assert time.monotonic() - start < 20


def test_the_edges_stay_with_the_servers(serve: Callable[..., Any], tmp_path: Path) -> None:
    from pyg_scale.sampler import NativeSampler

    served = serve(graph()).open()
    with pytest.raises(NotImplementedError, match="on its servers"):
        NativeSampler(served, [3])


def test_wrong_tokens(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    servers = serve(graph())
    with pytest.raises(PermissionError, match=r"://.* has another secret: give .*_SECRET_FILE"):
        servers.open(token="another one, long enough")
    monkeypatch.delenv("PYG_SCALE_SECRET", raising=False)
    monkeypatch.delenv("PYG_SCALE_SECRET_FILE", raising=False)
    with pytest.raises(ValueError, match="PYG_SCALE_SECRET"):
        pyg_scale.open("tcp://host:5555", transport=servers.network)


def test_without_the_plugin_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyg_scale import plugins

    empty = plugins.Registry()
    empty._discovered = True
    monkeypatch.setattr(plugins, "get", empty.get)
    with pytest.raises(UnknownPluginError, match="pip install pyg-scale-zmq"):
        pyg_scale.open("tcp://host:5555", token=TOKEN)


def test_servers_of_different_graphs(serve: Callable[..., Any]) -> None:
    data = graph()
    one, two = serve(data), serve(graph(num_edges=3001))
    one.network.servers["tcp://other:1"] = two.listeners[0]
    one.addresses.append("tcp://other:1")
    served = one.open(timeout=3.0)
    check(data, served)  # by those that have the graph
    one.listeners[0].close()
    with pytest.raises((CommTimeoutError, ValueError), match="another graph"):
        check(data, served)


def test_attributes_are_not_those_of_another_graph(serve: Callable[..., Any]) -> None:
    """A graph of the same form, such as an older one: attributes come from one of the two."""
    data, older, some = graph(), graph(), torch.arange(5)
    older.y, older.odd = older.y + 1, older.odd + 1
    one, two = (serve(g, index_sets={"s": some + (g is older)}) for g in (data, older))
    one.network.servers["tcp://other:1"] = two.listeners[0]
    one.addresses.append("tcp://other:1")
    for served in [one.open(timeout=3.0) for _ in range(6)]:
        expected = data if torch.equal(served.index_set("s"), some) else older
        for _ in range(3):
            assert torch.equal(served.index_set("s"), some + (expected is older))
        assert torch.equal(served.y, expected.y) and torch.equal(served.odd, expected.odd)


def test_why_a_server_that_has_another_graph_now_is_not_asked(serve: Callable[..., Any]) -> None:
    one, two = serve(graph()), serve(graph(num_edges=3001))
    batches = iter(NeighborLoader(one.open(timeout=1.5), [2], batch_size=8, seed=1))
    next(batches)
    one.network.servers[one.addresses[0]] = two.listeners[0]
    with pytest.raises(CommTimeoutError, match="another graph"):
        list(batches)


def test_arguments_of_directories_and_of_servers(tmp_path: Path) -> None:
    pyg_scale.save(graph(), tmp_path / "graph")
    with pytest.raises(ValueError, match="token= and transport="):
        pyg_scale.open(tmp_path / "graph", token=TOKEN)
    for given in ({"part": 0}, {"verify": True}, {"comm": "local"}):
        with pytest.raises(ValueError, match="is for directories"):
            pyg_scale.open("tcp://host:1", token=TOKEN, **given)
    with pytest.raises(ValueError, match="each once"):
        addresses_of("tcp://host:1,tcp://host:1")
    assert addresses_of("tcp://a:1, b:2") == ["tcp://a:1", "tcp://b:2"]
    with pytest.raises(NotImplementedError, match="'zmq' for servers"):
        Communicator.connect(["tcp://a:1"], token=TOKEN)


# Coming and going ##############################################################################


def test_servers_end_when_all_clients_have_said_goodbye(serve: Callable[..., Any]) -> None:
    servers = serve(graph(), 2, server={"num_clients": 2})
    one, two = servers.open(), servers.open()
    one.close()
    one.close()
    assert not servers.servers[0].finished.is_set()
    with pytest.raises(CommError, match="closed"):
        NeighborLoader(one, **NODES)
    del two
    servers.opened.clear()
    gc.collect()  # who forgets to close says goodbye too
    until(lambda: all(server.finished.is_set() for server in servers.servers))


def test_nothing_is_kept_of_clients_that_went(serve: Callable[..., Any]) -> None:
    servers = serve(graph())
    for _ in range(5):
        served = servers.open()
        iterator = iter(NeighborLoader(served, **NODES))
        next(iterator)
        served.graph_directory._finalizer.detach()  # it died: no goodbye
        served.graph_directory.servers.close()
        servers.opened.clear()
    counts = servers.servers[0].counts()
    assert counts["gone"] == 0 and counts["loaders"] == 1  # one record, that of all of them


def test_two_clients_at_once(serve: Callable[..., Any]) -> None:
    data = graph()
    servers = serve(data, 2)
    errors: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            check(data, servers.open(), seed=seed, num_workers=seed % 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
