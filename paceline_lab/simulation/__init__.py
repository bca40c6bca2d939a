"""The engine, a draft and the network between them in virtual time: no real waiting, and every run is the same."""
