"""The mutants: small wrong changes to the code that exactness rests on, each with the tests that look at that code.

A mutant is written down by its meaning, its name. When the code that it changes is rewritten, its text is to be written
anew so that it means the same; a mutant is removed only together with what it breaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change. `old` occurs exactly once in `file`; `tests` are files below `tests`, the likeliest to fail first."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def occurrences(self) -> int:
        """Of `old` in `file`."""
        path = CHECKOUT / self.file
        return path.read_text().count(self.old) if path.exists() else 0


TREE = ("unit/test_tree.py", "exactness/test_enumeration.py", "exactness/test_strategies_engine.py")
VERIFY = ("exactness/test_verify.py", "exactness/test_enumeration.py")
SAMPLING = ("exactness/test_sampling.py", "exactness/test_noise.py", "unit/test_draft_model.py")
GRAMMAR = ("unit/test_grammar.py",)
REASONING = ("unit/test_reasoning_gate.py", "exactness/test_reasoning_grammar.py")
RESIDUAL = ("exactness/test_residual.py", "exactness/test_residual_draws.py", "exactness/test_strategies_engine.py")
LOSSY = ("exactness/test_lossy.py", "exactness/test_strategies_engine.py")
ROWS = ("exactness/test_rows.py", "exactness/test_row_invariant_linear.py")
FLASH = ("unit/test_paged_attention.py",)
TRITON = ("unit/test_triton_attention.py",)
NATIVE = ("exactness/test_native.py",)
QUANTISED = ("exactness/test_quantized_weights.py", "exactness/test_gguf_model.py")
PACKED_FOLDERS = ("exactness/test_packed_checkpoint.py",)
DEQUANTISED = ("unit/test_gguf_names.py", "unit/test_gguf_config.py")
SCHEDULER = ("unit/test_scheduler.py", "unit/test_slot_pool.py", "unit/test_engine.py")
CODEC = ("unit/test_wire_node_codec.py", "contract/test_frames.py")

OUTPUT = ("unit/test_output_processor.py", "unit/test_llm.py")
STOPS = ("unit/test_text_stops.py", "unit/test_output_processor.py")
ENGINE = ("unit/test_engine.py", "exactness/test_engine.py")
SCORES = ("exactness/test_prompt_scores.py",)
ENDS = ("exactness/test_ends_inside_runs.py",)
API = ("exactness/test_api_combinations.py",)
POLICY = ("unit/test_step_cost.py", "unit/test_stat_logger.py")
RESUMING = ("contract/test_resuming.py",)
GATEWAY = ("contract/test_openai_life.py", "contract/test_openai_routing.py")

MUTANTS = (
    # The tree: who is grafted where, what is best, what a commit leaves.
    Mutant(
        "growth under the committed token hangs from the root, however old it is",
        "paceline/core/tree.py",
        "top = ROOT if growth.base_position == self.position else None",
        "top = ROOT",
        TREE,
    ),
    Mutant(
        "a guess whose parent is unknown joins the root",
        "paceline/core/tree.py",
        "parent = known.get(parent_id) if parent_id else top",
        "parent = known.get(parent_id, ROOT) if parent_id else top",
        TREE,
    ),
    Mutant(
        "two drafts share their ids",
        "paceline/core/tree.py",
        "self._draft_ids.get(source) or self._draft_ids.setdefault(source, ",
        "self._draft_ids.get(0) or self._draft_ids.setdefault(0, ",
        TREE,
    ),
    Mutant(
        "what follows a guess that contradicts committed tokens joins the tree",
        "paceline/core/tree.py",
        "<= min(len(self._recent_tokens), RECENT_POSITIONS) and self._recent_tokens[-behind] == token:",
        "<= min(len(self._recent_tokens), RECENT_POSITIONS):",
        TREE,
    ),
    Mutant(
        "a chain takes a second child",
        "paceline/core/tree.py",
        "if self._chain and parent != self.size:",
        "if self._chain and parent < self.size - 1:",
        TREE,
    ),
    Mutant(
        "the best guesses are chosen by their own probability, not their path's",
        "paceline/core/tree.py",
        "near.sort(key=self.path_log_probs.__getitem__",
        "near.sort(key=self.log_prob",
        TREE,
    ),
    Mutant(
        "the best guesses are one level too deep",
        "paceline/core/tree.py",
        "if self.depths[node] <= max_depth]",
        "if self.depths[node] <= max_depth + 1]",
        TREE,
    ),
    Mutant(
        "a choice of guesses outlives a commit",
        "paceline/core/tree.py",
        "        self._best_cache.clear()\n        top = ",
        "        top = ",
        TREE,
    ),
    Mutant(
        "path probabilities still count from the old root",
        "paceline/core/tree.py",
        "self.path_log_probs[node] - top for node in kept",
        "self.path_log_probs[node] for node in kept",
        TREE,
    ),
    Mutant(
        "what hangs below a refused guess still counts as the tree's",
        "paceline/core/tree.py",
        "            if parent in moved:\n",
        "            if parent > ROOT:\n",
        TREE,
    ),
    Mutant(
        "a draft takes its guesses for others after a commit",
        "paceline/drafting/best_first.py",
        "for node, old in enumerate(committed.kept, 1) if old in slots",
        "for node, old in enumerate(committed.kept, 2) if old in slots",
        ("unit/test_draft_model.py",),
    ),
    # Verification: where the walk goes.
    Mutant(
        "the walk follows another guess where nobody guessed the draw",
        "paceline/core/verify.py",
        "node = tree.child(node, draw)",
        "node = tree.child(node, draw) or next(iter(tree.children(node)), None)",
        VERIFY,
    ),
    Mutant(
        "the walk goes on from a guess without a row, by its parent's draw",
        "paceline/core/verify.py",
        "while node is not None and node in draw_after:\n        draw = draw_after[node]",
        "draw = draws[0]\n    while node is not None:\n        draw = draw_after.get(node, draw)",
        VERIFY,
    ),
    Mutant(
        "the bonus token is left out after accepted guesses",
        "paceline/core/verify.py",
        "        node = tree.child(node, draw)\n    return committed",
        "        node = tree.child(node, draw)\n    return committed[:-1] or committed",
        VERIFY,
    ),
    # Sampling: rules, filters and noise.
    Mutant(
        "two positions share their noise",
        "paceline/core/noise.py",
        "_splitmix64(seed) + position * _GOLDEN_GAMMA",
        "_splitmix64(seed) + position // 2 * _GOLDEN_GAMMA",
        SAMPLING,
    ),
    Mutant(
        "noise is not kept from being infinite",
        "paceline/core/noise.py",
        ".clamp_(min=2.0**-24 - 1)",
        "",
        SAMPLING,
    ),
    Mutant(
        "a token that is not allowed may be drawn",
        "paceline/core/logits_rules.py",
        "logits_V.masked_fill(self._disallowed, MASKED)",
        "logits_V - self._disallowed.float()",
        SAMPLING,
    ),
    Mutant(
        "every row has the first one's temperature",
        "paceline/core/sampling.py",
        "return [max(row.params.temperature, LOWEST_TEMPERATURE) for row in rows]",
        "return [max(rows[0].params.temperature, LOWEST_TEMPERATURE) for row in rows]",
        SAMPLING,
    ),
    Mutant(
        "logits count relative to the largest of all rows",
        "paceline/core/sampling.py",
        "logits_RV -= logits_RV.amax(-1, keepdim=True)",
        "logits_RV -= logits_RV.amax()",
        SAMPLING,
    ),
    Mutant(
        "top_k keeps one more",
        "paceline/core/sampling.py",
        "logits_RV.topk(top_k).values[:, -1:]",
        "logits_RV.topk(top_k + 1).values[:, -1:]",
        SAMPLING,
    ),
    Mutant(
        "top_p leaves out the token that reaches it",
        "paceline/core/sampling.py",
        "kept_R1 = (mass_RK < enough).sum(-1, keepdim=True).clamp(",
        "kept_R1 = (mass_RK < enough).sum(-1, keepdim=True).sub(1).clamp(min=0, ",
        SAMPLING,
    ),
    Mutant(
        "penalties do not see the guesses on the way",
        "paceline/core/logits_rules.py",
        "seen_V, counts_V = self._token_counts(path)",
        "seen_V, counts_V = self._token_counts(())",
        (*SAMPLING, *API),
    ),
    Mutant(
        "min_tokens does not count the guesses on the way",
        "paceline/core/logits_rules.py",
        "if self.output_tokens + len(path) < self.params.min_tokens:",
        "if self.output_tokens < self.params.min_tokens:",
        SAMPLING,
    ),
    Mutant(
        "bad words do not see the guesses on the way",
        "paceline/core/logits_rules.py",
        "last = self._recent_with(path)",
        "last = self._recent_with(())",
        SAMPLING,
    ),
    Mutant(
        "a shortlist's noise is that of places, not of tokens",
        "paceline/core/sampling.py",
        "scores_RK = _scored(logits_RK, rows, tokens_RK)",
        "scores_RK = _scored(logits_RK, rows, torch.arange(tokens_RK.shape[-1], device=tokens_RK.device))",
        SAMPLING,
    ),
    Mutant(
        "a token that could still win gets no noise",
        "paceline/core/sampling.py",
        "ROUNDING_MARGIN = 1.001",
        "ROUNDING_MARGIN = 0.9",
        SAMPLING,
    ),
    Mutant(
        "of equal scores the last id wins",
        "paceline/core/sampling.py",
        "winners = np.flatnonzero(scores_N == best_R[rows_N])[::-1]",
        "winners = np.flatnonzero(scores_N == best_R[rows_N])",
        SAMPLING,
    ),
    # Grammars, and grammars behind reasoning.
    Mutant(
        "a draft token advances the parser of the committed text",
        "paceline/grammar/matcher.py",
        "parser = self.parser.deep_copy()",
        "parser = self.parser",
        GRAMMAR,
    ),
    Mutant(
        "a grammar begins one token before the end of the reasoning's marker",
        "paceline/grammar/reasoning_matcher.py",
        "if last == self.closing:",
        "if last == self.closing[: max(1, len(self.closing) - 1)]:",
        REASONING,
    ),
    Mutant(
        "a stop token may be drawn inside the reasoning",
        "paceline/grammar/reasoning_matcher.py",
        "mask[list(stops)] = False",
        "mask[list(stops)] = True",
        REASONING,
    ),
    Mutant(
        "a resumed request finds the end of its reasoning one token late",
        "paceline/grammar/reasoning_gate.py",
        "return next((end for end in ends",
        "return next((end + 1 for end in ends",
        REASONING,
    ),
    Mutant(
        "reasoning may begin at any token of the output",
        "paceline/grammar/reasoning_gate.py",
        "return self.opening if self.closing and not output else None",
        "return self.opening if self.closing else None",
        REASONING,
    ),
    # Strategies that depend on guesses.
    Mutant(
        "a guess is refused by the inverse ratio",
        "paceline/core/strategies/residual.py",
        "if not u * link.draft_probs[link.token] < link.target_probs[link.token]:",
        "if not u * link.target_probs[link.token] < link.draft_probs[link.token]:",
        RESIDUAL,
    ),
    Mutant(
        "a refused guess is replaced by a draw from the target's whole law",
        "paceline/core/strategies/residual.py",
        "left_NV[rows, tokens] -= like(",
        "left_NV[rows, tokens] -= 0 * like(",
        RESIDUAL,
    ),
    Mutant(
        "all guesses of a chain are tested by one uniform number",
        "paceline/core/strategies/residual.py",
        "noise_key(root.params.seed, NoisePurpose.ACCEPT, root.position, depth)",
        "noise_key(root.params.seed, NoisePurpose.ACCEPT, root.position)",
        RESIDUAL,
    ),
    Mutant(
        "a block's running weight is not kept below 1",
        "paceline/core/strategies/block_verification.py",
        "weight = min(1, weight * link.target_probs[link.token] / link.draft_probs[link.token])",
        "weight = weight * link.target_probs[link.token] / link.draft_probs[link.token]",
        RESIDUAL,
    ),
    Mutant(
        "typical acceptance takes the larger of its two thresholds",
        "paceline/core/strategies/lossy.py",
        ".clamp(max=self._threshold)",
        ".clamp(min=self._threshold)",
        LOSSY,
    ),
    Mutant(
        "of admitted paths the first counts, not the most probable",
        "paceline/core/strategies/lossy.py",
        "log_prob + math.log(accepted_probs[node])",
        "log_prob",
        LOSSY,
    ),
    # Attention and rows: what a row sees.
    Mutant(
        "a row sees one key too many",
        "paceline/model/attention.py",
        "seen = columns <= reach\n",
        "seen = columns <= reach + 1\n",
        ROWS,
    ),
    Mutant(
        "a request runs on a target without its labels",
        "services/gateway/routing/fleet.py",
        "if target.usable and needed.issubset(target.capabilities)",
        "if target.usable",
        ("contract/test_target_labels.py",),
    ),
    Mutant(
        "a request that moves to another draft sends it commits from before its opening",
        "paceline/engine/draft_manager.py",
        "            request.held_commits.clear()  # the opening has their tokens\n",
        "",
        ENGINE,
    ),
    Mutant(
        "a paused draft is resumed before it has the commits that were held back",
        "paceline/engine/draft_manager.py",
        """        self._send_held(request)
        self._draft_client.limit(""",
        "        self._draft_client.limit(",
        ENGINE,
    ),
    Mutant(
        "without native code one float32 row alone is summed in another order",
        "paceline/model/layers.py",
        "torch.cat([x, x]) if len(x) == 1 and x.dtype == torch.float32 else x",
        "x",
        ("exactness/test_row_invariant_linear.py",),
    ),
    Mutant(
        "without native code a product sums by its number of rows",
        "paceline/model/layers.py",
        "return partial(chunked_product, product)",
        "return lambda x: F.linear(x, weight, bias)",
        ("exactness/test_row_invariant_linear.py",),
    ),
    Mutant(
        "a window in the last tile is one position too long",
        "paceline/model/attention.py",
        "seen &= columns > reach - window",
        "seen &= columns >= reach - window",
        ROWS,
    ),
    Mutant(
        "a window in the prefix is one position too long",
        "paceline/model/attention.py",
        "<= newest_hidden",
        "< newest_hidden",
        ROWS,
    ),
    Mutant(
        "weights of the two parts depend on how many rows there are",
        "paceline/model/attention.py",
        "return function(*(F.pad(vector, (0, -size % VECTOR_WIDTH)) for vector in vectors))[:size]",
        "return function(*vectors)",
        ROWS,
    ),
    Mutant(
        "sinks take no part of the softmax",
        "paceline/model/attention.py",
        "share = _elementwise(torch.sigmoid, weight - sinks.float().repeat(len(weight) // len(sinks)))",
        "share = torch.ones_like(weight)",
        ROWS,
    ),
    Mutant(
        "padding rows write where masked columns point",
        "paceline/model/rows.py",
        "[padding_slot] * padding",
        "[NULL_SLOT] * padding",
        ROWS,
    ),
    Mutant(
        "flash-attn: a window is one position too long",
        "paceline/model/paged_attention.py",
        "first = max(0, row.position + 1 - window) if window else 0",
        "first = max(0, row.position - window) if window else 0",
        FLASH,
    ),
    Mutant(
        "flash-attn: rows without a prefix take its log-sum-exp",
        "paceline/model/paged_attention.py",
        "torch.where(tables.has_prefix, prefix_weight.T, -torch.inf)",
        "prefix_weight.T",
        FLASH,
    ),
    Mutant(
        "flash-attn: sums are split by the number of rows",
        "paceline/model/paged_attention.py",
        "num_splits=1,\n",
        "num_splits=0,\n",
        FLASH,
    ),
    Mutant(
        "a wait ends with the growth of an earlier tree",
        "paceline/engine/draft_manager.py",
        "or self.grafted > grafted or self._clock() >= end:",
        "or True:",
        ("unit/test_vllm_drafts.py",),
    ),
    Mutant(
        "a draft in this process runs rounds until it guesses what lookups did not",
        "paceline/engine/draft_manager.py",
        "if not self._draft_client.concurrent or self.grafted > grafted",
        "if self.grafted > grafted",
        ("unit/test_draft_schedule.py",),
    ),
    Mutant(
        "vLLM: a step that was slow by chance counts as lost to drafts",
        "paceline/vllm/pooled_drafts.py",
        "seconds = self._cost(self._proposed_rows, nodes) + self._returned_at - self._called_at",
        "seconds = called_at - self._called_at",
        ("unit/test_vllm_drafts.py",),
    ),
    Mutant(
        "without measured passes nothing is learned of a step",
        "paceline/core/policy/step_cost.py",
        "if not usual_s and self.passes is NOT_MEASURED:",
        "if usual_s and self.passes is NOT_MEASURED:",
        ("unit/test_step_cost.py",),
    ),
    Mutant(
        "Triton: a larger score leaves earlier sums as they are",
        "paceline/model/triton_attention.py",
        "result = result * kept[:, None] + tl.dot(",
        "result = result + tl.dot(",
        TRITON,
    ),
    Mutant(
        "Triton: slots after the end of a path are seen",
        "paceline/model/triton_attention.py",
        'score = tl.where(seen[None, :], score, -float("inf"))',
        "score = score + 0.0",
        TRITON,
    ),
    Mutant(
        "Triton: a program has the rows of the next sequence",
        "paceline/model/triton_attention.py",
        "is_query = query_of < count * QUERIES_PER_KV",
        "is_query = query_of < count * QUERIES_PER_KV + 1",
        TRITON,
    ),
    Mutant(
        "a CUDA graph keeps the runs of an earlier pass",
        "paceline/model/paged_attention.py",
        "        self.run_starts.fill_(len(self.tails))\n",
        "",
        FLASH,
    ),
    Mutant(
        "a CUDA graph keeps the tails of an earlier pass",
        "paceline/model/paged_attention.py",
        "            (self.tails, other.tails),\n",
        "",
        FLASH,
    ),
    Mutant(
        "a CUDA graph has fewer rows than the pass",
        "paceline/model/pass_graphs.py",
        "if size >= len(rows)",
        "if size >= len(rows) - 1",
        FLASH,
    ),
    Mutant(
        "arguments of attention that are not known are swallowed",
        "paceline/model/attention.py",
        "if given is not None and name not in IGNORED_ARGUMENTS):",
        "if given is not None and name not in IGNORED_ARGUMENTS and False):",
        ROWS,
    ),
    Mutant(
        "rotary frequencies follow the longest sequence of a pass",
        "paceline/model/loading.py",
        "    fix_rope_frequencies(network, max_model_len)\n",
        "",
        ("exactness/test_rope.py",),
    ),
    Mutant(
        "a model that attends elsewhere is accepted",
        "paceline/model/decoder.py",
        "if sorted(attended) != list(range(self.layers)):",
        "if False:",
        ("exactness/test_architectures.py",),
    ),
    Mutant(
        "a model is accepted whatever it computes beside another request",
        "paceline/model/decoder.py",
        """(" beside another request", guessed, expected.logits[half:])""",
        """(" beside another request", expected.logits[half:], expected.logits[half:])""",
        ("exactness/test_architectures.py", "unit/test_loading.py"),
    ),
    Mutant(
        "native code is not compared with transformers on --verify either",
        "paceline/model/decoder.py",
        "if isinstance(made, NativeNetwork) and not verify:",
        "if isinstance(made, NativeNetwork):",
        ("unit/test_loading.py",),
    ),
    Mutant(
        "one stalled pass makes a point of the curve",
        "paceline/core/policy/learned_row_cost.py",
        "if known is None and seconds > self(rows):",
        "if False:",
        ("unit/test_kept_row_cost.py",),
    ),
    Mutant(
        "rows of one group see what comes after them",
        "paceline/model/rows.py",
        "reach.append([len(tails[r]) - 1 for r in members])",
        "reach.append([len(longest) - 1 for r in members])",
        ROWS,
    ),
    Mutant(
        "a truncated path keeps a prefix of what was taken back",
        "paceline/model/rows.py",
        "del self._prefixes[length // TILE + 1 :]",
        "del self._prefixes[length // TILE + 2 :]",
        (*ROWS, "unit/test_draft_model.py", "unit/test_hidden_states.py"),
    ),
    # Native code: the same questions, and what threads and memory may do.
    Mutant(
        "native: a row sees one key too many",
        "paceline/model/native/attention.hpp",
        "(position < queries[i].visible.end)",
        "(position <= queries[i].visible.end)",
        NATIVE,
    ),
    Mutant(
        "native: a window is one position too long",
        "paceline/model/native/rows.hpp",
        "end > window ? end - window : 0",
        "end > window ? end - window - 1 : 0",
        NATIVE,
    ),
    Mutant(
        "native: a branch is read from the request's table",
        "paceline/model/native/rows.hpp",
        "return !rows.branch_lengths[r] || rows.prefix_lengths[r] >= (tile + 1) * KEY_TILE;",
        "return rows.prefix_lengths[r] > tile * KEY_TILE;",
        NATIVE,
    ),
    Mutant(
        "native: a key goes to the slot before its own",
        "paceline/model/native/rows.hpp",
        "return slot(row, length(row) - 1);",
        "return slot(row, std::max(length(row) - 2, 0));",
        NATIVE,
    ),
    Mutant(
        "native: a part may be claimed twice",
        "paceline/model/native/thread_pool.hpp",
        "if (!claimed_[part].value.compare_exchange_strong(free, phase + 1, std::memory_order_acq_rel)) continue;",
        "claimed_[part].value.store(free + 1, std::memory_order_release);",
        NATIVE,
    ),
    Mutant(
        "native: a block is worth the scale of the other block of its unit",
        "paceline/model/native/packed.hpp",
        "s.scale[0] = number(p + 32 * b);",
        "s.scale[0] = number(p + 32 * (1 - b));",
        QUANTISED,
    ),
    Mutant(
        "native: the halves of a byte are swapped",
        "paceline/model/native/blocks.hpp",
        "codes[i] = from[i] & 15, codes[i + COUNT] = from[i] >> 4;",
        "codes[i] = from[i] >> 4, codes[i + COUNT] = from[i] & 15;",
        QUANTISED,
    ),
    Mutant(
        "native: with several rows a product's last step rounds twice",
        "paceline/model/native/packed.hpp",
        "sums[r] = add_block<L>(sums[r], dots, s, floats[r], floats[R + r], integers + R + r, R);",
        "sums[r] = (R > 1 ? sums[r] : Floats{}) + add_block<L>(R > 1 ? Floats{} : sums[r], dots, s, floats[r], "
        "floats[R + r], integers + R + r, R);",
        QUANTISED,
    ),
    Mutant(
        "native: bytes above 127 saturate where there is no instruction for dot products",
        "paceline/model/native/packed.hpp",
        "        if constexpr (IS_WIDE) {\n            const __m256i top",
        "        if constexpr (false) {\n            const __m256i top",
        QUANTISED,
    ),
    Mutant(
        "a layer of another kind than Llama adds what is not normed",
        "paceline/model/native/network.hpp",
        "norm_row(&partial_[(size_t)row * hidden_], norm, row_sum);",
        "norm_row(&partial_[(size_t)row * hidden_], {}, row_sum);",
        ("exactness/test_gguf_model.py",),
    ),
    Mutant(
        "sliding layers of a packed model rotate as full ones do",
        "paceline/model/gguf_model.py",
        "return [tables[kind] for kind in kinds]",
        "return [tables[kinds[-1]] for _ in kinds]",
        ("exactness/test_gguf_model.py",),
    ),
    Mutant(
        "the third of the matrices in one begins where the second does",
        "paceline/model/gguf_model.py",
        "start = sum(sizes[other] for other in before[: before.index(field)])",
        "start = sum(sizes[other] for other in before[: before.index(field)][:1])",
        ("exactness/test_gguf_model.py",),
    ),
    Mutant(
        "native: a layer gets the weights of the one before",
        "paceline/model/native/native_network.py",
        "self._give(self._layers[self._done])",
        "self._give(self._layers[self._done - 1])",
        PACKED_FOLDERS,
    ),
    Mutant(
        "matrices packed at load have codes by the scale of the first block",
        "paceline/model/block_quantization.py",
        "inverse = torch.where(scale == 0, 0, 1 / scale)",
        "inverse = torch.where(scale == 0, 0, 1 / scale[:, :1])",
        PACKED_FOLDERS,
    ),
    Mutant(
        "packed layers that slide see all positions",
        "paceline/model/packed_checkpoint.py",
        "[window_of(layer) for layer in base.layers]",
        "[0 for layer in base.layers]",
        PACKED_FOLDERS,
    ),
    Mutant(
        "packed rows of q and k stay in the file's order",
        "paceline/model/gguf_weights.py",
        "tensor.data if source.change is Change.NONE else tensor.data[self._row_order(source.change)]",
        "tensor.data",
        QUANTISED,
    ),
    Mutant(
        "Gemma's norms keep the one that a GGUF file adds",
        "paceline/model/gguf_weights.py",
        "return tensor - 1\n",
        "return tensor\n",
        DEQUANTISED,
    ),
    Mutant(
        "rows of q and k of a dequantised llama file stay in the file's order",
        "paceline/model/gguf_weights.py",
        "return tensor[torch.from_numpy(self._row_order(change))]",
        "return tensor",
        DEQUANTISED,
    ),
    Mutant(
        "rows of k are put in order by the number of query heads",
        "paceline/gguf/gguf_names.py",
        'Rule(("attn_k",), "KH", Change.KEY_ROWS)',
        'Rule(("attn_k",), "KH", Change.QUERY_ROWS)',
        DEQUANTISED,
    ),
    Mutant(
        "columns of gpt-oss' gates and inputs follow each other",
        "paceline/model/gguf_weights.py",
        "return torch.stack(columns, dim=-1).flatten(-2)",
        "return torch.cat(columns, dim=-1)",
        DEQUANTISED,
    ),
    Mutant(
        "a tensor of a wrong shape in a GGUF file passes",
        "paceline/gguf/gguf_names.py",
        "if shape != expected:",
        "if len(shape) != len(expected):",
        DEQUANTISED,
    ),
    Mutant(
        "Gemma's largest model scales queries like the others",
        "paceline/gguf/gguf_config.py",
        'return int(config["hidden_size"] // config["num_attention_heads"])',
        'return int(config["head_dim"])',
        DEQUANTISED,
    ),
    Mutant(
        "native: a phase begins before the one before has ended",
        "paceline/model/native/thread_pool.hpp",
        "int64_t phase = ended_.value.load(std::memory_order_acquire) / parts_;",
        "int64_t phase = (ended_.value.load(std::memory_order_acquire) + parts_ - 1) / parts_;",
        NATIVE,
    ),
    Mutant(
        "native: the order of a sum depends on how many rows there are",
        "paceline/model/native/matrix.hpp",
        "const uint32_t* w = panel.weights;\n        const uint32_t* asked = w + ahead.words;\n"
        "        for (int i = 0; i < words_; i++, w += BLOCKS * LANES, asked += ahead.blocks * LANES) {",
        "const uint32_t* asked = panel.weights;\n        for (int n = 0; n < words_; n++) {\n"
        "            int i = ROWS > 1 ? words_ - 1 - n : n;\n"
        "            const uint32_t* w = panel.weights + (size_t)i * BLOCKS * LANES;",
        NATIVE,
    ),
    Mutant(
        "native: noise of another token decides whether a token can win",
        "paceline/model/native/draw_candidates.hpp",
        "mixed(numbers + (uint32_t)token, first, second)",
        "mixed(numbers + (uint32_t)token + 1u, first, second)",
        ("exactness/test_sampling.py",),
    ),
    Mutant(
        "native: a sink has a value",
        "paceline/model/native/attention.hpp",
        "if (sink) totals_[index] += ",
        "if (sink) totals_[index] += 0 * ",
        ROWS,
    ),
    Mutant(
        "native: rows attend before keys are stored",
        "paceline/model/native/layer_attention.hpp",
        "if (phase == STORE)",
        "if (phase == ATTEND)",
        ROWS,
    ),
    Mutant(
        "native: attention forgets that scores are squashed",
        "paceline/model/native/native_attention.py",
        "_NativeOptions(options.scale, options.softcap, options.window,",
        "_NativeOptions(options.scale, 0.0, options.window,",
        ROWS,
    ),
    # The scheduler and its slots.
    Mutant(
        "guesses take more rows than the step has left",
        "paceline/engine/scheduler.py",
        "most = min(rows, self.pool.free)",
        "most = self.pool.free",
        SCHEDULER,
    ),
    Mutant(
        "the first requests' guesses get the rows, not the likeliest",
        "paceline/engine/scheduler.py",
        "if not slots or path_log_probs[node] < least:",
        "if not slots:",
        SCHEDULER,
    ),
    Mutant(
        "the oldest request gives way, not the youngest",
        "paceline/engine/scheduler.py",
        "own = (each for each in reversed(requests) if each.client == client)",
        "own = (each for each in requests if each.client == client)",
        SCHEDULER,
    ),
    Mutant(
        "a client's priorities come before another client's turn",
        "paceline/engine/scheduler.py",
        "return min(own, key=lambda each: (each.priority, groups[each.group]))",
        "return min(self.waiting, key=lambda each: (each.priority, groups[each.group]))",
        SCHEDULER,
    ),
    Mutant(
        "a draft that asks for hidden states gets none of what was computed before",
        "paceline/engine/engine.py",
        "        self._scheduler.recompute_all()\n",
        "",
        ("unit/test_engine.py",),
    ),
    Mutant(
        "who waits takes the place of somebody who has one more",
        "paceline/engine/scheduler.py",
        "clients[each.client] > clients[request.client] + 1",
        "clients[each.client] > clients[request.client]",
        SCHEDULER,
    ),
    Mutant(
        "a request whose logits are not finite goes on",
        "paceline/engine/engine.py",
        "if not is_finite(output.logits):",
        "if False:",
        ("unit/test_engine.py",),
    ),
    Mutant(
        "a prompt with logits that are not finite is scored",
        "paceline/engine/engine.py",
        "prompt_is_finite = is_finite(prompt_part)",
        "prompt_is_finite = True",
        ("unit/test_prompt_only.py",),
    ),
    Mutant(
        "the scores of a prompt are shifted by one",
        "paceline/engine/prompt_scores.py",
        "tokens = request.tokens[rows.start + 1 : rows.stop + 1]",
        "tokens = request.tokens[rows.start : rows.stop]",
        SCORES,
    ),
    Mutant(
        "a cached block that was never scored is not computed again",
        "paceline/engine/request.py",
        "computed = self.rows_scored if self.rows_to_score else len(self.tokens) - 1",
        "computed = len(self.tokens) - 1",
        SCORES,
    ),
    Mutant(
        "a preempted request scores its prompt from the beginning again",
        "paceline/engine/prompt_scores.py",
        "    request.rows_scored = rows.stop\n",
        "",
        SCORES,
    ),
    Mutant(
        "requests draw from the rows that score prompts",
        "paceline/engine/engine.py",
        "self.model.run(rows, [*sampled, *scored], self.hidden_layers)",
        "self.model.run(rows, [*scored, *sampled], self.hidden_layers)",
        SCORES,
    ),
    Mutant(
        "a step that computes prompts counts as one that only draws",
        "paceline/engine/scheduler.py",
        "all(request.uncomputed_tokens == 1 for request in self.running)",
        "all(request.uncomputed_tokens >= 1 for request in self.running)",
        (*SCHEDULER, "unit/test_draft_schedule.py"),
    ),
    Mutant(
        "a request finds the cached blocks of requests with another salt",
        "paceline/engine/slot_pool.py",
        "before: int | str = salt",
        'before: int | str = ""',
        ("unit/test_isolation.py", *SCHEDULER),
    ),
    # The node codec.
    Mutant(
        "a log-probability is rounded down, not to the nearest level",
        "paceline/wire/node_codec.py",
        "log_probability((low + high) / 2)",
        "log_probability(high)",
        CODEC,
    ),
    Mutant(
        "a step back to the next id but one is not taken",
        "paceline/wire/node_codec.py",
        "distance -= zero > form",
        "distance -= 0",
        CODEC,
    ),
    Mutant(
        "bits after the last node are not looked at",
        "paceline/wire/node_codec.py",
        'if "1" in digits[offset:]:',
        'if "2" in digits[offset:]:',
        CODEC,
    ),
    Mutant(
        "a growth may hold one node more than it may",
        "paceline/wire/node_codec.py",
        "    for _ in range(max_nodes):",
        "    for _ in range(max_nodes + 1):",
        CODEC,
    ),
    # The end of a request, and its text.
    Mutant(
        "a token after the stop string counts",
        "paceline/output_processor.py",
        "delta.tokens, delta.accepted = tokens[:count], delta.accepted[:count]",
        "delta.tokens, delta.accepted = tokens[: count + 1], delta.accepted[:count]",
        OUTPUT,
    ),
    Mutant(
        "log-probabilities are not cut at a stop string",
        "paceline/output_processor.py",
        "delta.log_probs = delta.log_probs[:count]",
        "delta.log_probs = delta.log_probs[:]",
        OUTPUT,
    ),
    Mutant(
        "a stop string ends the request before min_tokens",
        "paceline/output_processor.py",
        "return text if self._tokens < self._request.sampling.min_tokens else",
        "return text if self._tokens < 0 else",
        OUTPUT,
    ),
    Mutant(
        "of several stop strings the first in the list counts, not the first in the text",
        "paceline/text/stop_strings.py",
        "_, at, self.found = min(ends)",
        "_, at, self.found = ends[0]",
        STOPS,
    ),
    Mutant(
        "the beginning of a stop string is shown at once",
        "paceline/text/stop_strings.py",
        "shown = len(text) - self._undecided(text)",
        "shown = len(text)",
        STOPS,
    ),
    Mutant(
        "a stop token inside an accepted run does not end the request",
        "paceline/engine/request.py",
        "if token in stops or count >= tokens_left:",
        "if count >= tokens_left:",
        ENGINE,
    ),
    Mutant(
        "tokens behind the end of a grammar are kept",
        "paceline/engine/request.py",
        "return list(tokens[:count]), reason",
        "return list(tokens), reason",
        ENDS,
    ),
    Mutant(
        "a whole delta counts as reasoning if its end is",
        "paceline/output_processor.py",
        "            delta.reasoning_tokens += self._parser is not None and self._parser.in_reasoning\n",
        "            delta.reasoning_tokens = len(tokens) * (self._parser is not None and self._parser.in_reasoning)\n",
        ENDS,
    ),
    Mutant(
        "a request gets one token more than max_tokens",
        "paceline/engine/request.py",
        "if token in stops or count >= tokens_left:",
        "if token in stops or count > tokens_left:",
        ENGINE,
    ),
    Mutant(
        "a block of the prefix cache is found without its predecessor",
        "paceline/engine/slot_pool.py",
        "            before = block.serial\n        return found",
        "        return found",
        ("unit/test_slot_pool.py", "unit/test_engine.py"),
    ),
    # Policy: what a guess is worth.
    Mutant(
        "calibration does not tell ranks apart",
        "paceline/core/policy/calibration.py",
        "cell = (i * self.RANKS + rank) * self.DEPTH_COUNT",
        "cell = (i * self.RANKS) * self.DEPTH_COUNT",
        POLICY,
    ),
    # Between services.
    Mutant(
        "a replay forgets the committed tokens",
        "services/gateway/failover.py",
        "replace(self._request, committed=tuple(self._committed))",
        "replace(self._request, committed=())",
        GATEWAY,
    ),
    Mutant(
        "a target that takes over repeats the prompt's log-probabilities",
        "services/gateway/scored_prompt.py",
        "parts.append(PromptLogProbs(self._next, part.entries[known:]))",
        "parts.append(part)",
        ("contract/test_evaluation.py",),
    ),
    Mutant(
        "a request goes to a target that ignores what it asks for",
        "services/gateway/openai/request_builder.py",
        "needed_capabilities=labels | features",
        "needed_capabilities=labels",
        ("contract/test_evaluation.py",),
    ),
    Mutant(
        "a request under which engine after engine dies is submitted again",
        "services/gateway/failover.py",
        "if self._engine_deaths > MAX_ENGINE_DEATHS:",
        "if self._engine_deaths > 100 * MAX_ENGINE_DEATHS:",
        GATEWAY,
    ),
    Mutant(
        "a replay does not ask for the numerics of the lost target",
        "services/gateway/failover.py",
        "self._numerics = target.numerics\n",
        "self._numerics = None\n",
        ("contract/test_openai_routing.py", "contract/test_openai_life.py"),
    ),
    Mutant(
        "routing does not count what a target has cached",
        "services/gateway/routing/worker_selection.py",
        "own = max(1, prompt_tokens - candidate.cached)",
        "own = max(1, prompt_tokens)",
        ("unit/test_worker_selection.py", "contract/test_openai_routing.py"),
    ),
    Mutant(
        "any key opens the gateway",
        "services/gateway/auth.py",
        "if hmac.compare_digest(known, presented):",
        "if known:",
        ("contract/test_keys.py",),
    ),
    Mutant(
        "a draft may send any number of nodes",
        "paceline/wire/draft_stream.py",
        "if self.nodes_left < 0:",
        "if self.nodes_left < -(2**40):",
        ("failure/test_draft_links.py",),
    ),
    Mutant(
        "committed tokens are not sent with a replayed request",
        "paceline/wire/target_codec.py",
        "            committed_token_ids=request.committed,\n",
        "",
        ("contract/test_frames.py", "exactness/test_wire.py"),
    ),
    # Inside vLLM.
    Mutant(
        "coupled draws accept drafts that were not drawn",
        "paceline/vllm/coupled_draws.py",
        "common_prefix_length(draft, tokens[start : start + len(draft)])",
        "len(draft)",
        ("unit/test_coupled_draws.py",),
    ),
    Mutant(
        "coupled draws after a draft token have the noise of the position before",
        "paceline/vllm/coupled_draws.py",
        "SamplingRow(state.params, position + depth, state.history, draft[:depth])",
        "SamplingRow(state.params, position, state.history, draft[:depth])",
        ("unit/test_coupled_draws.py",),
    ),
    Mutant(
        "coupled draws do not see the draft tokens before them",
        "paceline/vllm/coupled_draws.py",
        "SamplingRow(state.params, position + depth, state.history, draft[:depth])",
        "SamplingRow(state.params, position + depth, state.history)",
        ("unit/test_coupled_draws.py",),
    ),
    Mutant(
        "vLLM's draws count committed tokens as prompt",
        "paceline/vllm/coupled_draws.py",
        "start = len(prompt) - extra.committed",
        "start = len(prompt)",
        ("unit/test_coupled_draws.py",),
    ),
    Mutant(
        "a forced token is one place late",
        "paceline/vllm/coupled_draws.py",
        "state.extra.forced[output_tokens:]",
        "state.extra.forced[output_tokens + 1 :]",
        ("unit/test_coupled_draws.py",),
    ),
    Mutant(
        "a fault of the drafts ends vLLM",
        "paceline/vllm/pooled_drafts.py",
        "            except Exception:\n",
        "            except ZeroDivisionError:\n",
        ("unit/test_vllm_drafts.py",),
    ),
    Mutant(
        "drafts inside vLLM are not told a request's salt",
        "paceline/vllm/pooled_drafts.py",
        "cache_salt=row_of.cache_salt",
        'cache_salt=""',
        ("unit/test_vllm_drafts.py",),
    ),
    Mutant(
        "a row is taken for one of another salt",
        "paceline/vllm/batch.py",
        "cache_salt == self.generation_request.cache_salt",
        "True",
        ("unit/test_vllm_drafts.py",),
    ),
    # Resumption: what a client has and what it gets add up to the undisturbed stream.
    Mutant(
        "resumption drops one event too few",
        "services/gateway/http/resumption.py",
        "if number > journal.seen:",
        "if number >= journal.seen:",
        RESUMING,
    ),
    Mutant(
        "a stream that was resumed elsewhere is appended to",
        "paceline/state/redis_records.py",
        "if length == position then",
        "if length == position or position > 0 and length > 0 then",
        RESUMING,
    ),
    Mutant(
        "a repeated append is refused",
        "paceline/state/redis_records.py",
        "elseif count > 0 and redis.call('LINDEX', key, position) == ARGV[first] then",
        "elseif false then",
        ("unit/test_state.py",),
    ),
    Mutant(
        "a resumed request forgets the tokens of its earlier gateway",
        "services/gateway/failover.py",
        "            self._committed += delta.tokens\n            self._numerics",
        "            self._numerics",
        RESUMING,
    ),
    Mutant(
        "a resumed request goes to a target with any numerics",
        "services/gateway/failover.py",
        "self._numerics = delta.numerics if delta.tokens else self._numerics",
        "self._numerics = None",
        RESUMING,
    ),
    Mutant(
        "a resumed request draws another seed",
        "services/gateway/openai/request_builder.py",
        '_drawn_seed(f"{base.request_id}-{first}")',
        '_drawn_seed(f"{base.request_id}-{first}-{id(base)}")',
        RESUMING,
    ),
    Mutant(
        "a resumed request has the id of its earlier attempt at the target",
        "services/gateway/failover.py",
        'f"{request.request_id}.{request.attempt}" if request.attempt else request.request_id',
        "request.request_id",
        RESUMING,
    ),
    Mutant(
        "a prompt that has changed is resumed",
        "services/gateway/journal.py",
        'if self.digest not in ("", digest):',
        "if False:",
        RESUMING,
    ),
    Mutant(
        "clients may resume after an id behind which the journal has lost tokens",
        "services/gateway/journal.py",
        'return "" if self.position else None',
        "return None",
        RESUMING,
    ),
    Mutant(
        "resumption misses events that are sent before they are in the journal",
        "services/gateway/journal.py",
        "await self._append([self._entry(each) for each in batch if each.new], model)",
        "asyncio.ensure_future(self._append([self._entry(each) for each in batch if each.new], model))",
        RESUMING,
    ),
    Mutant(
        "a client resumes any client's stream",
        "services/gateway/http/resumption.py",
        "client = client_of(request).name\n",
        'client = ""\n',
        RESUMING,
    ),
    Mutant(
        "an owner does not see that its response is cancelled elsewhere",
        "services/gateway/journal.py",
        'if "cancel" in entry:',
        'if "cancelled" in entry:',
        ("contract/test_background.py",),
    ),
)
