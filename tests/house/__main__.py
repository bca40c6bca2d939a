"""`make house`: one line of JSON."""

import json

from tests.house.figures import figures
from tests.house.names import ROOT

print(json.dumps(figures(ROOT)))
