#!/usr/bin/env bash
# transformers 5.24.0 takes two parts of tokenizer.json and not the others if the class is Qwen2Tokenizer.
#
# A guess would be that AutoTokenizer.from_pretrained(folder) splits texts as the folder's tokenizer.json says. Where
# tokenizer_config.json names Qwen2Tokenizer, vocabulary and merges are the file's, but the normalizer and the
# pre-tokenizer are the class's own: accents are composed (NFC), and digits stand alone, whatever the file says. Nothing
# warns. GPT2Tokenizer follows the file. LlamaTokenizer says that the file is of another kind, and follows it.
#
# So a tokenizer that transformers itself reads from a GGUF file of Qwen's (without NFC) and saves is another one when it
# is loaded again.
#
# Seen on Python 3.11:
#     tokenizers: 'e' + U+0301 is 3 tokens, '12' is 1
#     GPT2Tokenizer: 'e' + U+0301 is 3 tokens, '12' is 1
#     Qwen2Tokenizer: 'e' + U+0301 is 2 tokens, '12' is 2
#
# Takes a Python 3.11 or newer and 200 MB in a temporary folder. Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
TEXTS = ("e\u0301", "12")
vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
whole = Tokenizer(models.BPE({**vocabulary, "12": len(vocabulary)}, [("1", "2")]))
whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def counts(name, encode):
    accent, digits = (len(encode(text)) for text in TEXTS)
    print(f"{name}: 'e' + U+0301 is {accent} tokens, '12' is {digits}")
    return accent, digits


found = {"tokenizers": counts("tokenizers", lambda text: whole.encode(text).ids)}
for kind in ("GPT2Tokenizer", "Qwen2Tokenizer"):
    Path(kind).mkdir()
    whole.save(f"{kind}/tokenizer.json")
    Path(kind, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    loaded = AutoTokenizer.from_pretrained(kind)
    found[kind] = counts(kind, lambda text: loaded.encode(text, add_special_tokens=False))
sys.exit(found != {"tokenizers": (3, 1), "GPT2Tokenizer": (3, 1), "Qwen2Tokenizer": (2, 2)})
PYTHON
