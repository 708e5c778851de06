"""``python -m pyg_scale.cli`` is ``pyg-scale``."""

import sys

from pyg_scale.cli import main

sys.exit(main())
