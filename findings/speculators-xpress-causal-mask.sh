#!/usr/bin/env bash
# speculators 0.9.0 loads an XPress draft without the causal mask of its refiner: that memory is never set.
#
# A guess would be that SpeculatorModel.from_pretrained(folder) computes what the saved model computed. All parameters
# are the file's. But the refiner's `causal_tril` is a buffer that is not saved, made in the constructor. transformers
# 5.19.0 constructs the model on the meta device and then allocates such a buffer anew, and nothing fills it. So it holds
# whatever the allocator returned: zeros, with which the refiner mixes no positions, or an old tensor's numbers. Nothing
# warns.
#
# Here torch fills memory that was not set with NaN, as it does with deterministic algorithms. Copying the lower triangle
# into `refiner_head.causal_tril` after loading repairs the model.
#
# Seen on Python 3.11:
#     saved: mask [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], parameters as saved: True, output is a number: True
#     loaded: mask [[nan, nan, nan], [nan, nan, nan], [nan, nan, nan]], parameters as saved: True, output is a number: False
#     repaired: the loaded model computes what the saved one does: True
#
# Takes a Python 3.11 or newer and 2 GB in a temporary folder. Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --quiet --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0 transformers==5.19.0 speculators==0.9.0
pip uninstall --yes torchvision torchaudio # made for another torch
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch
from loguru import logger
from speculators import SpeculatorModel
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
logger.remove()
warnings.simplefilter("ignore")
BLOCK = 3


def sizes(layers):
    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def biases(draft):
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, BLOCK, 32, generator=generator)
    return draft.refiner_head.block_bias(torch.tensor([[5, 6, 7]]), states)


torch.manual_seed(0)
Qwen3ForCausalLM(sizes(4)).save_pretrained("verifier")
saved = SpeculatorModel.registry["xpress"].from_training_args(
    sizes(1),
    verifier_name_or_path="verifier",
    draft_vocab_size=64,
    block_size=BLOCK,
    target_layer_ids=[1, 2],
    mask_token_id=60,
    xpress_rank=8,
)
torch.nn.init.normal_(saved.refiner_head.mix_l)
saved.save_pretrained("draft")
torch.use_deterministic_algorithms(True)
loaded = SpeculatorModel.from_pretrained("draft")

own = dict(saved.named_parameters())
found = []
for name, draft in (("saved", saved), ("loaded", loaded)):
    same = all(torch.equal(each, own[key]) for key, each in draft.named_parameters())
    number = bool(biases(draft).isfinite().all())
    print(f"{name}: mask {draft.refiner_head.causal_tril.tolist()}, parameters as saved: {same}, output is a number: {number}")
    found.append((same, number))
loaded.refiner_head.causal_tril.copy_(torch.ones(BLOCK, BLOCK).tril())
repaired = torch.equal(biases(loaded), biases(saved))
print(f"repaired: the loaded model computes what the saved one does: {repaired}")
sys.exit(found != [(True, True), (True, False)] or not repaired)
PYTHON
