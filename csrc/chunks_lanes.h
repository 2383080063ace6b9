// Sums of weights over whole chunks, on vectors.
//
// The sums live in 32 fixed lanes, so vectors of 8 and of 16 give the same bits. Largest values are found by the bits
// of the floats, since maxima of integers run beside the multiply-adds, which maxima of floats would delay.

constexpr int64_t BUNDLE = 32;
constexpr int64_t HALF_BUNDLE = BUNDLE / 2;
// Bundles that are summed as a tree, and trees that are summed in float32: rounding grows with the depth, 3 + 4.
constexpr int64_t TREE = 8;
constexpr int64_t TREES = 4;

constexpr uint32_t NEGATIVE_INFINITY = 0xff800000u;
constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t HIGH_BITS = 0xffff0000u;

// Whether a residual's weights may be relative to powers of two.
constexpr bool WEIGHS_BY_EXPONENT = true;

struct Pair {
  Floats first;
  Floats second;
};

// A bundle, or the share of it that two vectors hold, as it is loaded and as floats; `half` is the number of the share.
// The bits of what is loaded are compared as integers of BITS bits.
struct FloatSource {
  static constexpr int BITS = 32, VECTORS = 2;
  const float* values;
  SPECKER_INLINE void load(const float* at, int64_t half, Words* loaded) {
    loaded[0] = load_words(at + half * SPECKER_LANES), loaded[1] = load_words(at + HALF_BUNDLE + half * SPECKER_LANES);
  }
  SPECKER_INLINE Pair widen(const Words* loaded) { return {floats_of(loaded[0]), floats_of(loaded[1])}; }
};

// 32 bits hold two entries.
struct Bfloat16Source {
  static constexpr int BITS = 16, VECTORS = 1;
  const uint16_t* values;
  SPECKER_INLINE void load(const uint16_t* at, int64_t half, Words* loaded) {
    loaded[0] = load_words(at + 2 * half * SPECKER_LANES);
  }
  SPECKER_INLINE Pair widen(const Words* loaded) {
    return {floats_of(shift_left<16>(loaded[0])), floats_of(both(loaded[0], all_words(HIGH_BITS)))};
  }
};

struct Float16Source {
  static constexpr int BITS = 32, VECTORS = 2;
  const uint16_t* values;
  SPECKER_INLINE void load(const uint16_t* at, int64_t half, Words* loaded) {
    loaded[0] = words_of(widen_halves(at + half * SPECKER_LANES));
    loaded[1] = words_of(widen_halves(at + HALF_BUNDLE + half * SPECKER_LANES));
  }
  SPECKER_INLINE Pair widen(const Words* loaded) { return {floats_of(loaded[0]), floats_of(loaded[1])}; }
};

// As many bytes as `half` of a bundle has: both halves ask for all of it.
template <class Element>
SPECKER_INLINE void fetch_bundle_ahead(const Element* bundle, int64_t half) {
  constexpr int64_t BYTES = 2 * SPECKER_LANES * sizeof(Element);
  fetch_ahead(reinterpret_cast<const char*>(bundle) + half * BYTES, BYTES);
}

template <class Source, class Element>
SPECKER_INLINE Pair load_pair(const Element* at, int64_t half) {
  Words loaded[Source::VECTORS];
  Source::load(at, half, loaded);
  return Source::widen(loaded);
}

// Sums what `term` gives for COUNT bundles, pairwise.
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

struct Sums {
  double first;
  double second;
};

// Sums what `term` gives for each bundle of [0, padded) in float64.
template <class Term>
SPECKER_INLINE Sums sum_bundles(int64_t padded, const Term& term) {
  constexpr int64_t STEP = TREE * BUNDLE, FLUSH = TREES * STEP;
  double lanes[BUNDLE] = {};
  for (int64_t begin = 0; begin < padded; begin += FLUSH) {
    const int64_t end = begin + FLUSH < padded ? begin + FLUSH : padded;
    for (int64_t half = 0; half < HALF_BUNDLE / SPECKER_LANES; ++half) {
      Pair sum = {all_floats(0.0f), all_floats(0.0f)};
      for (int64_t step = begin; step < end; step += STEP) {
        const auto share = [&](int64_t bundle) __attribute__((always_inline)) { return term(bundle, half); };
        const Pair tree = sum_tree<TREE>(step, share);
        sum = {sum.first + tree.first, sum.second + tree.second};
      }
      add_to(lanes + half * SPECKER_LANES, sum.first);
      add_to(lanes + HALF_BUNDLE + half * SPECKER_LANES, sum.second);
    }
  }
  return {sum_of_lanes<HALF_BUNDLE>(lanes), sum_of_lanes<HALF_BUNDLE>(lanes + HALF_BUNDLE)};
}

template <class Source>
static float largest_of_sample(const Source& source) {
  Floats largest = all_floats(-__builtin_inff());
  for (int64_t begin = 0; begin < SAMPLE; begin += BUNDLE) {
    for (int64_t half = 0; half < HALF_BUNDLE / SPECKER_LANES; ++half) {
      const Pair pair = load_pair<Source>(source.values + begin, half);
      largest = larger(pair.first, larger(pair.second, largest));
    }
  }
  float lanes[SPECKER_LANES];
  store(lanes, largest);
  return largest_lane<SPECKER_LANES>(lanes);
}

// A word of 32 bits for lanes of BITS, cut off where those are 16.
template <int BITS>
SPECKER_INLINE Words all_lanes(uint32_t word) {
  return all_words(BITS == 32 ? word : (word & HIGH_BITS) | word >> 16);
}

// Lanes of 16 bits chosen pairwise, in the high bits of lanes of 32.
template <int BITS, class Choose>
SPECKER_INLINE Words widen_chosen(Words words, Choose choose) {
  return BITS == 32 ? words : choose(shift_left<16>(words), both(words, all_words(HIGH_BITS)));
}

// As integers, floats of one sign are in order, negative ones the other way round: which is the largest takes two
// comparisons, or one where an entry is known to be positive. `bound` is what weighs 2^-160.
template <bool BOUND_IS_NEGATIVE, bool HAS_POSITIVE, class Source>
static bool sum_above(float bound, float exponent, const Source& source, int64_t padded, const ExponentialScale& scale,
                      ShardSum* whole) {
  constexpr int BITS = Source::BITS;
  const Power power = make_power(scale, exponent);
  const Words lowest = all_lanes<BITS>(bits_of_float(bound));
  Words most = all_lanes<BITS>(SIGN), least = all_words(~0u), widest = all_words(0);
  const auto weigh_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    Words loaded[Source::VECTORS];
    Source::load(source.values + bundle, half, loaded);
    fetch_bundle_ahead(source.values + bundle, half);
    for (Words& words : loaded) {
      // A NaN with a sign is wider than all else.
      widest = most_unsigned<BITS>(widest, words);
      most = most_signed<BITS>(most, words);
      if (!HAS_POSITIVE) least = least_unsigned<BITS>(least, words);
      words = BOUND_IS_NEGATIVE ? least_unsigned<BITS>(words, lowest) : most_signed<BITS>(words, lowest);
    }
    const Pair pair = Source::widen(loaded);
    return {power_of(power, pair.first), power_of(power, pair.second)};
  };
  const Sums sums = sum_bundles(padded, weigh_pair);
  whole->mass = (sums.first + sums.second) * EXPONENT_SHIFT;
  if (most_unsigned_lane(widen_chosen<BITS>(widest, most_unsigned<32>)) > NEGATIVE_INFINITY) return false;
  uint32_t largest = static_cast<uint32_t>(most_signed_lane(widen_chosen<BITS>(most, most_signed<32>)));
  if (!HAS_POSITIVE && largest >= SIGN) largest = least_unsigned_lane(widen_chosen<BITS>(least, least_unsigned<32>));
  whole->largest = float_from_bits(largest);
  return whole->largest * scale.high - exponent <= LARGEST_EXPONENT;
}

// What lies too far below the reference to weigh is not told apart. Returns false where an entry is no number or
// exceeds it by far.
template <class Source>
static bool sum_relative_to(float exponent, bool has_positive, const Source& source, int64_t padded,
                            const ExponentialScale& scale, ShardSum* whole) {
  const float bound = (exponent - LOWEST_EXPONENT) / scale.high;
  const auto sum = bound >= 0.0f  ? sum_above<false, false, Source>
                   : has_positive ? sum_above<true, true, Source>
                                  : sum_above<true, false, Source>;
  return sum(bound, exponent, source, padded, scale, whole);
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
  const Sums sums = sum_bundles(entries.padded, weigh_pair);
  return (sums.first + sums.second) * EXPONENT_SHIFT;
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

// Weights relative to 2^exponent, of values above and below the bracket.
static SplitMass split_mass(const Entries& entries, float exponent, const ExponentialScale& scale,
                            const Bracket& bracket) {
  const Power power = make_power(scale, exponent);
  const Floats lowest = all_floats((exponent - LOWEST_EXPONENT) / scale.high), low = all_floats(bracket.low);
  const Floats above = all_floats(value_of(order_of(bracket.high) + 1));
  const auto split_pair = [&](int64_t bundle, int64_t half) __attribute__((always_inline)) -> Pair {
    const float* at = entries.values + bundle + half * SPECKER_LANES;
    const Floats first = load_floats(at), second = load_floats(at + HALF_BUNDLE);
    const Floats first_weight = power_of(power, larger(first, lowest));
    const Floats second_weight = power_of(power, larger(second, lowest));
    return {where_reached(first, above, first_weight) + where_reached(second, above, second_weight),
            (first_weight - where_reached(first, low, first_weight)) +
                (second_weight - where_reached(second, low, second_weight))};
  };
  const Sums sums = sum_bundles(entries.padded, split_pair);
  return {sums.first * EXPONENT_SHIFT, sums.second * EXPONENT_SHIFT};
}
