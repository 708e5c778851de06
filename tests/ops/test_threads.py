import threading

import pytest
import torch

from pyg_scale.ops.library import num_threads, serial


def test_is_torchs_number_outside():
    assert num_threads() == torch.get_num_threads()


def test_is_one_within_serial_and_only_on_that_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    seen = []
    with serial():
        assert num_threads() == 1
        with serial():
            assert num_threads() == 1
        assert num_threads() == 1
        other = threading.Thread(target=lambda: seen.append(num_threads()))
        other.start()
        other.join()
    assert seen == [7]
    assert num_threads() == 7


def test_ends_when_the_block_raises(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(KeyError), serial():
        raise KeyError
    assert num_threads() == 7
