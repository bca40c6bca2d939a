"""A request as its drafts see it: its tokens, its token tree, and how far the tree may grow."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from paceline.config import SpeculativeConfig
from paceline.core.policy.calibration import Calibration
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Commit, Limit, Opening
from paceline.messages import GenerationRequest, SpeculationStats

OWN_DRAFT_SOURCE = 0
"""The source, in trees, of nodes from a request's own draft. Lookup drafts in this process have the next numbers."""


class DraftedRequest:
    """What `DraftManager` needs of a request. Its last token is the root of its tree."""

    def __init__(
        self,
        key: int,
        generation_request: GenerationRequest,
        tree: TokenTree,
        *,
        max_tokens: int,
        limits: tuple[int, int],
        calibrations: Mapping[int, Calibration],
    ) -> None:
        """`key`: the request's id towards drafts. `max_tokens`: most output tokens. `limits`: greatest depth and most
        nodes verified; (0, 0) is plain decoding. `calibrations`: by source of the nodes."""
        self.key = key
        self.generation_request = generation_request
        self.max_tokens = max_tokens
        self.max_depth, self.max_nodes = limits
        self.tokens = [*generation_request.prompt, *generation_request.committed]
        self.tree = tree
        self.calibrations = calibrations
        self.stats = SpeculationStats()
        self.draft: str | None = None
        self.hidden_states_sent = 0
        """Positions whose hidden states the draft has."""
        self.held_commits: list[Commit] = []
        """Commits that the draft, which is paused, was not told yet. They have no hidden states."""
        self.lookups_opened = False
        """Whether the lookup drafts know the request."""
        self.paused = False
        """Whether the draft is limited to 0 nodes, and growth it sends anyway is dropped."""
        self.draft_started = False
        """Whether the draft has sent growth since it was opened or resumed."""
        self.accepted_average = 0.0
        """Moving average of accepted draft tokens per step, less what drafting costs."""
        self.retry_draft_at = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.generation_request.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def draft_addresses(self) -> Sequence[str]:
        """Of draft workers, best first."""
        return self.generation_request.draft_addresses

    @property
    def speculates(self) -> bool:
        return self.max_depth > 0

    @property
    def draft_active(self) -> bool:
        """Whether draft tokens may be on their way."""
        return self.draft is not None and not self.paused

    def depth_allowed(self) -> int:
        """Greatest depth worth verifying: `max_tokens` must leave room for the bonus token."""
        return min(self.max_depth, self.max_tokens - self.output_tokens - 1)

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes in the tree. One step verifies fewer, but the draft grows while the target is busy."""
        return 4 * self.max_nodes

    def candidate_nodes(self) -> Sequence[int]:
        """The nodes that one step may verify, best first."""
        depth = self.depth_allowed()
        return self.tree.best(self.max_nodes, depth) if depth > 0 else []

    def observe_outcomes(
        self, accepted: Sequence[int], tokens: Sequence[int], among: Container[int] | None = None
    ) -> list[tuple[int, bool]]:
        """Calibrate the drafts' probabilities by what a step draws, before `commit`.

        `tokens`: to be committed. `accepted`: nodes that carry all of them but perhaps the last. Learns from all nodes
        whose parent was drawn, or from those `among`. Returns each cell of the own draft and whether it was drawn.
        """
        samples = []
        for node, source, cell, was_drawn in self.tree.outcomes(accepted, tokens):
            if among is None or node in among:
                self.calibrations[source].observe(cell, was_drawn)
                if source == OWN_DRAFT_SOURCE:
                    samples.append((cell, was_drawn))
        return samples

    def commit(self, tokens: Sequence[int]) -> None:
        """`tokens` are final: the last of them becomes the root of the tree."""
        self.tokens += tokens
        self.tree.commit(tokens)

    def limit(self, config: SpeculativeConfig, depth_factor: int) -> Limit:
        """How far the draft may grow the tree now; see `opening`."""
        nodes = 0 if self.paused else self.max_tree_nodes
        return Limit(self.key, depth_factor * self.max_depth if nodes else 0, nodes, _least_path_probability(config))

    def opening(self, config: SpeculativeConfig, depth_factor: int) -> Opening:
        """The first message to a draft, which starts unpaused. It grows `depth_factor` times the depth of one step."""
        return Opening(
            self.key,
            list(self.tokens),
            self.output_tokens,
            self.generation_request.sampling,
            depth_factor * self.max_depth,
            self.max_tree_nodes,
            config.rejection_sampling_strategy,
            _least_path_probability(config),
            cache_salt=self.generation_request.cache_salt,
            trace_parent=self.generation_request.trace_parent,
        )


def _least_path_probability(config: SpeculativeConfig) -> float:
    """The target's, if its user chose one: a draft with another one of its own goes by the higher one."""
    chosen, default = config.least_path_probability, SpeculativeConfig.model_fields["least_path_probability"].default
    return chosen if chosen != default else 0.0
