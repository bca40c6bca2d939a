"""python -m tests.unit.ipc.fake_model_process FD: a model process that does what its options, a text, ask for."""

import signal
import socket
import sys
from contextlib import suppress

from paceline.ipc.model_process import Ready, StartFailed
from paceline.ipc.pipe import Pipe, PipeClosedError
from tests.helpers.pipes import Note

if __name__ == "__main__":
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    match pipe.receive_first(str):
        case "fail":
            pipe.send(StartFailed("no such model"))
        case "exit":
            sys.exit(3)
        case "hang":
            pipe.send(Ready("facts"))
            pipe.close()
            signal.pause()
        case "deaf":
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            pipe.send(Ready("facts"))
            signal.pause()
        case "echo":
            pipe.send(Ready("facts"))
            pipe.on(Note, pipe.send)
            with suppress(PipeClosedError):
                while True:
                    pipe.receive(None)
