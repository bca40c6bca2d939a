"""The gateway: OpenAI's HTTP API and gRPC in, token streams from targets behind it. Holds no model."""
