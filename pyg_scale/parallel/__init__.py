"""One model on many ranks: wrappers that are found by name.

```python
from pyg_scale import parallel

model = parallel.wrap(model, "ddp")                 # the parameters of rank 0 on every rank
with model.join(optimizer):                         # ranks may have unequal numbers of batches
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        model.backward(loss, batch.batch_size)      # the mean over the seeds of all ranks
        optimizer.step()
```
"""

from pyg_scale.parallel.advise import Advice, advise
from pyg_scale.parallel.base import (
    CountsWaiting,
    GraphParallel,
    GraphParallelModule,
    Parallel,
    ParallelModule,
    is_parallel_module,
)
from pyg_scale.parallel.client import ClientPart
from pyg_scale.parallel.wrap import wrap

__all__ = [
    "Advice",
    "ClientPart",
    "CountsWaiting",
    "GraphParallel",
    "GraphParallelModule",
    "Parallel",
    "ParallelModule",
    "advise",
    "is_parallel_module",
    "wrap",
]
