"""What can go wrong between services.

LinkError
├── WireError     a peer broke a rule of the contract; its link is closed, nothing else is
├── Congested     a peer does not read what it is sent; its link is closed
├── StrangerError  a caller's certificate names somebody who has no business here
├── Draining      this worker takes no new work
├── EngineEnded   this worker's engine died; its links are closed
└── TargetLost    the link to a target broke: replay the request elsewhere
    ├── EngineLost    its engine died with the request, perhaps of it
    └── HandedOver    nothing broke, the target drains and gave the request back
"""


class LinkError(Exception):
    """Base of everything here."""


class WireError(LinkError):
    """A message that breaks the rules stated in `proto/paceline/v1`. The text names the field."""


class Congested(LinkError):
    """More waits to be sent on a link than one frame may hold."""


class PeerIdentityError(LinkError):
    """The caller's certificate is valid, but not of the kind of service that may call."""


class Draining(LinkError):
    """This worker is about to leave; try another one."""


class EngineDeadError(LinkError):
    """The process that computes for this worker has ended, and nobody told it to."""


class TargetLost(LinkError):
    """The target no longer serves this request. Tokens that arrived before are good; another can continue."""


class TargetEngineDied(TargetLost):
    """The target's engine died while it served this request, perhaps of it: then it would elsewhere, too."""


class HandedOver(TargetLost):
    """The target is about to leave, in good health; the request has nothing to do with it."""
