"""The address at which other ranks reach this one, and the network interface it belongs to."""

from __future__ import annotations

import os
import socket

import psutil

from pyg_scale.errors import CommError

ADDRESS = "PYG_SCALE_ADDRESS"
"""The environment variable with the address at which others reach this machine."""

INTERFACE = "PYG_SCALE_INTERFACE"
"""The environment variable with the network interface whose address others use."""

_GLOO = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


def own_address(master: str | None = None) -> str:
    """The address at which other ranks reach this process.

    That is the first of: ``PYG_SCALE_ADDRESS``; the address of the interface
    ``PYG_SCALE_INTERFACE``, or of gloo's ``GLOO_SOCKET_IFNAME``; the one from which this machine
    reaches the master.

    Args:
        master: By default ``MASTER_ADDR``; without it, this machine is assumed to be the only one.

    Raises:
        ValueError: If the named interface does not exist or has no address.
        CommError: If the master cannot be reached.
    """
    if given := os.environ.get(ADDRESS):
        return given
    for variable in (INTERFACE, _GLOO):
        if name := os.environ.get(variable, "").partition(",")[0].strip():
            return address_of(name, variable)
    return address_towards(master or os.environ.get("MASTER_ADDR") or "localhost")


def address_towards(host: str) -> str:
    """The address of this machine on its way to another; sends nothing.

    Raises:
        CommError: If the name is not known, or the host cannot be reached.
    """
    if host == "localhost":
        return LOOPBACK
    try:
        ways = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise CommError(f"the host {host!r} cannot be resolved: {error}") from None
    reason: OSError | None = None
    for family, kind, protocol, _, target in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = error
    raise CommError(
        f"this machine has no route to {host!r} ({reason}); {INTERFACE}=eth0 names the interface "
        f"to use, {ADDRESS}=10.0.0.2 the address"
    )


def interfaces() -> dict[str, list[str]]:
    """The network interfaces of this machine, and their addresses (IPv4 first)."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        old = [e.address for e in entries if e.family == socket.AF_INET]
        new = [e.address for e in entries if e.family == socket.AF_INET6 and "%" not in e.address]
        found[name] = old + new
    return found


def address_of(interface: str, variable: str = INTERFACE) -> str:
    """The address of an interface.

    Args:
        interface: Its name.
        variable: The environment variable that names it, for errors.

    Raises:
        ValueError: If there is none, or it has no address.
    """
    there = interfaces()
    if interface not in there:
        known = ", ".join(sorted(there))
        raise ValueError(f"{variable}={interface}: there is no such interface, only {known}")
    if not there[interface]:
        raise ValueError(f"{variable}={interface}: the interface has no address (is it up?)")
    return there[interface][0]


def interface_of(address: str) -> str | None:
    """The interface that has an address, or ``None`` if none of this machine has it."""
    return next((name for name, has in interfaces().items() if address in has), None)


def is_loopback(address: str) -> bool:
    """True if an address means "this machine" on every machine."""
    return address.startswith("127.") or address in ("::1", "localhost")
