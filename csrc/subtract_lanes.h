// The residual of whole chunks, on vectors.

struct ResidualTerm {
  Power target_power, draft_power;
  Floats target_max, draft_max, target_bound, draft_bound;
};

// The draft's weights come in the target's units, by a table that has the ratio in it: exactly equal for equal rows.
static inline ResidualTerm make_residual_term(const FastResidual& fast, const ExponentialScale& target_scale,
                                              const ExponentialScale& draft_scale) {
  alignas(32) uint32_t table[8];
  for (uint32_t eighths = 0; eighths < 8; ++eighths) {
    const float power = float_from_bits(EIGHTHS[eighths] + (eighths << 20));
    table[eighths] = bits_of_float(static_cast<float>(static_cast<double>(power) * fast.ratio)) - (eighths << 20);
  }
  return {make_power(target_scale, 0.0f), make_power(draft_scale, 0.0f, table), all_floats(fast.target_max),
          all_floats(fast.draft_max),     all_floats(fast.target_bound),        all_floats(fast.draft_bound)};
}

SPECKER_INLINE Floats residual_of(const ResidualTerm& term, Floats target, Floats draft) {
  const Words zero = all_words(0);
  // A row that its receipt is not of may hold more than the receipt's largest value. Signs order floats as integers.
  const Floats difference = floats_of(least_signed(words_of(draft - term.draft_max), zero));
  const Floats draft_weight = where_reached(draft, term.draft_bound, power_of(term.draft_power, difference));
  const Floats target_weight = power_of(term.target_power, target - term.target_max);
  const Words residual = most_signed<32>(words_of(target_weight - draft_weight), zero);
  return where_reached(target, term.target_bound, floats_of(residual));
}

// Sums the residual of whole chunks.
template <class Source>
static double sum_residual(const Source& target, const Source& draft, int64_t padded, const FastResidual& fast,
                           const ExponentialScale& target_scale, const ExponentialScale& draft_scale) {
  const ResidualTerm term = make_residual_term(fast, target_scale, draft_scale);
  const auto subtract_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    const Pair targets = load_pair<Source>(target.values + bundle, half);
    const Pair drafts = load_pair<Source>(draft.values + bundle, half);
    return {residual_of(term, targets.first, drafts.first), residual_of(term, targets.second, drafts.second)};
  };
  const Sums sums = sum_bundles(padded, subtract_pair);
  return sums.first + sums.second;
}

// Writes the residual of whole chunks.
static void write_residual(const float* target, const float* draft, int64_t padded, const FastResidual& fast,
                           const ExponentialScale& target_scale, const ExponentialScale& draft_scale, float* residual) {
  const ResidualTerm term = make_residual_term(fast, target_scale, draft_scale);
  for (int64_t index = 0; index < padded; index += SPECKER_LANES) {
    store(residual + index, residual_of(term, load_floats(target + index), load_floats(draft + index)));
  }
}
