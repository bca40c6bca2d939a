#!/usr/bin/env bash
# transformers 5.24.0 drops the rotary scaling of a GGUF file: the model loads, and computes with other positions.
#
# A guess would be that AutoConfig.from_pretrained(folder, gguf_file=...) has what the file says of its rotary embedding.
# The base is read. `rope.scaling.type`, `.factor` and `.original_context_length` are not, so that a file with linear
# scaling (Gemma 3 from 4B on, factor 8) or YaRN (Qwen with a long context) becomes one without. Neither is
# `rope.dimension_count` for phi3, whose Phi-4-mini rotates three quarters of a head. llama.cpp reads all of them from the
# file. Nothing warns; logits are wrong from the first positions on.
#
# Seen on Python 3.11:
#     gemma3, linear, factor 8: {'rope_type': 'default', 'rope_theta': 1000000.0}
#     qwen2, yarn, factor 4: {'rope_theta': 1000000.0, 'rope_type': 'default'}
#     phi3, 48 of 64 dimensions: {'rope_theta': 1000000.0, 'partial_rotary_factor': 1.0, 'rope_type': 'default'}
#
# Takes a Python 3.11 or newer and 1 GB in a temporary folder. Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.24.0 gguf==0.19.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoConfig
from transformers.utils import logging

logging.set_verbosity_error()
HEAD = 64


def rotary(architecture, title, *settings):
    """What transformers reads of a file of this kind: of the layers that see all positions."""
    writer = GGUFWriter("tiny.gguf", architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(2 * HEAD)
    writer.add_block_count(2)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(64)
    for name, value in settings:
        getattr(writer, f"add_rope_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((64, 2 * HEAD), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = AutoConfig.from_pretrained(".", gguf_file="tiny.gguf").rope_parameters
    read = read.get("full_attention", read)
    print(f"{title}: {read}")
    return read["rope_type"], read.get("factor"), read.get("partial_rotary_factor", 1.0)


LINEAR = (("scaling_type", RopeScalingType.LINEAR), ("scaling_factor", 8.0))
YARN = (("scaling_type", RopeScalingType.YARN), ("scaling_factor", 4.0), ("scaling_orig_ctx_len", 256))
found = [
    rotary("gemma3", "gemma3, linear, factor 8", *LINEAR),
    rotary("qwen2", "qwen2, yarn, factor 4", *YARN),
    rotary("phi3", "phi3, 48 of 64 dimensions", ("dimension_count", 48)),
]
sys.exit(found != [("default", None, 1.0)] * 3)
PYTHON
