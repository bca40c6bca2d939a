"""How byte-level vocabularies in GGUF files cut a text into words, by `tokenizer.ggml.pre`.

A GGUF file names the cut, and does not describe it. Each entry here is the `pre_tokenizer` of the tokenizer.json of the
models that use the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s+(?!\S)|\s+"
GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
NEWLINES = rf"\s*[\r\n]+|{SPACES}"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA_3 = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{SYMBOLS}|{NEWLINES}"
QWEN_2 = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{SYMBOLS}|{NEWLINES}"
QWEN_3_5 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{NEWLINES}"
)
SEED_CODER = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{NEWLINES}"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{SPACES}"
)

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
"""A word, and a new one where a capital follows a small letter."""
PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{NEWLINES}"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{PATHS}"
GPT_4O = rf"{CASED[0]}{CONTRACTIONS}?|{CASED[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{PATHS}"

PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
HAN_TO_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
"""Letters that have a case."""
DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{NEWLINES}"
)


class PreTokenizer(NamedTuple):
    """Cuts of a text, one after another, each within the pieces of the one before."""

    patterns: Sequence[str]
    ignores_merges: bool = False
    """A word that is a token stays whole, whether or not merges build it."""
    adds_bos: bool = False
    """Where the file does not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Words in the byte alphabet."""
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(names: str, kind: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), kind)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named("default", PreTokenizer((PUNCTUATION, GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    **_named(
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion exaone4 granite-docling", PreTokenizer((GPT_2,))
    ),
    **_named("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", GPT_2))),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((LLAMA_3,), ignores_merges=True, adds_bos=True),
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", PreTokenizer((LLAMA_3,))),
    **_named("glm4 glm5", PreTokenizer((LLAMA_3,), ignores_merges=True)),
    **_named("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((QWEN_2,))),
    **_named("qwen35", PreTokenizer((QWEN_3_5,))),
    **_named("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((GPT_4O,))),
    **_named("tekken", PreTokenizer((TEKKEN,), ignores_merges=True, adds_bos=True)),
    **_named("falcon", PreTokenizer((FALCON_PUNCTUATION, GPT_2, "[0-9][0-9][0-9]"))),
    **_named("seed-coder", PreTokenizer((SEED_CODER,))),
    **_named("bailingmoe bailingmoe2 llada-moe", PreTokenizer((BAILING,))),
    **_named(
        "deepseek-llm",
        PreTokenizer((r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", HAN_TO_HANGUL, r"\p{N}+")),
    ),
    **_named("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_TO_HANGUL, r"\p{N}"))),
    **_named("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer((r"\p{N}{1,3}", KANA_AND_HAN, DEEPSEEK_3))),
}
"""By the name in the file; several names may mean one cut."""
