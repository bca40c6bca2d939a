"""Training and drafting compute the same: rows of a dense batch equal rows of a request."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM

from paceline import family
from paceline.drafting.auto_method import method_of_checkpoint
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.heads.mlp_network import load_mlp_speculator
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.medusa import load_medusa
from paceline.drafting.methods.mtp import load_mtp
from paceline.model.checkpoint import Checkpoint
from paceline.model.rows import SlotTable
from paceline.model.target_weights import load_target_weights
from paceline_lab.training.family.family_tokenizer import load_tokenizer
from paceline_lab.training.family.hybrid_model import hybrid_config, load_hybrid, save_hybrid
from paceline_lab.training.family.token_corpus import windows
from paceline_lab.training.heads.eagle3_module import Eagle3Module
from paceline_lab.training.heads.hybrid_mtp_module import HybridMtpModule
from paceline_lab.training.heads.target_output_cache import TargetOutputCache
from paceline_lab.training.heads.target_reader import (
    DECAY,
    KEPT,
    TargetOutputs,
    TargetReader,
    accepted_by_depth,
    draft_loss,
)
from paceline_lab.training.heads.train_head import RECIPES, head_config, save_head
from tests.helpers.head_checkpoints import LAYERS, VOCABULARY, target_network, target_weights

NETWORKS: dict[str, Any] = {"eagle": EagleNetwork, "eagle3": Eagle3Network, "mtp": load_mtp}
LENGTH, STEPS = 70, 4  # past a tile border


def begun(method: str) -> tuple[nn.Module, TargetReader]:
    target = target_network()
    reader = TargetReader(target, RECIPES[method].layers(LAYERS))
    torch.manual_seed(5)
    return RECIPES[method].begin(head_config(target.config), target).float(), reader


def save_unrounded(head: nn.Module, method: str, folder: Path) -> None:
    save_head(head, RECIPES[method], head_config(target_network().config), folder)
    file = folder / RECIPES[method].file
    tensors = {RECIPES[method].stored_as(name): each.detach() for name, each in head.named_parameters()}
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def rows(count: int) -> Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(47))


def logits(reader: TargetReader, reading: TargetOutputs) -> Tensor:
    """All logits of the target."""
    output: Tensor = reader.target(input_ids=reading.ids_BL).logits
    return output


def chain(network: HeadNetwork, reading: TargetOutputs, row: int, steps: int) -> list[Tensor]:
    """Logits of each step of a draft whose root is the token at `row` + 1, and whose draft tokens are the text."""
    tokens = reading.ids_BL[0].tolist()
    slot_table, free = SlotTable(), list(range(network.slots, 0, -1))
    slot_table.slots = [free.pop() for _ in range(row + 1)]
    committed = [slot_table.row(tokens[i + 1], i) for i in range(row + 1)]
    output = network.run(committed, network.encode(reading.states_BLSH[0, : row + 1]), [row])
    logits, branch = [output.logits[0]], list[int]()
    for step in range(1, steps):
        branch.append(free.pop())
        output = network.run([slot_table.branch_row(tokens[row + 1 + step], branch)], output.features, [0])
        logits.append(output.logits[0])
    return logits


def disturbed(method: str) -> tuple[nn.Module, TargetReader]:
    """Random parameters: zeros and ones would hide errors."""
    head, reader = begun(method)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * max(float(parameter.std()), parameter.shape[-1] ** -0.5)
    return head, reader


@pytest.mark.parametrize("method", NETWORKS)
@torch.no_grad()
def test_every_step_of_the_training_is_a_step_of_a_draft(method: str, tmp_path: Path) -> None:
    head, reader = disturbed(method)
    save_unrounded(head, method, tmp_path)
    network = NETWORKS[method](Checkpoint(tmp_path), target_weights(), 256)
    reading = reader.read(rows(1))
    steps_logits = head(reading, STEPS)
    for row in (0, 1, 30, LENGTH - 2 - STEPS):
        for step, logits in enumerate(chain(network, reading, row, STEPS)):
            expected = steps_logits[step][0, row]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@torch.no_grad()
def test_every_step_of_the_hybrids_layer_is_a_step_of_a_draft(tmp_path: Path) -> None:
    """Its parameters are random, and rounded as the file is."""
    torch.manual_seed(6)
    hybrid = Qwen3_5ForCausalLM(hybrid_config(hidden_size=64, num_hidden_layers=LAYERS))
    layer = HybridMtpModule(hybrid.config)
    for parameter in (*hybrid.parameters(), *layer.parameters()):
        parameter += 0.3 * torch.randn_like(parameter) * max(float(parameter.std()), parameter.shape[-1] ** -0.5)
        parameter.copy_(parameter.to(torch.bfloat16))
    save_hybrid(hybrid, layer, load_tokenizer(family.path("pydoc")), tmp_path)
    network = load_mtp(Checkpoint(tmp_path), load_target_weights(str(tmp_path), torch.float32, "cpu"), 256)
    reading = TargetReader(load_hybrid(tmp_path), RECIPES["mtp"].layers(LAYERS)).read(rows(1))
    steps_logits = layer(reading, STEPS)
    for row in (0, 1, 30, LENGTH - 2 - STEPS):
        for step, logits in enumerate(chain(network, reading, row, STEPS)):
            expected = steps_logits[step][0, row]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


SOME = torch.arange(1, VOCABULARY, 3)
"""A draft vocabulary."""


def restricted(*, shared: bool) -> tuple[Eagle3Module, TargetReader]:
    """A disturbed EAGLE-3 head of the draft vocabulary. `shared`: by the target's output matrix."""
    head, _ = disturbed("eagle3")
    assert isinstance(head, Eagle3Module)
    target = target_network()
    if shared:
        with torch.no_grad():
            head.lm_head.weight.copy_(target.lm_head.weight)
    head.restrict(SOME)
    if shared:
        head.share_output()
    return head, TargetReader(target, RECIPES["eagle3"].layers(LAYERS), SOME)


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_a_head_of_fewer_tokens_is_trained_on_what_it_guesses(shared: bool, tmp_path: Path) -> None:
    """Columns of the training are the logits of a draft, for the tokens that d2t names."""
    head, reader = restricted(shared=shared)
    save_unrounded(head, "eagle3", tmp_path)
    assert ("lm_head.weight" in Checkpoint(tmp_path).names) is not shared
    network = Eagle3Network(Checkpoint(tmp_path), target_weights(), 256)
    assert network.ids is not None
    assert torch.equal(network.ids, SOME)
    reading = reader.read(rows(1))
    steps_logits = head(reading, STEPS)
    for row in (0, 30):
        for step, logits in enumerate(chain(network, reading, row, STEPS)):
            expected = steps_logits[step][0, row]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@torch.no_grad()
def test_tokens_outside_of_the_vocabulary_are_no_columns() -> None:
    """They are never accepted, and what the target gives to them is what a head of these columns leaves to others."""
    _, whole = begun("eagle3")
    target = target_network()
    reading, cut = whole.read(rows(1)), TargetReader(target, RECIPES["eagle3"].layers(LAYERS), SOME).read(rows(1))
    inside = torch.isin(reading.likely_BLK, SOME)
    assert bool(inside.any())
    assert not bool(inside.all())
    assert torch.equal(cut.likely_BLK >= 0, inside)
    assert torch.equal(SOME[cut.likely_BLK[inside]], reading.likely_BLK[inside])
    right = [logits(whole, reading)[:, 1:]]
    assert float(accepted_by_depth(right, reading, 0)) == 1
    chosen = inside[:, 1:, 0].float().mean()
    assert float(accepted_by_depth([right[0][..., SOME]], cut, 0)) == pytest.approx(float(chosen))
    even = [torch.zeros(1, LENGTH - 1, len(SOME))]
    shares = reading.log_shares_BLK.exp()[:, 1:] * inside[:, 1:]
    columns = inside[:, 1:].sum(-1)
    rest = 1 - shares.sum(-1)
    left = (1 - columns / len(SOME)).clamp_min(1e-6).log()
    expected = (shares.sum(-1) * math.log(len(SOME)) - rest * left).mean()
    assert float(draft_loss(even, cut)) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("method", [*NETWORKS, "medusa", "mlp_speculator"])
def test_a_few_steps_teach_a_head_something(method: str, tmp_path: Path) -> None:
    """The saved head is detected and loaded again."""
    head, reader = begun(method)
    reading, steps = reader.read(rows(4)), 2 if method in NETWORKS else RECIPES[method].steps
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        loss = draft_loss(head(reading, steps), reading)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    save_head(head, RECIPES[method], head_config(reader.target.config), tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert method_of_checkpoint(checkpoint) == method
    if method in NETWORKS:
        network = NETWORKS[method](checkpoint, target_weights(), 256)
        assert tuple(network.description.hidden_state_layers) == tuple(RECIPES[method].layers(LAYERS))
        with torch.no_grad():
            [logits] = chain(network, reading, 20, 1)
            step_logits = head(reading, 1)[0][0, 20]
        assert (logits - step_logits).abs().max() < 0.05 * step_logits.abs().max()  # written in bfloat16


@torch.no_grad()
def test_medusa_heads_are_trained_on_what_they_guess(tmp_path: Path) -> None:
    head, reader = disturbed("medusa")
    save_unrounded(head, "medusa", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    served, reading = load_medusa(checkpoint, target_weights()), reader.read(rows(2))
    assert served.tokens_per_pass == RECIPES["medusa"].steps == checkpoint.config["medusa_num_heads"]
    served_logits = served(reading.states_BLSH[:, :, 0].flatten(0, 1)).unflatten(0, (2, LENGTH))
    for step, step_logits in enumerate(head(reading, served.tokens_per_pass)):
        assert step_logits.shape[1] == LENGTH - 1 - step
        torch.testing.assert_close(step_logits, served_logits[:, : step_logits.shape[1], step], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_medusa_head_begins_as_the_target_s_own() -> None:
    head, reader = begun("medusa")
    reading = reader.read(rows(1))
    for step_logits in head(reading, 3):
        expected = logits(reader, reading)[:, : step_logits.shape[1]]
        torch.testing.assert_close(step_logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_mlp_speculator_is_trained_on_what_it_guesses(tmp_path: Path) -> None:
    head, reader = disturbed("mlp_speculator")
    save_unrounded(head, "mlp_speculator", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    network, reading = load_mlp_speculator(checkpoint, target_weights()), reader.read(rows(2))
    steps_logits = head(reading, RECIPES["mlp_speculator"].steps)
    assert network.steps == len(steps_logits) == checkpoint.config["n_predict"]
    for row in (0, 1, 30, LENGTH - 1 - len(steps_logits)):
        states = network.begin(reading.states_BLSH[:, row, 0])
        for step, step_logits in enumerate(steps_logits):
            assert step_logits.shape[1] == LENGTH - 1 - step
            logits, states = network.step(step, states, reading.ids_BL[:, row + 1 + step])
            torch.testing.assert_close(step_logits[:, row], logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_loss_is_least_where_a_head_says_what_the_target_says() -> None:
    """The expected token is the one after the step's input; earlier steps have more weight."""
    _, reader = begun("medusa")
    reading = reader.read(rows(2))
    right = [logits(reader, reading)[:, 1 + step :] for step in range(3)]
    shares = logits(reader, reading).softmax(-1).sort(-1, descending=True).values
    kept = torch.cat((shares[..., :KEPT], shares[..., KEPT:].sum(-1, keepdim=True)), -1)
    entropies = [float(torch.special.entr(kept[:, 1 + step :]).sum(-1).mean()) for step in range(3)]
    expected = (entropies[0] + DECAY * entropies[1] + DECAY**2 * entropies[2]) / (1 + DECAY + DECAY**2)
    least = float(draft_loss(right, reading))
    assert least == pytest.approx(expected, rel=1e-4)
    worse = [float(draft_loss([*right[:n], 0.5 * right[n], *right[n + 1 :]], reading)) for n in range(3)]
    assert worse[0] > worse[1] > worse[2] > least


@torch.no_grad()
def test_a_guess_is_accepted_with_all_before_it() -> None:
    _, reader = begun("medusa")
    reading = reader.read(rows(1))
    chosen = logits(reader, reading)[0].argmax(-1)
    steps_logits = [F.one_hot(chosen[1 + step :], VOCABULARY)[None].float() for step in range(3)]
    first = 10
    assert accepted_by_depth(steps_logits, reading, first).tolist() == [1, 1, 1]
    places = LENGTH - 2 - first
    steps_logits[1][0, first + 4] *= -1  # one position is wrong in the second step, and so in all later ones
    steps_logits[2][0, first + 7] *= -1
    steps_logits[0][0, first - 1] *= -1  # before the first that counts
    shares = accepted_by_depth(steps_logits, reading, first).tolist()
    assert shares == pytest.approx([1, 1 - 1 / places, 1 - 2 / (places - 1)])


class CountingReader(TargetReader):
    count = 0

    def read(self, ids_BL: Tensor) -> TargetOutputs:
        self.count += len(ids_BL)
        return super().read(ids_BL)


@pytest.mark.parametrize("rows_kept", [0, 2, 5])
@torch.no_grad()
def test_outputs_are_cached_as_far_as_memory_reaches(rows_kept: int) -> None:
    target, layers = target_network(), RECIPES["eagle3"].layers(LAYERS)
    documents = [np.arange(301, dtype=np.uint16) % VOCABULARY]
    rows_of = windows(documents, 60, seed=0)
    one = TargetReader(target, layers).read(rows_of[:1])
    size = one.states_BLSH.nbytes + one.likely_BLK.nbytes + one.log_shares_BLK.nbytes
    reader = CountingReader(target, layers)
    library = TargetOutputCache(reader, documents, rows_kept * size + size // 2)
    stream = library.stream(seed=3)
    for epoch in range(3):
        names = torch.cat([stream.batch(1, 60) for _ in range(5)])
        assert sorted(names.tolist()) == [[60, number] for number in range(5)]
        for name in names:
            fresh, reading = TargetReader(target, layers).read(rows_of[name[1:]]), library.read(name[None])
            for field in fields(TargetOutputs):
                assert torch.equal(getattr(fresh, field.name), getattr(reading, field.name)), field.name
        assert reader.count == 5 + epoch * (5 - rows_kept)
    mixed = library.read(torch.tensor([[60, 4], [60, 0], [60, 2]]))
    assert torch.equal(mixed.ids_BL, rows_of[[4, 0, 2]])
    assert torch.equal(mixed.likely_BLK, TargetReader(target, layers).read(rows_of[[4, 0, 2]]).likely_BLK)


@pytest.mark.parametrize("method", ["draft_model", "pard"])
@torch.no_grad()
def test_a_small_model_is_trained_on_what_it_reads(method: str, tmp_path: Path) -> None:
    """Tokens up to a place, and a mask for each one after it that is not known."""
    head, reader = begun(method)
    save_unrounded(head, method, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert method_of_checkpoint(checkpoint) == method
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    reading = reader.read(rows(1))
    steps = RECIPES[method].steps
    for step, step_logits in enumerate(head(reading, steps)):
        assert step_logits.shape[1] == LENGTH - 1 - step
        for row in (0, 5, 40):
            masks = [checkpoint.config.get("pard_token", 0)] * step
            read = torch.tensor([[*reading.ids_BL[0, : row + 2].tolist(), *masks]])
            torch.testing.assert_close(step_logits[0, row], model(input_ids=read).logits[0, -1], rtol=1e-4, atol=1e-4)
