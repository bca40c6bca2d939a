"""Between services: frames and library types, channels, servers. Nobody else touches the generated stubs.

Import the module you need. `drafting`, `draft_link`, `draft_frames` and `tensors` import torch; the rest does
not, so that a gateway can use it.
"""
