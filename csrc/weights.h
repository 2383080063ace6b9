// How values become weights, one exponential an entry.
//
// A weight is exp((value - reference) / temperature), or (value / reference) ** (1 / temperature) where rows hold
// probabilities; the reference is near the largest value of a shard or row, so float32 suffices. Sums run
// in fixed lanes: every instruction set with a fused multiply-add gives the same bits.

enum class Weighing { EXPONENTIAL, WIDE_EXPONENTIAL, LINEAR, POWER };

struct Law {
  Weighing weighing;
  double temperature;
  ExponentialScale scale;
};

static inline Law make_law(bool is_probs, double temperature) {
  // Beyond this, 160 * temperature leaves float32.
  const bool wide = temperature > 1e30;
  Weighing weighing = wide ? Weighing::WIDE_EXPONENTIAL : Weighing::EXPONENTIAL;
  if (is_probs) weighing = temperature == 1.0 ? Weighing::LINEAR : Weighing::POWER;
  return {weighing, temperature, exponential_scale(wide ? 1.0 : temperature)};
}

// Weight of `value` relative to `reference` in float64.
static inline double relative_weight(const Law& law, double value, double reference) {
  if (law.weighing == Weighing::LINEAR) return value / reference;
  if (law.weighing == Weighing::POWER) return pow(value / reference, 1.0 / law.temperature);
  return exp((value - reference) / law.temperature);
}

static inline double log_relative_weight(const Law& law, double value, double reference) {
  if (law.weighing == Weighing::LINEAR) return log(value / reference);
  if (law.weighing == Weighing::POWER) return log(value / reference) / law.temperature;
  return (value - reference) / law.temperature;
}

// Sums in 16 fixed lanes of float64.
template <class Value>
static double fixed_sum(const Value* values, int64_t count) {
  constexpr int64_t WIDTH = 16;
  double lanes[WIDTH] = {};
  const int64_t whole = count - count % WIDTH;
  for (int64_t index = 0; index < whole; index += WIDTH) {
#pragma omp simd
    for (int64_t lane = 0; lane < WIDTH; ++lane) lanes[lane] += static_cast<double>(values[index + lane]);
  }
  double sum = sum_of_lanes<WIDTH>(lanes);
  for (int64_t index = whole; index < count; ++index) sum += static_cast<double>(values[index]);
  return sum;
}

template <Weighing WEIGHING>
SPECKER_INLINE float float_weight(const Law& law, float value, float reference) {
  if (WEIGHING == Weighing::LINEAR) return value / reference;
  return static_cast<float>(relative_weight(law, value, reference));
}

template <Weighing WEIGHING, bool FILTERED>
static double sum_chunks(const Law& law, const Entries& entries, float reference, float threshold) {
  return sum_terms<FILTERED>(entries, threshold,
                             [&](float value) { return float_weight<WEIGHING>(law, value, reference); });
}

template <Weighing WEIGHING, bool FILTERED>
static void weigh_chunks(const Law& law, const Entries& entries, float reference, float threshold, float* weights) {
#pragma omp simd
  for (int64_t index = 0; index < entries.padded; ++index) {
    const float value = entries.values[index];
    const float weight = float_weight<WEIGHING>(law, value, reference);
    weights[index] = !FILTERED || value >= threshold ? weight : 0.0f;
  }
}

template <bool FILTERED>
static double sum_weights(const Law& law, const Entries& entries, float reference, float threshold) {
  switch (law.weighing) {
    case Weighing::EXPONENTIAL:
      return sum_exponentials<FILTERED>(law.scale, entries, reference, threshold);
    case Weighing::WIDE_EXPONENTIAL:
      return sum_chunks<Weighing::WIDE_EXPONENTIAL, FILTERED>(law, entries, reference, threshold);
    case Weighing::LINEAR:
      return sum_chunks<Weighing::LINEAR, FILTERED>(law, entries, reference, threshold);
    default:
      return sum_chunks<Weighing::POWER, FILTERED>(law, entries, reference, threshold);
  }
}

template <bool FILTERED>
static void weigh_entries(const Law& law, const Entries& entries, float reference, float threshold, float* weights) {
  switch (law.weighing) {
    case Weighing::EXPONENTIAL:
      return weigh_exponentials<FILTERED>(law.scale, entries, reference, threshold, weights);
    case Weighing::WIDE_EXPONENTIAL:
      return weigh_chunks<Weighing::WIDE_EXPONENTIAL, FILTERED>(law, entries, reference, threshold, weights);
    case Weighing::LINEAR:
      return weigh_chunks<Weighing::LINEAR, FILTERED>(law, entries, reference, threshold, weights);
    default:
      return weigh_chunks<Weighing::POWER, FILTERED>(law, entries, reference, threshold, weights);
  }
}

// Kept weights of the entries, relative to the reference, and their sum; the threshold -inf keeps everything.
static inline double kept_sum(const Law& law, const Entries& entries, float reference, float threshold) {
  return threshold > -__builtin_inff() ? sum_weights<true>(law, entries, reference, threshold)
                                       : sum_weights<false>(law, entries, reference, threshold);
}

static inline void kept_weights(const Law& law, const Entries& entries, float reference, float threshold,
                                float* weights) {
  threshold > -__builtin_inff() ? weigh_entries<true>(law, entries, reference, threshold, weights)
                                : weigh_entries<false>(law, entries, reference, threshold, weights);
}

// exp(differences / temperature), for tests.
static void weigh(const float* differences, float* weights, int64_t count, double temperature) {
  weigh_exponentials<false>(exponential_scale(temperature), {differences, count, count}, 0.0f, 0.0f, weights);
}
