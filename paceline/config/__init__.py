"""What a user may set: sampling of one request, speculation, the engine. Unknown keys are refused by name.

Nothing here needs torch; the gateway, the command line and the library share these classes.
"""

from paceline.config.engine import EngineConfig
from paceline.config.methods import (
    AUTO,
    DETECT,
    HEADS,
    MAPPING_HINT,
    MOST_DEPTH,
    POOL,
    SHAREABLE,
    SUFFIX_DEPTH,
    TOLD_BY_CHECKPOINT,
    Method,
    ModelFree,
    Strategy,
)
from paceline.config.sampling import SamplingParams
from paceline.config.settings import Settings
from paceline.config.speculation import SpeculativeConfig, SpeculativeOptions

__all__ = [
    "AUTO",
    "DETECT",
    "HEADS",
    "MAPPING_HINT",
    "MOST_DEPTH",
    "POOL",
    "SHAREABLE",
    "SUFFIX_DEPTH",
    "TOLD_BY_CHECKPOINT",
    "EngineConfig",
    "Method",
    "ModelFree",
    "SamplingParams",
    "Settings",
    "SpeculativeConfig",
    "SpeculativeOptions",
    "Strategy",
]
