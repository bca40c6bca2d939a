"""Our kernels in Triton, as one module: it is a `paceline.model.gpu.paged_pass.Kernels`."""

from paceline.model.gpu.attention_kernels import attend, plan
from paceline.model.gpu.layer_kernels import add_norm, join, rotate_and_store, silu_times, write_tables

__all__ = ["add_norm", "attend", "join", "plan", "rotate_and_store", "silu_times", "write_tables"]
