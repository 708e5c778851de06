"""Training that can be killed: checkpoints of everything a run consists of.

```python
from pyg_scale.train import Checkpoint

state = {"model": model, "optimizer": optimizer, "loader": loader}
with Checkpoint("runs/sage", state, every=100, stop_on=["SIGTERM"]) as checkpoint:
    step = checkpoint.load().step                   # 0 where nothing was saved yet
    while loader.epoch < 10:
        for batch in loader:
            train(batch)
            step += 1
            checkpoint.step(step)
```
"""

from pyg_scale.train.checkpoint import Checkpoint, Resumed
from pyg_scale.train.stopping import EXIT_CODE

__all__ = ["EXIT_CODE", "Checkpoint", "Resumed"]
