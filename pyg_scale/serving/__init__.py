"""Online predictions from sampled neighbourhoods, those of the loader in training.

```python
from pyg_scale.serving import Predictor

with Predictor(model, "graph", num_neighbors=[15, 10], seed=0) as predictor:
    predictor.predict([7, 12])                # [2, channels]
```
"""

from pyg_scale.serving.neighborhoods import Neighborhoods
from pyg_scale.serving.new_rows import NewRows
from pyg_scale.serving.predictor import Predictor

__all__ = ["Neighborhoods", "NewRows", "Predictor"]
