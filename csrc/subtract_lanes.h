// The residual of whole chunks, on vectors.

struct ResidualTerm {
  Power target_power, draft_power;
  Floats target_max, draft_max, target_bound, draft_bound, high, low;
};

static inline ResidualTerm make_residual_term(const FastResidual& fast, const ExponentialScale& target_scale,
                                              const ExponentialScale& draft_scale) {
  return {make_power(target_scale, 0.0f),  make_power(draft_scale, 0.0f),  all_floats(fast.target_max),
          all_floats(fast.draft_max),      all_floats(fast.target_bound),  all_floats(fast.draft_bound),
          all_floats(fast.ratio.high),     all_floats(fast.ratio.low)};
}

SPECKER_INLINE Floats residual_of(const ResidualTerm& term, Floats target, Floats draft) {
  const Floats zero = all_floats(0.0f);
  // A row that its receipt is not of may hold more than the receipt's largest value.
  const Floats draft_weight = power_of(term.draft_power, smaller(draft - term.draft_max, zero));
  const Floats target_weight = power_of(term.target_power, target - term.target_max);
  const Floats subtracted = where_reached(draft, term.draft_bound, draft_weight);
  const Floats residual = fused_minus(subtracted, term.low, fused_minus(subtracted, term.high, target_weight));
  return where_reached(target, term.target_bound, larger(residual, zero));
}

// Sums the residual of whole chunks; chunks without a target entry that weighs have none.
template <class Source>
static double sum_residual(const Source& target, const Source& draft, int64_t padded, const FastResidual& fast,
                           const ExponentialScale& target_scale, const ExponentialScale& draft_scale) {
  const ResidualTerm term = make_residual_term(fast, target_scale, draft_scale);
  const auto subtract_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    Words first_target, second_target, first_draft, second_draft;
    Source::pair(target.values + bundle, half, &first_target, &second_target);
    Source::pair(draft.values + bundle, half, &first_draft, &second_draft);
    return {residual_of(term, floats_of(first_target), floats_of(first_draft)),
            residual_of(term, floats_of(second_target), floats_of(second_draft))};
  };
  if (!fast.sparse) return sum_bundles(padded, subtract_pair);
  double sum = 0.0;
  for (int64_t begin = 0; begin < padded; begin += CHUNK) {
    if (!(largest_of_chunk(Source{target.values + begin}) >= fast.target_bound)) continue;
    sum += sum_bundles(CHUNK, [&](int64_t bundle, int64_t half) __attribute__((always_inline)) { return subtract_pair(begin + bundle, half); });
  }
  return sum;
}

// Writes the residual of whole chunks.
static void write_residual(const float* target, const float* draft, int64_t padded, const FastResidual& fast,
                           const ExponentialScale& target_scale, const ExponentialScale& draft_scale,
                           float* residual) {
  const ResidualTerm term = make_residual_term(fast, target_scale, draft_scale);
  for (int64_t index = 0; index < padded; index += SPECKER_LANES) {
    store(residual + index, residual_of(term, load_floats(target + index), load_floats(draft + index)));
  }
}
