"""Which address a rank tells the others."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from pyg_scale.comm import address
from pyg_scale.errors import CommError

VARIABLES = (address.ADDRESS, address.INTERFACE, "GLOO_SOCKET_IFNAME", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with two networks, and an interface that is down."""

    def entry(family: int, text: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            "lo": [entry(socket.AF_INET, "127.0.0.1")],
            "eth0": [entry(socket.AF_INET6, "fe80::1%eth0"), entry(socket.AF_INET, "10.0.0.7")],
            "ib0": [entry(socket.AF_INET6, "fd00::7")],
            "eth1": [entry(psutil.AF_LINK, "00:00:00:00:00:00")],
        },
    )
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_alone_it_is_the_loopback() -> None:
    assert address.own_address() == "127.0.0.1"
    assert address.is_loopback(address.own_address())


def test_what_is_named_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    assert address.own_address() == "10.0.0.7"
    monkeypatch.setenv(address.INTERFACE, "ib0")
    assert address.own_address() == "fd00::7"
    monkeypatch.setenv(address.ADDRESS, "192.0.2.9")
    assert address.own_address() == "192.0.2.9"


def test_interfaces_that_are_not_there_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.INTERFACE, "eth9")
    with pytest.raises(ValueError, match="PYG_SCALE_INTERFACE=eth9.*only eth0, eth1, ib0, lo"):
        address.own_address()
    monkeypatch.setenv(address.INTERFACE, "eth1")
    with pytest.raises(ValueError, match="eth1: the interface has no address"):
        address.own_address()


def test_interfaces_by_address() -> None:
    assert address.interface_of("10.0.0.7") == "eth0"
    assert address.interface_of("10.0.0.8") is None


def test_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.own_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    assert address.own_address().startswith("127.")
    with pytest.raises(CommError, match="'no.such.host.invalid' cannot be resolved"):
        address.own_address("no.such.host.invalid")
