"""What all HTTP APIs stand on: event streams, JSON bodies, keys, limits of connections, metrics."""
