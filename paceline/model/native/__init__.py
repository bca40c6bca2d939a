"""The forward pass as one native function: C++ sources, and the Python that compiles, loads and calls them."""
