"""What answers the requests of other ranks."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os, threading
import torch
from pyg_scale.comm.service import Handlers

torch.arange(1_000_000).sum()
torch.set_num_threads(2)  # there is a pool of threads
barrier = threading.Barrier(6)

def answer(tensors):
    barrier.wait(20)
    return [torch.arange(100).min()]

codes = []
for _ in range(20):
    process = os.fork()
    if process == 0:
        handlers = Handlers({"x": answer}, 6)
        asked = [handlers.submit("x", []) for _ in range(6)]
        os._exit(sum(each.exception(30) is not None for each in asked))
    codes.append(os.waitpid(process, 0)[1])
print(sum(code != 0 for code in codes))
"""


def test_threads_of_a_fork_may_all_use_torch_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "0\n", done.stdout + done.stderr
