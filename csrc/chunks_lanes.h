// Sums of weights over whole chunks, on vectors.
//
// The sums live in 32 fixed lanes, so vectors of 8 and of 16 give the same bits. The order of the floats of a shard is
// that of their bits, of which maxima and minima cost a fraction of a float maximum.

constexpr int64_t BUNDLE = 32;
constexpr int64_t HALF_BUNDLE = BUNDLE / 2;
// Vectors that are summed as a tree, and trees that are summed in float32: rounding grows with the depth, 3 + 3.
constexpr int64_t TREE = 8;
constexpr int64_t TREES = 4;

// Entries come in pairs of vectors: 32 bits hold two of 16. `half` is the number of a vector in half a bundle.
struct FloatSource {
  const float* values;
  SPECKER_INLINE void pair(const float* at, int64_t half, Words* first, Words* second) {
    *first = load_words(at + half * SPECKER_LANES), *second = load_words(at + HALF_BUNDLE + half * SPECKER_LANES);
  }
};

struct Bfloat16Source {
  const uint16_t* values;
  SPECKER_INLINE void pair(const uint16_t* at, int64_t half, Words* first, Words* second) {
    const Words words = load_words(at + 2 * half * SPECKER_LANES);
    *first = shift_left<16>(words), *second = both(words, all_words(0xffff0000u));
  }
};

struct Float16Source {
  const uint16_t* values;
  SPECKER_INLINE void pair(const uint16_t* at, int64_t half, Words* first, Words* second) {
    *first = words_of(widen_halves(at + half * SPECKER_LANES));
    *second = words_of(widen_halves(at + HALF_BUNDLE + half * SPECKER_LANES));
  }
};

struct Pair {
  Floats first;
  Floats second;
};

// Sums what `term` gives for COUNT bundles, the nearest first.
template <int64_t COUNT, class Term>
SPECKER_INLINE Pair sum_tree(int64_t begin, const Term& term) {
  if constexpr (COUNT == 1) {
    return term(begin);
  } else {
    const Pair left = sum_tree<COUNT / 2>(begin, term);
    const Pair right = sum_tree<COUNT / 2>(begin + COUNT / 2 * BUNDLE, term);
    return {left.first + right.first, left.second + right.second};
  }
}

// Sums what `term` gives for each bundle of [0, padded) in float64.
template <class Term>
SPECKER_INLINE double sum_bundles(int64_t padded, const Term& term) {
  constexpr int64_t STEP = TREE * BUNDLE, FLUSH = TREES * STEP;
  double lanes[BUNDLE] = {};
  for (int64_t begin = 0; begin < padded; begin += FLUSH) {
    const int64_t end = begin + FLUSH < padded ? begin + FLUSH : padded;
    for (int64_t half = 0; half < HALF_BUNDLE / SPECKER_LANES; ++half) {
      Pair sum = {all_floats(0.0f), all_floats(0.0f)};
      for (int64_t step = begin; step < end; step += STEP) {
        const Pair tree = sum_tree<TREE>(step, [&](int64_t bundle) __attribute__((always_inline)) { return term(bundle, half); });
        sum = {sum.first + tree.first, sum.second + tree.second};
      }
      add_to(lanes + half * SPECKER_LANES, sum.first);
      add_to(lanes + HALF_BUNDLE + half * SPECKER_LANES, sum.second);
    }
  }
  return sum_of_lanes<BUNDLE>(lanes);
}

template <class Source>
static float largest_of_chunk(const Source& source) {
  Floats largest = all_floats(-__builtin_inff());
  for (int64_t begin = 0; begin < CHUNK; begin += BUNDLE) {
    for (int64_t half = 0; half < HALF_BUNDLE / SPECKER_LANES; ++half) {
      Words first, second;
      Source::pair(source.values + begin, half, &first, &second);
      largest = larger(floats_of(first), larger(floats_of(second), largest));
    }
  }
  float lanes[SPECKER_LANES];
  store(lanes, largest);
  return largest_lane<SPECKER_LANES>(lanes);
}

template <class Choose>
SPECKER_INLINE uint32_t fold(Words words, Choose choose) {
  uint32_t lanes[SPECKER_LANES];
  store(lanes, words);
  uint32_t chosen = lanes[0];
  for (int64_t lane = 1; lane < SPECKER_LANES; ++lane) chosen = choose(chosen, lanes[lane]);
  return chosen;
}

// How the bits of a shard's floats are ordered: as signed integers where its largest value is positive, and the bound
// below which nothing weighs may be positive too; as unsigned ones, the other way round, where it is negative.
enum class Order { POSITIVE, POSITIVE_BOUND, NEGATIVE };

constexpr uint32_t NEGATIVE_INFINITY = 0xff800000u;
constexpr uint32_t SIGN = 0x80000000u;

template <Order ORDER, class Source>
static bool sum_ordered(float exponent, const Source& source, int64_t padded, const ExponentialScale& scale,
                        float bound, ShardSum* whole) {
  const Power power = make_power(scale, exponent);
  const Words lowest = words_of(all_floats(bound));
  Words extreme = all_words(ORDER == Order::NEGATIVE ? ~0u : SIGN), widest = all_words(0);
  const auto clamp = [&](Words words) __attribute__((always_inline)) {
    return ORDER == Order::POSITIVE_BOUND ? most_signed(words, lowest) : least_unsigned(words, lowest);
  };
  const auto weigh_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    Words first, second;
    Source::pair(source.values + bundle, half, &first, &second);
    // A NaN with a sign is wider than all else.
    widest = most_unsigned(widest, most_unsigned(first, second));
    extreme = ORDER == Order::NEGATIVE ? least_unsigned(extreme, least_unsigned(first, second))
                                       : most_signed(extreme, most_signed(first, second));
    return {power_of(power, floats_of(clamp(first))), power_of(power, floats_of(clamp(second)))};
  };
  whole->mass = sum_bundles(padded, weigh_pair) * EXPONENT_SHIFT;
  if (fold(widest, [](uint32_t left, uint32_t right) { return left > right ? left : right; }) > NEGATIVE_INFINITY) {
    return false;
  }
  uint32_t largest;
  if (ORDER == Order::NEGATIVE) {
    largest = fold(extreme, [](uint32_t left, uint32_t right) { return left < right ? left : right; });
    if (largest < SIGN) return false;
  } else {
    largest = fold(extreme, [](uint32_t left, uint32_t right) {
      return static_cast<int32_t>(left) > static_cast<int32_t>(right) ? left : right;
    });
    // Nothing positive: what the chunks before hold is larger.
    if (largest >= SIGN) largest = NEGATIVE_INFINITY;
  }
  whole->largest = float_from_bits(largest);
  return whole->largest * scale.high - exponent <= LARGEST_EXPONENT;
}

// What lies too far below the reference to weigh is not told apart. Returns false where an entry is no number or exceeds
// it by far.
template <class Source>
static bool sum_relative_to(const Reference& reference, const Source& source, int64_t padded,
                            const ExponentialScale& scale, ShardSum* whole) {
  const float exponent = reference.exponent, bound = (exponent - LOWEST_EXPONENT) / scale.high;
  if (!reference.positive) return sum_ordered<Order::NEGATIVE>(exponent, source, padded, scale, bound, whole);
  if (bound < 0.0f) return sum_ordered<Order::POSITIVE>(exponent, source, padded, scale, bound, whole);
  return sum_ordered<Order::POSITIVE_BOUND>(exponent, source, padded, scale, bound, whole);
}

// Weights of differences to a reference, `threshold` and above.
template <bool FILTERED>
static double sum_exponentials(const ExponentialScale& scale, const Entries& entries, float reference,
                               float threshold) {
  const Power power = make_power(scale, 0.0f);
  const Floats origin = all_floats(reference), lowest = all_floats(scale.lowest), bound = all_floats(threshold);
  const auto weigh_one = [&](const float* at) __attribute__((always_inline)) {
    const Floats value = load_floats(at);
    const Floats weight = power_of(power, larger(value - origin, lowest));
    return FILTERED ? where_reached(value, bound, weight) : weight;
  };
  const auto weigh_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    const float* at = entries.values + bundle + half * SPECKER_LANES;
    return {weigh_one(at), weigh_one(at + HALF_BUNDLE)};
  };
  return sum_bundles(entries.padded, weigh_pair) * EXPONENT_SHIFT;
}

template <bool FILTERED>
static void weigh_exponentials(const ExponentialScale& scale, const Entries& entries, float reference, float threshold,
                               float* weights) {
  const Power power = make_power(scale, 0.0f);
  const Floats origin = all_floats(reference), lowest = all_floats(scale.lowest), bound = all_floats(threshold);
  // The one rounding of a subnormal result.
  const Floats shift = all_floats(EXPONENT_SHIFT);
  for (int64_t index = 0; index < entries.padded; index += SPECKER_LANES) {
    const Floats value = load_floats(entries.values + index);
    const Floats weight = power_of(power, larger(value - origin, lowest)) * shift;
    store(weights + index, FILTERED ? where_reached(value, bound, weight) : weight);
  }
}
