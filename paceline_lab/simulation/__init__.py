"""The engine, a draft and the network between them in virtual time: nothing waits, and every run is the same."""
