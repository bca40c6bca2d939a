"""What can go wrong between services.

LinkError
├── WireError     a peer broke a rule of the contract; its link is closed, nothing else is
├── Congested     a peer does not read what it is sent; its link is closed
├── Draining      this worker takes no new work
└── TargetLost    the link to a target broke, or the target handed the request over: replay it elsewhere
"""


class LinkError(Exception):
    """Base of everything here."""


class WireError(LinkError):
    """A message that breaks the rules stated in `proto/paceline/v1`. The text names the field."""


class Congested(LinkError):
    """More waits to be sent on a link than one frame may hold."""


class Draining(LinkError):
    """This worker is about to leave; try another one."""


class TargetLost(LinkError):
    """The target no longer serves this request. Tokens that arrived before are good; another can continue."""
