"""Text that the target writes for the draft to learn from: continuations of files, and answers to questions."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline_lab.training.family.docstring_chats import Chat
from paceline_lab.training.family.family_tokenizer import END_OF_TEXT, TURN_END
from paceline_lab.training.family.token_corpus import Ids, windows

PIECE = 256
"""Tokens of a piece, the first quarter given and the rest written; decoding slows with every cached token."""
ANSWER = 64
"""Most tokens of an answer."""
GENERATION_BATCH = 192
"""Texts written in one batch; in larger batches, copying the cache costs more than they save."""
TEMPERATURES = (0.0, 0.8)
"""Each writes half of the text."""


@torch.no_grad()
def write(target: LlamaForCausalLM, prompts_RP: Tensor, tokens: int, temperature: float, seed: int) -> Tensor:
    """Rows of the target's own text after prompts int64 [R, P] of equal length: int64 [R, P + tokens].

    Text goes on past the end of a document or a turn, as the packed training text does.
    """
    torch.manual_seed(seed)
    config = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=None,
    )
    prompts = prompts_RP.to(target.device)
    target.generation_config = config
    written: Tensor = target.generate(prompts, attention_mask=torch.ones_like(prompts))
    return written.cpu()


def continuations_by_target(target: LlamaForCausalLM, documents: Sequence[Ids], count: int, seed: int) -> list[Ids]:
    """`count` pieces of PIECE tokens: text of the documents, and the target's continuation."""
    begun = windows(documents, PIECE // 4, seed)[:count, :-1]
    return list(_written(target, begun, PIECE - begun.shape[1], seed))


def question_responses(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Chat], seed: int
) -> list[Ids]:
    """Each chat with the target's answer, as a document; in no particular order."""
    turn_end, end_of_text = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    asked: dict[int, list[Tensor]] = defaultdict(list)
    for chat in questions:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        asked[len(ids)].append(torch.tensor(ids))
    documents = []
    for length, prompts in asked.items():
        for row in _written(target, torch.stack(prompts), ANSWER, seed):
            ends = np.flatnonzero(row[length:] == turn_end)
            kept = row[: length + int(ends[0]) + 1] if len(ends) else row
            documents.append(np.append(kept, np.uint16(end_of_text)))
    return documents


def _written(target: LlamaForCausalLM, prompts_RP: Tensor, tokens: int, seed: int) -> Iterator[Ids]:
    for part, temperature in zip(prompts_RP.tensor_split(len(TEMPERATURES)), TEMPERATURES, strict=True):
        for some in part.split(GENERATION_BATCH) if len(part) else ():
            yield from write(target, some, tokens, temperature, seed).numpy().astype(np.uint16)
