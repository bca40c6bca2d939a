"""The servers. Each is thin: decode, call the library, encode. `python -m paceline_services.target --help`."""
