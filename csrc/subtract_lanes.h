// The residual of whole chunks, on vectors.

struct ResidualTerm {
  Power target_power, draft_power;
  Floats target_origin, draft_origin, target_bound, draft_bound;
  Words draft_ceiling;
};

// The draft's weights come in the target's units, by a table that has the ratio in it: exactly equal for equal rows.
static inline ResidualTerm make_residual_term(const FastResidual& fast, const ExponentialScale& target_scale,
                                              const ExponentialScale& draft_scale) {
  alignas(32) uint32_t table[8];
  for (uint32_t eighths = 0; eighths < 8; ++eighths) {
    const float power = float_from_bits(EIGHTHS[eighths] + (eighths << 20));
    table[eighths] = bits_of_float(static_cast<float>(static_cast<double>(power) * fast.ratio)) - (eighths << 20);
  }
  return {make_power(target_scale, fast.target_exponent),
          make_power(draft_scale, fast.draft_exponent, table),
          all_floats(fast.target_origin),
          all_floats(fast.draft_origin),
          all_floats(fast.target_bound),
          all_floats(fast.draft_bound),
          all_words(bits_of_float(fast.draft_ceiling))};
}

template <bool IS_RELATIVE, bool CEILING_IS_NEGATIVE>
SPECKER_INLINE Floats residual_of(const ResidualTerm& term, Floats target, Floats draft) {
  const Words draft_words = words_of(IS_RELATIVE ? draft - term.draft_origin : draft);
  // A row that its receipt is not of may hold more than the receipt's largest value. Signs order floats as integers.
  const Words lowered = CEILING_IS_NEGATIVE ? most_unsigned<32>(draft_words, term.draft_ceiling)
                                            : least_signed(draft_words, term.draft_ceiling);
  const Floats draft_weight = power_of(term.draft_power, floats_of(lowered));
  const Floats target_weight = power_of(term.target_power, IS_RELATIVE ? target - term.target_origin : target);
  const Floats difference = less_where_reached(draft, term.draft_bound, target_weight, draft_weight);
  return positive_where_reached(target, term.target_bound, difference);
}

template <bool IS_RELATIVE, bool CEILING_IS_NEGATIVE, class Source>
static double sum_residual_of(const ResidualTerm& term, const Source& target, const Source& draft, int64_t padded) {
  const auto subtract_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    const Pair targets = load_pair<Source>(target.values + bundle, half);
    const Pair drafts = load_pair<Source>(draft.values + bundle, half);
    // The target row has just been read.
    fetch_bundle_ahead(draft.values + bundle, half);
    return {residual_of<IS_RELATIVE, CEILING_IS_NEGATIVE>(term, targets.first, drafts.first),
            residual_of<IS_RELATIVE, CEILING_IS_NEGATIVE>(term, targets.second, drafts.second)};
  };
  const Sums sums = sum_bundles(padded, subtract_pair);
  return sums.first + sums.second;
}

template <bool IS_RELATIVE, bool CEILING_IS_NEGATIVE>
static void write_residual_of(const ResidualTerm& term, const float* target, const float* draft, int64_t padded,
                              float* residual) {
  for (int64_t index = 0; index < padded; index += SPECKER_LANES) {
    store(residual + index,
          residual_of<IS_RELATIVE, CEILING_IS_NEGATIVE>(term, load_floats(target + index), load_floats(draft + index)));
  }
}

// Sums the residual of whole chunks.
template <class Source>
static double sum_residual(const Source& target, const Source& draft, int64_t padded, const FastResidual& fast,
                           const ExponentialScale& target_scale, const ExponentialScale& draft_scale) {
  const ResidualTerm term = make_residual_term(fast, target_scale, draft_scale);
  if (fast.is_relative) return sum_residual_of<true, false>(term, target, draft, padded);
  return bits_of_float(fast.draft_ceiling) >= SIGN ? sum_residual_of<false, true>(term, target, draft, padded)
                                                   : sum_residual_of<false, false>(term, target, draft, padded);
}

// Writes the residual of whole chunks.
static void write_residual(const float* target, const float* draft, int64_t padded, const FastResidual& fast,
                           const ExponentialScale& target_scale, const ExponentialScale& draft_scale, float* residual) {
  const ResidualTerm term = make_residual_term(fast, target_scale, draft_scale);
  const auto write = fast.is_relative                            ? write_residual_of<true, false>
                     : bits_of_float(fast.draft_ceiling) >= SIGN ? write_residual_of<false, true>
                                                                 : write_residual_of<false, false>;
  write(term, target, draft, padded, residual);
}
