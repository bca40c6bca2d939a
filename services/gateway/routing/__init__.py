"""Which target serves a request, and which drafts it is offered."""
