// One sequence of verify: score positions in order until one is rejected, then emit the recovered or bonus token.

// What the token that ends the round is drawn from.
enum class Draw { TARGET, TARGET_WITHOUT, RESIDUAL };

struct Score {
  bool accepted;
  double accept_prob;
  int32_t bits;
  Draw draw;
  int64_t removed;  // the token that TARGET_WITHOUT leaves out
};

// Divided by the sum of the largest vocabulary it is no subnormal number yet.
constexpr double LEAST_PROVEN = 1e-290;

static void measure_target(Round* round, int64_t index) {
  Sampled& target = round->target;
  target.row = target_row(*round, index);
  row_statistics(target.row, target.law, target.parameters, round->executor, round->workspace, nullptr,
                 &target.statistics);
}

static void measure_draft(Round* round, const AcceptProof* proof) {
  round->draft.statistics.shard_largest = round->workspace.draft_largest;
  row_statistics(round->draft.row, round->draft.law, round->draft.parameters, round->executor, round->workspace, proof,
                 &round->draft.statistics);
}

// Takes the draft row's statistics from its receipt and returns the probability of the column drawn.
static double read_receipt(Round* round, int64_t index, int64_t token) {
  const VerifyArguments& arguments = round->arguments;
  const double* receipt = arguments.receipt + round->sequence * arguments.receipt_stride_sequence +
                          (round->start + index) * arguments.receipt_stride_row;
  const int64_t stride = arguments.receipt_stride_field;
  RowStatistics& statistics = round->draft.statistics;
  const double value = receipt[0];
  statistics.row_max = receipt[stride];
  statistics.threshold = receipt[2 * stride];
  statistics.float_threshold = ceil_to_float(statistics.threshold);
  statistics.weight_sum = receipt[3 * stride];
  // Another logit than the row's own tells of another row or token; a mapped token may have several columns.
  const bool matches = arguments.draft_columns || value_at(round->draft.row, token) == value;
  statistics.valid = matches && statistics.weight_sum > 0.0;
  statistics.shard_largest = nullptr;
  if (!(value >= statistics.threshold)) return 0.0;
  return relative_weight(round->draft.law, value, statistics.row_max) / statistics.weight_sum;
}

static inline DraftColumns draft_columns(const Round& round) {
  return {round.arguments.draft_columns, round.arguments.draft_column_target_ids, round.arguments.draft_vocab};
}

// Probability of a token that several draft columns may stand for.
static double mapped_prob(Round* round, int64_t token) {
  // A receipt names no arg-max.
  if (round->draft.parameters.greedy && !round->draft.statistics.shard_largest) measure_draft(round, nullptr);
  const DraftColumns columns = draft_columns(*round);
  double prob = 0.0;
  for (int64_t entry = lower_bound(columns.target_ids, columns.count, token);
       entry < columns.count && columns.target_ids[entry] == token; ++entry) {
    prob += column_prob(round->draft, columns.columns[entry]);
  }
  return prob;
}

// Probability of the drafted token under its draft, or more if acceptance is proven; sets what a rejection draws from.
static double draft_prob(Round* round, int64_t index, int64_t token, double target_prob, Score* score) {
  const VerifyArguments& arguments = round->arguments;
  round->draft.statistics.valid = true;
  if (arguments.has_draft) round->draft.row = draft_row(*round, index);
  double prob = 1.0;
  if (arguments.receipt) {
    prob = read_receipt(round, index, token);
    if (arguments.draft_columns && round->draft.statistics.valid) prob = mapped_prob(round, token);
  } else if (arguments.draft_columns) {
    measure_draft(round, nullptr);
    if (round->draft.statistics.valid) prob = mapped_prob(round, token);
  } else if (arguments.has_draft) {
    const AcceptProof proof = {decision_uniforms(*round, index).accept, target_prob, value_at(round->draft.row, token)};
    measure_draft(round, arguments.returns_accept_probs || round->executor.run ? nullptr : &proof);
    const RowStatistics& statistics = round->draft.statistics;
    if (statistics.valid) {
      prob = token_prob(round->draft.row, round->draft.law, round->draft.parameters, statistics, token);
      // A partial sum may hide that the whole one leaves the token nothing.
      if (prob < LEAST_PROVEN) {
        measure_draft(round, nullptr);
        prob = token_prob(round->draft.row, round->draft.law, round->draft.parameters, statistics, token);
      }
    }
  }
  score->draw = arguments.has_draft ? Draw::RESIDUAL : Draw::TARGET_WITHOUT;
  score->removed = token;
  return prob;
}

static Score score_sampled(Round* round, int64_t index, int64_t token) {
  Score score = {false, 0.0, 0, Draw::TARGET, token};
  const Sampled& target = round->target;
  const double target_prob = token_prob(target.row, target.law, target.parameters, target.statistics, token);
  const double drafted_prob = draft_prob(round, index, token, target_prob, &score);
  if (!round->draft.statistics.valid) {
    score.bits = DRAFT_INVALID;
    score.accept_prob = __builtin_nan("");
    score.draw = Draw::TARGET;
    return score;
  }
  if (drafted_prob == 0.0) score.bits = DRAFT_TOKEN_IMPOSSIBLE;
  const bool covered = target_prob >= drafted_prob;
  // Multiplied, not divided, and strict: a uniform of 0 never accepts a token without target mass.
  const bool passes = covered || decision_uniforms(*round, index).accept * drafted_prob < target_prob;
  score.accepted = passes && target_prob > 0.0;
  score.accept_prob = covered ? (target_prob > 0.0 ? 1.0 : 0.0) : target_prob / drafted_prob;
  return score;
}

// Judges position `index` as if all before it had been accepted.
static Score score_position(Round* round, int64_t index) {
  measure_target(round, index);
  if (!round->target.statistics.valid) return {false, __builtin_nan(""), TARGET_INVALID, Draw::TARGET, -1};
  const int64_t token = drafted_token(*round, index);
  if (token < 0 || token >= round->arguments.vocab) {
    const int32_t bit = token == PLACEHOLDER_TOKEN_ID ? DRAFT_TOKEN_PLACEHOLDER : DRAFT_TOKEN_OUT_OF_RANGE;
    return {false, 0.0, bit, Draw::TARGET, -1};
  }
  if (round->target.parameters.greedy) {
    const bool accepted = token == round->target.statistics.argmax;
    return {accepted, accepted ? 1.0 : 0.0, 0, Draw::TARGET, -1};
  }
  return score_sampled(round, index, token);
}

// Draws the token that ends the round from the row measured last.
static int64_t draw_token(Round* round, const Score& score, double uniform) {
  const Sampled& target = round->target;
  if (score.draw == Draw::TARGET) return draw_from_row(target, uniform);
  double* masses = round->workspace.residual_mass;
  int64_t token = -1;
  if (score.draw == Draw::RESIDUAL && !round->draft.parameters.greedy) {
    token = draw_from_residual(target, round->draft, draft_columns(*round), uniform, round->executor, masses);
  } else {
    int64_t removed = score.removed;
    if (score.draw == Draw::RESIDUAL) {
      // A greedy draft is one-hot at its arg-max, which a receipt does not name.
      if (!round->draft.statistics.shard_largest) measure_draft(round, nullptr);
      removed = target_id_of(draft_columns(*round), round->draft.statistics.argmax);
    }
    token = draw_without(target, removed, uniform, masses);
  }
  if (token >= 0) return token;
  round->status |= RESIDUAL_EMPTY;
  return draw_from_row(target, uniform);
}

static void write_token(const Round& round, int64_t index, int64_t token) {
  const VerifyArguments& arguments = round.arguments;
  const int64_t offset = round.sequence * (arguments.gamma + 1) + index;
  arguments.token_ids[offset] = token;
  if (!arguments.logprobs) return;
  const Sampled& target = round.target;
  arguments.logprobs[offset] =
      static_cast<float>(token_log_prob(target.row, target.law, target.parameters, target.statistics, token));
}

// Emits from the target row measured last, unless it is invalid.
static void emit_token(Round* round, int64_t index, const Score& score) {
  round->arguments.num_accepted[round->sequence] = index;
  round->arguments.num_emitted[round->sequence] = index;
  if (!round->target.statistics.valid) {
    round->status |= TARGET_INVALID;
    return;
  }
  write_token(*round, index, draw_token(round, score, decision_uniforms(*round, index).emission));
  round->arguments.num_emitted[round->sequence] = index + 1;
}

static void decide(Round* round) {
  const bool scores_all = round->arguments.returns_accept_probs;
  bool open = true;
  double running = 1.0, expected = 0.0;
  for (int64_t index = 0; index < round->length && (open || scores_all); ++index) {
    const Score score = score_position(round, index);
    if (scores_all) {
      round->arguments.accept_probs[round->sequence * round->arguments.gamma + index] =
          static_cast<float>(score.accept_prob);
      // NaN counts as a certain rejection.
      running *= score.accept_prob > 0.0 ? score.accept_prob : 0.0;
      expected += running;
    }
    if (!open) continue;
    round->status |= score.bits;
    if (score.accepted) {
      write_token(*round, index, drafted_token(*round, index));
    } else {
      emit_token(round, index, score);
      open = false;
    }
  }
  if (scores_all) round->arguments.expected_accepted[round->sequence] = static_cast<float>(expected);
  if (!open) return;
  if (!round->arguments.has_bonus_rows) {
    round->arguments.num_accepted[round->sequence] = round->arguments.num_emitted[round->sequence] = round->length;
    return;
  }
  measure_target(round, round->length);
  emit_token(round, round->length, {true, 1.0, 0, Draw::TARGET, -1});
}

static void write_padding(const VerifyArguments& arguments, int64_t sequence, bool runs) {
  const int64_t width = arguments.gamma + 1;
  arguments.num_accepted[sequence] = 0;
  arguments.num_emitted[sequence] = 0;
  for (int64_t index = 0; index < width; ++index) {
    arguments.token_ids[sequence * width + index] = PLACEHOLDER_TOKEN_ID;
    if (arguments.logprobs) arguments.logprobs[sequence * width + index] = 0.0f;
  }
  if (!arguments.returns_accept_probs) return;
  arguments.expected_accepted[sequence] = 0.0f;
  for (int64_t index = 0; index < arguments.gamma; ++index) {
    arguments.accept_probs[sequence * arguments.gamma + index] = runs ? 0.0f : __builtin_nanf("");
  }
}

static void verify_sequence(const VerifyArguments& arguments, int64_t sequence, Executor executor) {
  Round round = {arguments, sequence, 0, 0, sequence, 0, executor, {}, {}, {}};
  read_length(&round);
  read_slot(&round);
  check_uniforms(&round);
  Sampled& target = round.target;
  Sampled& draft = round.draft;
  target.parameters = read_parameters(arguments.sampling, sequence, arguments.vocab, &round.status);
  int32_t draft_status = 0;
  draft.parameters = read_parameters(arguments.draft_sampling, sequence, arguments.draft_vocab, &draft_status);
  if (arguments.has_draft) round.status |= draft_status;
  write_padding(arguments, sequence, round.status == 0);
  if (round.status == 0) {
    target.law = make_law(arguments.target.is_probs, target.parameters.temperature);
    draft.law = make_law(arguments.draft.is_probs, draft.parameters.temperature);
    const int64_t widest = arguments.vocab > arguments.draft_vocab ? arguments.vocab : arguments.draft_vocab;
    round.workspace = make_workspace(widest, target.parameters.filtered || draft.parameters.filtered);
    target.statistics.shard_largest = round.workspace.target_largest;
    target.statistics.shard_mass = round.workspace.target_mass;
    draft.statistics.shard_mass = round.workspace.draft_mass;
    decide(&round);
    free_workspace(round.workspace);
  }
  arguments.status[sequence] = round.status;
}
