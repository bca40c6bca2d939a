"""Other engines for comparison, each in a process and an environment of its own."""
