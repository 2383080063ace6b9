// One sequence of verify and its arguments: lengths, rows, tokens, random numbers.

struct Round {
  const VerifyArguments& arguments;
  int64_t sequence;
  int64_t start;   // first row of a flat sequence
  int64_t length;  // draft tokens of the sequence
  int64_t slot;    // leading row of the draft tensor
  int32_t status;
  Executor executor;
  Workspace workspace;
  Sampled target;
  Sampled draft;
};

// Row of a flat target that is the sequence's first; 0 in the padded form.
static inline int64_t first_target_row(const Round& round) {
  if (!round.arguments.cu_num_draft_tokens.data) return 0;
  return round.start + (round.arguments.has_bonus_rows ? round.sequence : 0);
}

static inline int64_t num_target_rows(const Round& round) { return round.length + round.arguments.has_bonus_rows; }

static inline const double* uniforms_at(const Round& round, int64_t index) {
  const VerifyArguments& arguments = round.arguments;
  return arguments.uniforms + round.sequence * arguments.uniforms_stride_sequence +
         (first_target_row(round) + index) * arguments.uniforms_stride_row;
}

static Uniforms decision_uniforms(const Round& round, int64_t index) {
  const VerifyArguments& arguments = round.arguments;
  if (arguments.uniforms) {
    const double* pair = uniforms_at(round, index);
    return {pair[0], pair[arguments.uniforms_stride_field]};
  }
  const uint64_t seed = static_cast<uint64_t>(read_integer(arguments.seed, round.sequence));
  const uint64_t position = static_cast<uint64_t>(read_integer(arguments.position, round.sequence));
  return philox_uniforms(seed, position + static_cast<uint64_t>(index), VERIFY_PURPOSE);
}

static void read_length(Round* round) {
  const VerifyArguments& arguments = round->arguments;
  round->length = arguments.gamma;
  bool good = true;
  if (arguments.cu_num_draft_tokens.data) {
    const int64_t end = read_integer(arguments.cu_num_draft_tokens, round->sequence + 1);
    round->start = read_integer(arguments.cu_num_draft_tokens, round->sequence);
    round->length = end - round->start;
    good = round->start >= 0 && end <= arguments.total_draft_tokens && (round->sequence > 0 || round->start == 0);
  } else if (arguments.num_draft_tokens.data) {
    round->length = read_integer(arguments.num_draft_tokens, round->sequence);
  }
  if (good && round->length >= 0 && round->length <= arguments.gamma) return;
  round->status |= INVALID_NUM_DRAFT_TOKENS;
  round->start = round->length = 0;
}

static void read_slot(Round* round) {
  const VerifyArguments& arguments = round->arguments;
  if (!arguments.draft_index.data || !arguments.has_draft) return;
  round->slot = read_integer(arguments.draft_index, round->sequence);
  if (round->slot < 0 || round->slot >= arguments.draft_slots) round->status |= INVALID_DRAFT_INDEX;
}

static void check_uniforms(Round* round) {
  if (!round->arguments.uniforms) return;
  for (int64_t index = 0; index < num_target_rows(*round); ++index) {
    const Uniforms pair = decision_uniforms(*round, index);
    // Written so that NaN falls in.
    const bool good = pair.accept >= 0.0 && pair.accept < 1.0 && pair.emission >= 0.0 && pair.emission < 1.0;
    if (!good) round->status |= INVALID_UNIFORMS;
  }
}

static inline Row target_row(const Round& round, int64_t index) {
  const VerifyArguments& arguments = round.arguments;
  const int64_t row = first_target_row(round) + index;
  return row_at(arguments.target, arguments.vocab, round.sequence, row,
                adjustment_at(arguments.adjustments, round.sequence, row));
}

static inline Row draft_row(const Round& round, int64_t index) {
  const VerifyArguments& arguments = round.arguments;
  // Slots hold rows, each its own from 0; masks and biases belong to sequences.
  const int64_t first = arguments.draft_index.data ? 0 : round.start;
  return row_at(arguments.draft, arguments.draft_vocab, round.slot, first + index,
                adjustment_at(arguments.draft_adjustments, round.sequence, round.start + index));
}

static inline int64_t drafted_token(const Round& round, int64_t index) {
  const VerifyArguments& arguments = round.arguments;
  const Integers tokens = arguments.draft_token_ids;
  const int64_t offset =
      round.sequence * arguments.draft_token_ids_stride_sequence + (round.start + index) * tokens.stride;
  return tokens.is_int64 ? static_cast<const int64_t*>(tokens.data)[offset]
                         : static_cast<const int32_t*>(tokens.data)[offset];
}
