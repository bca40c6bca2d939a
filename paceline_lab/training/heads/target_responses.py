"""Write chats that a target answers itself, for a head to learn from.

    python -m paceline_lab.training.heads.target_responses --target smollm2-135m-instruct --out answers.jsonl

Prompts are everyday questions and tasks over free texts (`everyday_prompts`). Half of the answers are greedy, the
others drawn at temperatures up to 1. Answers are appended batch by batch, and the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.config.sampling_params import SamplingParams
from paceline.llm import LLM
from paceline_lab.training.family.docstring_chats import Chat
from paceline_lab.training.heads.everyday_prompts import everyday_prompts

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
"""Of one prompt after the other."""
BATCH = 32
"""Prompts answered at once; a batch lasts as long as its longest answer."""


def main() -> int:
    """Parse the command line and write the answers."""
    options = _parser().parse_args()
    prompts = everyday_prompts(options.prompts, options.seed)
    done = len(options.out.read_text(encoding="utf-8").splitlines()) if options.out.exists() else 0
    llm = LLM(options.target, engine_config={"threads": options.threads, "max_model_len": 2048})
    for count, lines in enumerate(_answered(llm, prompts[done:], done, options.tokens), 1):
        with options.out.open("a", encoding="utf-8") as answers:
            answers.writelines(lines)
        sys.stderr.write(f"{min(done + count * BATCH, len(prompts))} of {len(prompts)}\n")
    return 0


def _answered(llm: LLM, prompts: Sequence[Chat], first: int, tokens: int) -> Iterator[list[str]]:
    """JSON lines of a batch of chats with their answers, batch after batch. `first`: the number of the first prompt."""
    for start in range(0, len(prompts), BATCH):
        chats = prompts[start : start + BATCH]
        sampling = [_sampling(first + start + n, tokens) for n in range(len(chats))]
        answers = llm.chat(chats, sampling)
        yield [_line(chat, answer.text) for chat, answer in zip(chats, answers, strict=True)]


def _sampling(number: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=TEMPERATURES[number % len(TEMPERATURES)], max_tokens=tokens, seed=number)


def _line(chat: Chat, answer: str) -> str:
    return json.dumps({"messages": [*chat, {"role": "assistant", "content": answer}]}, ensure_ascii=False) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model that answers")
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file, appended to")
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=320, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--threads", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
