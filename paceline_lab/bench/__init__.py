"""Benchmarks: `paceline bench`, `paceline demo`. Each ends with one line of JSON."""
