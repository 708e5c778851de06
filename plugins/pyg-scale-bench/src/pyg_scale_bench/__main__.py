"""``python -m pyg_scale_bench`` is ``pyg-scale bench``, even if the plugin is not installed."""

import sys

from pyg_scale import cli
from pyg_scale_bench import command

sys.exit(cli.run(command.main, sys.argv[1:]))
