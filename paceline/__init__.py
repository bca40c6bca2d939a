"""Paceline: the same tokens, sooner. Disaggregated speculative decoding for large language models."""

import os

# Row-exact fp32 matrix products on CPU: without this, MKL's result depends on where a matrix lies in memory.
# MKL reads it once, when torch is first imported; so it stands here, before anything can import torch.
os.environ.setdefault("MKL_CBWR", "AVX512,STRICT")

__version__ = "0.1.0"
