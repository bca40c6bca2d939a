"""python -m tests.begins FD: a compute process that does as it is told."""

import socket
import sys
from contextlib import suppress

from paceline.compute.pipe import Pipe, PipeClosedError
from paceline.compute.process import CannotBegin, Ready
from tests.pipes import Note

if __name__ == "__main__":
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    match pipe.first(str):
        case "no":
            pipe.send(CannotBegin("it said no"))
        case "die":
            sys.exit(3)
        case "yes":
            pipe.send(Ready("about it"))
            pipe.deliver(Note, pipe.send)
            with suppress(PipeClosedError):
                while True:
                    pipe.receive(None)
