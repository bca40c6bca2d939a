"""The forward pass as one native function: C++ sources, and what compiles and loads them."""
