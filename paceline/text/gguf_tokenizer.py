"""The tokenizer, special tokens and chat template of a GGUF file, from its metadata alone.

Two kinds of vocabulary are read: byte-level BPE (`gpt2`) and sentencepiece's BPE (`llama`). Ids are those of the
tokenizer in llama.cpp; docs/gguf.md names the exception.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from operator import itemgetter

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from paceline.gguf.gguf_file import GgufFile
from paceline.text.chat_template import DEFAULT, ChatTemplate, ChatTemplateError, gguf_templates
from paceline.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from paceline.text.gguf_vocabulary import (
    ADDED,
    BYTE,
    END_KEYS,
    MERGES,
    PRE,
    ROLES,
    SENTENCEPIECE,
    TOKENS,
    GgufVocabulary,
    gguf_vocabulary,
)

ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"

ENDS = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>"),  # of a text
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>"),  # of a turn
        *("<EOT>", "_<EOT>", "[EOT]", "<|endofturn|>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>"),
        *("<end_of_utterance>", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),  # of an answer, and of a tool call
    }
)
"""Spellings of special tokens that end an answer."""
MESSAGE_END = "<|end|>"
MESSAGE_ENDS_ONLY_WITH = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""In vocabularies with such a pair, `<|end|>` ends a message of an answer, and another message follows."""
KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens that do not swallow the spaces after them."""
SHOWN_ANSWER = "SHOWN ANSWER"


def gguf_backend(file: GgufFile) -> Backend:
    """The tokenizer. Raises `GgufError`."""
    vocabulary = gguf_vocabulary(file)
    build = _sentencepiece if vocabulary.model == SENTENCEPIECE else _byte_level
    backend = build(file, vocabulary)
    backend.add_tokens(_added_tokens(file, vocabulary))
    return backend


def gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    """The special tokens by role: `bos_token`, `eos_token`, ... Raises `GgufError`."""
    vocabulary = gguf_vocabulary(file)
    return {role: vocabulary.tokens[id_] for role, id_ in vocabulary.roles.items()}


def eos_token_ids(file: GgufFile) -> list[int]:
    """All tokens that end an answer: those the file names, known spellings, and what its template closes a turn with.

    Text tokens are none, unless the file names them. Raises `GgufError`.
    """
    vocabulary = gguf_vocabulary(file)
    ends = ENDS | {_template_end(gguf_templates(file).get(DEFAULT), gguf_special_tokens(file), vocabulary.added)}
    if any(pair <= vocabulary.added.keys() for pair in MESSAGE_ENDS_ONLY_WITH):
        ends -= {MESSAGE_END}
    named = {id_ for key in END_KEYS if (id_ := vocabulary.named(key)) is not None}
    return sorted(named | {id_ for token, id_ in vocabulary.added.items() if token in ends})


def _template_end(template: str | None, special_tokens: Mapping[str, str], added: Container[str]) -> str:
    """The added token that is all that the template puts after an answer; "" otherwise."""
    messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": SHOWN_ANSWER}]
    try:
        text = ChatTemplate(template or "", special_tokens).render(messages, add_generation_prompt=False)
    except ChatTemplateError:
        return ""
    after = text.partition(SHOWN_ANSWER)[2].strip()
    return after if after in added else ""


def _byte_level(file: GgufFile, vocabulary: GgufVocabulary) -> Backend:
    kind = _pre_tokenizer(file, vocabulary)
    backend = Backend(_byte_level_model(file, vocabulary, kind))
    backend.pre_tokenizer = kind.build()
    backend.decoder = decoders.ByteLevel()
    _add_ends(backend, file, vocabulary, adds_bos=kind.adds_bos)
    return backend


def _pre_tokenizer(file: GgufFile, vocabulary: GgufVocabulary) -> PreTokenizer:
    name = file.need(PRE, str)
    if name not in PRE_TOKENIZERS:
        raise vocabulary.error(f"{PRE} is {name!r}, which is not known here: its ids would not be those of the model")
    return PRE_TOKENIZERS[name]


def _byte_level_model(file: GgufFile, vocabulary: GgufVocabulary, kind: PreTokenizer) -> models.BPE:
    merges = [tuple(merge.split(" ", 1)) for merge in file.need(MERGES, list)]
    ids = vocabulary.ids
    try:
        return models.BPE(vocab=ids, merges=merges, ignore_merges=kind.ignores_merges)
    except Exception as error:  # tokenizers raises nothing more specific
        raise vocabulary.error(f"{MERGES} does not fit {TOKENS}: {error}") from error


def _sentencepiece(file: GgufFile, vocabulary: GgufVocabulary) -> Backend:
    adds_space = file.get(ADD_SPACE, bool, default=True)
    unknown = vocabulary.roles.get("unk_token")
    backend = Backend(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if adds_space else space
    words = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)] if adds_space else words)
    _add_ends(backend, file, vocabulary, adds_bos=True)
    return backend


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Every way to build a token from two others, the highest score first. Added tokens and bytes are not built."""
    types, scores = vocabulary.types, vocabulary.scores
    built = {token: scores[id_] for token, id_ in vocabulary.ids.items() if types[id_] not in (*ADDED, BYTE)}
    pairs = [
        (score, at, len(token) - at, token[:at], token[at:])
        for token, score in built.items()
        for at in range(1, len(token))
        if token[:at] in built and token[at:] in built
    ]
    pairs.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for _, _, _, left, right in pairs]


def _add_ends(backend: Backend, file: GgufFile, vocabulary: GgufVocabulary, *, adds_bos: bool) -> None:
    """The tokens around every text, as the file says or else as its kind has them."""
    before = _end(vocabulary, "bos_token") if file.get(ADD_BOS, bool, default=adds_bos) else []
    after = _end(vocabulary, "eos_token") if file.get(ADD_EOS, bool, default=False) else []
    if before or after:
        names = [token for token, _ in before], [token for token, _ in after]
        backend.post_processor = processors.TemplateProcessing(
            single=[*names[0], "$A", *names[1]],
            pair=[*names[0], "$A", *names[1], *names[0], "$B:1", *names[1]],
            special_tokens=[*before, *after],
        )


def _end(vocabulary: GgufVocabulary, role: str) -> list[tuple[str, int]]:
    if role not in vocabulary.roles:
        raise vocabulary.error(f"every text has a {role}, and there is no {ROLES[role]}")
    id_ = vocabulary.roles[role]
    return [(vocabulary.tokens[id_], id_)]


def _added_tokens(file: GgufFile, vocabulary: GgufVocabulary) -> list[AddedToken]:
    """Special and user-defined tokens, such as runs of spaces."""
    strips = vocabulary.model == SENTENCEPIECE and file.get("general.architecture", str) == "phi3"
    return [
        AddedToken(
            token, normalized=False, special=vocabulary.is_special(id_), rstrip=strips and token not in KEEPS_SPACE
        )
        for token, id_ in vocabulary.added.items()
    ]
