"""Load tests: who asks (`users`, `grpc_users`), when (`shapes`), what must come (`questions`), what came (`streams`),
and what that amounts to (`figures`). `python -m loadtests` runs them, `python -m loadtests.chaos` while processes die;
see README.md."""
