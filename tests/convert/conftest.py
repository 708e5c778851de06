"""Files of tests need not survive a power failure: flushing them is most of the time."""

import os

import pytest


@pytest.fixture(autouse=True)
def unflushed(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
