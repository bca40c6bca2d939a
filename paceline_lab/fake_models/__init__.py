"""Models without weights, for tests and benchmarks: `table:SIZE[:DISAGREEMENT]` and `timed:KEY=VALUE,...`.

Importing this package registers both schemes. It loads no torch.
"""

from paceline.model_names import register_scheme
from paceline_lab.fake_models.schemes import TableScheme, TimedScheme

register_scheme("table", TableScheme())
register_scheme("timed", TimedScheme())
