"""Communication between ranks: tensors of any shape, and time limits that say who was late.

```python
from pyg_scale import comm

with comm.connect() as ranks:                      # under torchrun; alone otherwise
    got = ranks.all_to_all([torch.arange(r) for r in range(ranks.world_size)])
```
"""

from pyg_scale.comm.base import Communicator, Work
from pyg_scale.comm.connect import Group, connect, group
from pyg_scale.comm.counting import Counting
from pyg_scale.comm.faults import Fault, Faulty
from pyg_scale.comm.remote import Connection, Listener, Reply
from pyg_scale.comm.service import Service

__all__ = [
    "Communicator",
    "Connection",
    "Counting",
    "Fault",
    "Faulty",
    "Group",
    "Listener",
    "Reply",
    "Service",
    "Work",
    "connect",
    "group",
]
