"""python -m tests.helpers.begins FD: a compute process that does as it is told."""

import socket
import sys
from contextlib import suppress

from paceline.ipc.model_process import Ready, StartFailed
from paceline.ipc.pipe import Pipe, PipeClosedError
from tests.helpers.pipes import Note

if __name__ == "__main__":
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    match pipe.receive_first(str):
        case "no":
            pipe.send(StartFailed("it said no"))
        case "die":
            sys.exit(3)
        case "yes":
            pipe.send(Ready("about it"))
            pipe.on(Note, pipe.send)
            with suppress(PipeClosedError):
                while True:
                    pipe.receive(None)
