"""What a server brings with it: workers, other processes, and everything that can fail."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale import plugins
from pyg_scale.hookspecs import Check
from pyg_scale.loader import NeighborLoader
from pyg_scale_redis import Redis
from pyg_scale_redis.check import check
from tests import preloaded


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(300, 8, generator=generator).to(torch.bfloat16),
        y=torch.arange(300),
        edge_index=torch.randint(300, (2, 2000), generator=generator),
        edge_attr=torch.arange(2000.0)[:, None],
    )


@pytest.fixture
def hetero(data):
    hetero = HeteroData()
    hetero["a"].x, hetero["b"].x = data.x, -data.x
    hetero["a", "to", "b"].edge_index = data.edge_index
    hetero["a", "to", "b"].edge_attr = data.edge_attr
    hetero["b", "rev_to", "a"].edge_index = data.edge_index.flip(0)
    return hetero


def same(a, b):
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        left, right = left.to_dict(), right.to_dict()
        assert right.keys() <= left.keys()
        for name in {"x", "y", "edge_attr", "n_id", "e_id"} & right.keys():
            assert left[name].dtype == right[name].dtype
            assert torch.equal(left[name], right[name]), name


# Loading ##################################################################################


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 3}, {"num_workers": 2, "worker_type": "process"}],
    ids=["here", "threads", "processes"],
)
def test_batches_are_those_of_data(server, data, options):
    store = Redis(server.url, max_connections=2)
    store.load(data)
    stripped = Data(edge_index=data.edge_index, num_nodes=300)
    arguments = {"batch_size": 64, "shuffle": True, "seed": 7}
    ours = list(NeighborLoader(stripped, [5, 3], feature_store=store, **arguments, **options))
    same(ours, list(NeighborLoader(data, [5, 3], **arguments)))


def test_by_name_it_is_filled(server, data, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_REDIS_URL", server.url)
    ours = list(NeighborLoader(data, [5], feature_store="redis", seed=1, batch_size=100))
    same(ours, list(NeighborLoader(data, [5], seed=1, batch_size=100)))
    assert torch.equal(plugins.get("feature_store", "redis")()[None, "x", None], data.x)


def test_heterogeneous(server, hetero):
    store = Redis(server.url, batch_bytes=100)
    store.load(hetero)
    assert len(store.get_all_tensor_attrs()) == 3
    arguments = {"input_nodes": "b", "seed": 3, "batch_size": 50}
    ours = list(NeighborLoader(hetero, [4, 4], feature_store=store, **arguments))
    for a, b in zip(ours, NeighborLoader(hetero, [4, 4], **arguments), strict=True):
        assert torch.equal(a["a"].x, b["a"].x) and torch.equal(a["b"].x, b["b"].x)
        assert torch.equal(a["a", "to", "b"].edge_attr, b["a", "to", "b"].edge_attr)


def test_prefixes_do_not_see_each_other(server):
    one, other = Redis(server.url, prefix="one"), Redis(server.url, prefix="two")
    one["a", "x", None] = torch.ones(3, 2)
    assert other.get_all_tensor_attrs() == []
    other["a", "x", None] = torch.zeros(2, 2)
    assert torch.equal(one["a", "x", None], torch.ones(3, 2))


def test_another_process_reads_and_writes(server):
    store = Redis(server.url)
    store["a", "x", None] = torch.arange(12.0).view(6, 2)
    code = (
        "import sys, torch; from pyg_scale_redis import Redis\n"
        "store = Redis(sys.argv[1])\n"
        "assert store['a', 'x', torch.tensor([5, 0])].tolist() == [[10, 11], [0, 1]]\n"
        "store['a', 'x', None] = torch.ones(2, 1, dtype=torch.int64)\n"
    )
    subprocess.run([preloaded.python(), "-c", code, server.url], check=True, timeout=60)
    # What this process knew of the tensor is no longer so: other shape, dtype and rows.
    assert torch.equal(store["a", "x", torch.tensor([1])], torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(IndexError, match="row 5 does not exist, there are only 2 rows"):
        store["a", "x", torch.tensor([5])]


def test_writing_rows_is_seen_and_checked(server):
    store, other = Redis(server.url, batch_bytes=16), Redis(server.url)
    store["a", "x", None] = torch.zeros(9, 2)
    other["a", "x", slice(2, 8, 2)] = torch.ones(3, 2)
    other["a", "x", 0] = torch.full((2,), 5.0)
    assert store["a", "x", None][:, 0].tolist() == [5, 0, 1, 0, 1, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=r"takes torch.float32 of shape \[1, 2\] there"):
        store["a", "x", torch.tensor([1])] = torch.ones(1, 2).long()
    with pytest.raises(IndexError, match="row 9"):
        store["a", "x", torch.tensor([9])] = torch.ones(1, 2)
    with pytest.raises(KeyError, match="only: 'x' of 'a'"):
        store["b", "x", torch.tensor([0])] = torch.ones(1, 2)


def test_writers_at_once_leave_one_whole_tensor_and_no_more(server):
    stores = [Redis(server.url) for _ in range(4)]

    def write(number):
        for turn in range(10):
            stores[number]["a", "x", None] = torch.full((50,), 10 * number + turn)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert stores[0]["a", "x", None].unique().numel() == 1
    with server.client() as client:
        assert len(client.keys("pyg_scale:rows:*")) == 1


# Failing ##################################################################################


def test_a_killed_writer_leaves_what_was_there(server):
    store = Redis(server.url)
    store["a", "x", None] = torch.ones(1000, 4)
    code = (
        "import os, signal, sys, torch; from pyg_scale_redis import Redis\n"
        "from pyg_scale_redis.tensors import Spec\n"
        "def chunks():\n"
        "    yield range(500), torch.zeros(500, 4)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store = Redis(sys.argv[1])\n"
        "store._write(('a', 'x'), Spec(torch.float32, (4,), 1000), chunks())\n"
    )
    done = subprocess.run([preloaded.python(), "-c", code, server.url], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert torch.equal(store["a", "x", None], torch.ones(1000, 4))
    with server.client() as client:
        half = [k for k in client.keys("pyg_scale:rows:*") if client.hlen(k) == 500]
        assert len(half) == 1 and 0 < client.ttl(half[0]) <= 3600  # it ends by itself
        whole = [k for k in client.keys("pyg_scale:rows:*") if client.hlen(k) == 1000]
        assert client.ttl(whole[0]) == -1


def test_a_failed_write_frees_its_rows(server):
    store = Redis(server.url, batch_bytes=1000)
    with server.client() as client:
        store["a", "x", None] = torch.ones(100, 4)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        with pytest.raises(MemoryError, match="has no memory left"):
            store["a", "x", None] = torch.zeros(200_000, 4)
        client.config_set("maxmemory", 0)
        assert len(client.keys("pyg_scale:rows:*")) == 1
    assert torch.equal(store["a", "x", None], torch.ones(100, 4))


def test_lost_rows_are_an_error(server):
    store = Redis(server.url)
    store["a", "x", None] = torch.ones(10, 4)
    with server.client() as client:
        (key,) = client.keys("pyg_scale:rows:*")
        client.hdel(key, 3)
        assert store["a", "x", torch.tensor([2])].tolist() == [[1, 1, 1, 1]]
        with pytest.raises(RuntimeError, match="'x' of 'a'.* has lost rows"):
            store["a", "x", None]
        client.hset(key, 3, b"too short")
        with pytest.raises(RuntimeError, match="holds rows that are not 16 bytes"):
            store["a", "x", None]


def test_what_others_wrote_is_an_error(server):
    store = Redis(server.url)
    with server.client() as client:
        for text in (b"[]", b'{"dtype": "load", "row": [], "rows": 1, "version": 1}', b"\xff"):
            client.hset("pyg_scale:meta", '["a", "x"]', text)
            with pytest.raises(ValueError, match="another program uses this prefix"):
                store["a", "x", None]
        client.set("pyg_scale:meta", "a string")
        client.delete("pyg_scale:meta")
        client.set("pyg_scale:meta", "a string")
        with pytest.raises(RuntimeError, match="WRONGTYPE"):
            store.get_all_tensor_attrs()


def test_no_server(tmp_path):
    store = Redis(f"unix://{tmp_path}/nothing.sock", timeout=1)
    with pytest.raises(ConnectionError, match="nothing.sock cannot be reached"):
        store["a", "x", None]
    with pytest.raises(ConnectionError):
        store["a", "x", None] = torch.ones(3)


def test_a_server_that_ends_reaches_the_consumer_of_batches(server, data):
    store = Redis(server.url, timeout=2)
    store.load(data)
    loader = NeighborLoader(data, [3], feature_store=store, num_workers=2, batch_size=4)
    batches = iter(loader)
    next(batches)
    server.stop()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        list(batches)
    server.start()
    store.load(data)
    assert torch.equal(store[None, "x", None], data.x), "it must connect again"


def test_a_server_that_does_not_answer(server):
    store = Redis(server.url, timeout=0.3)
    store["a", "x", None] = torch.ones(3)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=r"did not answer within 0.3 seconds"):
            store["a", "x", None]
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert torch.equal(store["a", "x", None], torch.ones(3))


def test_passwords_are_refused_and_never_shown(server):
    url = server.url.replace("unix://", "unix://somebody:s3cret@")
    store = Redis(url)
    assert "s3cret" not in repr(store)
    with pytest.raises(PermissionError, match="refuses the user or password") as error:
        store["a", "x", None]
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"url": "http://somewhere"}, "url must be like redis://"),
        ({"url": "redis://host:port"}, "url must be like redis://"),
        ({"prefix": ""}, "prefix must be"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"max_connections": 0}, "max_connections at least 1"),
        ({"batch_bytes": 0}, "batch_bytes must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        Redis(**arguments)


@pytest.mark.parametrize("value", [[1, 2], torch.ones(2, 2).to_sparse()])
def test_wrong_tensors(server, value):
    with pytest.raises(TypeError, match="must be a dense tensor"):
        Redis(server.url)["a", "x", None] = value
    with pytest.raises(ValueError, match="one row per node"):
        Redis(server.url)["a", "x", None] = torch.tensor(1)


def test_check(server, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_REDIS_URL", server.url)
    assert check().ok is True
    monkeypatch.setenv("PYG_SCALE_REDIS_URL", "unix:///nothing/there.sock")
    found = check()
    assert isinstance(found, Check) and found.ok is None
    monkeypatch.setenv("PYG_SCALE_REDIS_URL", "nonsense")
    assert check().ok is False
