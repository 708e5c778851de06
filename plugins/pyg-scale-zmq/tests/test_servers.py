from typing import Any

import pytest

from pyg_scale.testing import ServerTests
from pyg_scale_zmq.backend import Zmq


class TestZmq(ServerTests):
    @pytest.fixture
    def comm(self) -> Any:
        return Zmq
