"""The gateway's pages: a playground at `/`, the operator's page at `/operator`, and the JSON that they read."""
