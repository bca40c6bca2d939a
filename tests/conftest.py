"""What must be true before any test imports torch or transformers."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # services under test share the cores; threads would fight over them
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything
