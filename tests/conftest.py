"""What must be true before any test imports torch or transformers, and how hard hypothesis tries."""

import logging
import os

from hypothesis import settings

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[name] = "1"  # test processes and the services they start share two cores; threads would fight over them
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything

settings.register_profile("fast", max_examples=25, deadline=None)  # other tests share the cores
settings.register_profile("thorough", max_examples=500, deadline=None)
settings.load_profile("fast")  # `make test-all` asks for the other one


def not_of_an_ended_loop(record: logging.LogRecord) -> bool:
    """Whether a record is not what gRPC logs for an event that it meant for the event loop of an earlier test."""
    error = record.exc_info[1] if record.exc_info else None
    return "PollerCompletionQueue" not in record.getMessage() or str(error) != "Event loop is closed"


logging.getLogger("asyncio").addFilter(not_of_an_ended_loop)
