"""What can go wrong between services.

LinkError
├── WireError     a peer broke a rule of the contract; its link is closed, nothing else is
├── Congested     a peer does not read what it is sent; its link is closed
├── StrangerError  a caller's certificate names somebody who has no business here
├── Draining      this worker takes no new work
└── TargetLost    the link to a target broke: replay the request elsewhere
    └── HandedOver    nothing broke, the target drains and gave the request back
"""


class LinkError(Exception):
    """Base of everything here."""


class WireError(LinkError):
    """A message that breaks the rules stated in `proto/paceline/v1`. The text names the field."""


class Congested(LinkError):
    """More waits to be sent on a link than one frame may hold."""


class StrangerError(LinkError):
    """The caller's certificate is valid, but not of the kind of service that may call."""


class Draining(LinkError):
    """This worker is about to leave; try another one."""


class TargetLost(LinkError):
    """The target no longer serves this request. Tokens that arrived before are good; another can continue."""


class HandedOver(TargetLost):
    """The target is about to leave, in good health; the request has nothing to do with it."""
