"""OpenAI's completions and chat completions over HTTP: routes and responses."""
