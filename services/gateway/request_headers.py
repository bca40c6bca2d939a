"""Headers of HTTP, or gRPC's metadata, by which clients say something of a request besides its body."""

SESSION_HEADER = "x-session-id"
"""Names the request's conversation, in place of the body's `prompt_cache_key`: its requests go to the same target."""
LABELS_HEADER = "x-target-labels"
"""Labels that the request's target must have."""
REQUEST_ID_HEADER = "x-request-id"
"""Clients may choose it; it is in the response's headers, and a client may repeat it."""
LAST_EVENT_ID_HEADER = "last-event-id"
"""The id of the last event that the client has, as browsers and their libraries send it when they reconnect."""
REQUEST_HEADERS = (LABELS_HEADER, SESSION_HEADER, REQUEST_ID_HEADER)
"""The headers that belong to a request as its body does. They are kept with its journal; HTTP hands on no others."""
