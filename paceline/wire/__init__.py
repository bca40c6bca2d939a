"""Messages between services: codecs, channels, links and servers.

Only this package and the servicers in `paceline_services` import the generated stubs. `draft_codec`,
`remote_draft_client` and `tensor_codec` import torch when they handle the first tensor; no other module does, so the
gateway can use them.
"""
