"""Messages between services: codecs, channels, links and servers.

Only this package and the servicers in `paceline_services` import the generated stubs. `remote_drafting`, `draft_codec`
and `tensor_codec` import torch when they handle the first tensor; no other module does, so the gateway can use them.
"""
