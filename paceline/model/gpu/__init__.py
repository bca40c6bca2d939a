"""Passes on an NVIDIA GPU: tables of slots in its memory, kernels, and CUDA graphs."""
