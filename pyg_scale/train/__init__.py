"""Training: runs that can be killed, and what loops need besides a loader and a model.

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

from pyg_scale.train.accumulation import Accumulation, KnowsEnd
from pyg_scale.train.balance import (
    AdaptivePartition,
    ScalingAdvice,
    ScalingAdvisor,
    SpeedShares,
)
from pyg_scale.train.checkpoint import Checkpoint, Resumed
from pyg_scale.train.embedding.module import NodeEmbedding
from pyg_scale.train.embedding.optimizers import RowAdagrad
from pyg_scale.train.load import Load, LoadMonitor
from pyg_scale.train.precision import Precision
from pyg_scale.train.progress import progress
from pyg_scale.train.randomness import seed_everything
from pyg_scale.train.rates import scale_learning_rate
from pyg_scale.train.recording import Prometheus, Recorder, TensorBoard, read_run
from pyg_scale.train.stopping import EXIT_CODE, EarlyStopping
from pyg_scale.train.tgn import TGNMessages

__all__ = [
    "EXIT_CODE",
    "Accumulation",
    "AdaptivePartition",
    "Checkpoint",
    "EarlyStopping",
    "KnowsEnd",
    "Load",
    "LoadMonitor",
    "NodeEmbedding",
    "Precision",
    "Prometheus",
    "Recorder",
    "Resumed",
    "RowAdagrad",
    "ScalingAdvice",
    "ScalingAdvisor",
    "SpeedShares",
    "TGNMessages",
    "TensorBoard",
    "progress",
    "read_run",
    "scale_learning_rate",
    "seed_everything",
]
