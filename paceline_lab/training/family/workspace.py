"""The work folder of a family: files that one step of the script leaves for the next."""

from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline_lab.training.family.family_models import load_model
from paceline_lab.training.family.family_tokenizer import load_tokenizer
from paceline_lab.training.family.token_corpus import Ids, load_documents


@dataclass(frozen=True)
class Workspace:
    """Folders and budgets. `minutes` is the training time of one model, `lesson_rows` what the draft learns from."""

    folder: Path
    out: Path
    device: str
    minutes: float
    lesson_rows: int

    @property
    def target_folder(self) -> Path:
        """The target as it ships."""
        return self.out / "pydoc"

    @property
    def draft_folder(self) -> Path:
        """The draft as it ships."""
        return self.out / "pydoc-draft"

    @property
    def hybrid_folder(self) -> Path:
        """The hybrid as it ships."""
        return self.out / "pydoc-hybrid"

    @property
    def shallow_folder(self) -> Path:
        """The target before it is deepened."""
        return self.folder / "shallow"

    @property
    def deep_folder(self) -> Path:
        """The target before it is taught."""
        return self.folder / "deep"

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer, before there is a model to ship it with."""
        return self.folder / "tokenizer"

    @property
    def corpus_file(self) -> Path:
        """The encoded training text."""
        return self.folder / "corpus.npz"

    @property
    def held_out_file(self) -> Path:
        """The encoded held-out files."""
        return self.folder / "held_out.npz"

    @property
    def lessons_file(self) -> Path:
        """The target's outputs for distillation."""
        return self.folder / "lessons.pt"

    @property
    def read_file(self) -> Path:
        """The heads' training text: that of the lessons."""
        return self.folder / "read.npz"

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The trained tokenizer."""
        return load_tokenizer(self.tokenizer_folder)

    def corpus(self) -> list[Ids]:
        """The training documents."""
        return load_documents(self.corpus_file)

    def held_out(self) -> list[Ids]:
        """The held-out documents."""
        return load_documents(self.held_out_file)

    def shallow(self) -> LlamaForCausalLM:
        """The target before it is deepened."""
        return load_model(self.shallow_folder, self.device)

    def deep(self) -> LlamaForCausalLM:
        """The target before it is taught."""
        return load_model(self.deep_folder, self.device)

    def target(self) -> LlamaForCausalLM:
        """The target as it was last exported."""
        return load_model(self.target_folder, self.device)

    def draft(self) -> LlamaForCausalLM:
        """The draft as it was last exported."""
        return load_model(self.draft_folder, self.device)
