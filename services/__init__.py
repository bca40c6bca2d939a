"""The services: thin programs around the library. For example `python -m paceline_services.target --help`."""
