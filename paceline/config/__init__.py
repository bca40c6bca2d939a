"""The settings of users: sampling of one request, speculation, the engine. An unknown key is an error that names it.

Nothing here needs torch; the gateway, the command line and the library share these classes.
"""

from paceline.config.engine_config import UNPLANNED_SLOTS, EngineConfig
from paceline.config.method_names import (
    AUTO,
    DETECT,
    HEADS,
    LOOKUP_METHODS,
    MAPPING_HINT,
    MAX_DEPTH,
    METHODS,
    METHODS_READ_FROM_CHECKPOINT,
    MODEL_METHODS,
    POOL,
    SUFFIX_DEPTH,
    LookupMethod,
    Method,
)
from paceline.config.sampling_params import SamplingParams
from paceline.config.settings import Settings
from paceline.config.speculative_config import SpeculativeConfig, SpeculativeOptions
from paceline.config.verification_strategies import STRATEGIES, Strategy, StrategyName

__all__ = [
    "AUTO",
    "DETECT",
    "HEADS",
    "LOOKUP_METHODS",
    "MAPPING_HINT",
    "MAX_DEPTH",
    "METHODS",
    "METHODS_READ_FROM_CHECKPOINT",
    "MODEL_METHODS",
    "POOL",
    "STRATEGIES",
    "SUFFIX_DEPTH",
    "UNPLANNED_SLOTS",
    "EngineConfig",
    "LookupMethod",
    "Method",
    "SamplingParams",
    "Settings",
    "SpeculativeConfig",
    "SpeculativeOptions",
    "Strategy",
    "StrategyName",
]
