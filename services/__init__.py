"""The servers. Each is thin: decode, call the library, encode. `python -m services.target --help`."""
