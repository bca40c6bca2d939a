"""Errors between services.

LinkError
├── WireError           a message breaks a rule of the contract: it is not sent, or the link it came by is closed
├── Congested           a peer does not read what it is sent; its link is closed
├── PeerIdentityError   a client's certificate names a service that may not call this one
├── Draining            this worker takes no new requests
├── EngineDeadError     this worker's model process died; its links are closed
└── ReplayElsewhere     a target no longer serves a request; replay it on another target
    ├── NotSubmitted        the target left before the request was sent to it
    ├── HandedOver          the target drains and gave the request back: nothing is lost
    └── TargetLost          the target died, or its link broke
        └── TargetEngineDied    the target's engine died while it served the request
"""


class LinkError(Exception):
    """Base of all errors between services."""


class WireError(LinkError):
    """A message breaks a rule stated in `proto/paceline/v1`. The text names the field."""


class Congested(LinkError):
    """More bytes wait to be sent on a link than one frame may hold."""


class PeerIdentityError(LinkError):
    """The client's certificate is valid, but names the wrong kind of service."""


class Draining(LinkError):
    """This worker is about to stop; use another one."""


class EngineDeadError(LinkError):
    """The worker's model process ended unexpectedly."""


class ReplayElsewhere(LinkError):
    """The target no longer serves this request. The tokens it sent are valid; another target can continue."""


class NotSubmitted(ReplayElsewhere):
    """The target left before the request was sent to it."""


class HandedOver(ReplayElsewhere):
    """The target drains. Neither it nor the request has failed."""


class TargetLost(ReplayElsewhere):
    """The target died, or its link broke."""


class TargetEngineDied(TargetLost):
    """The target's engine died while it served this request. The request may be the cause and kill the next engine."""
