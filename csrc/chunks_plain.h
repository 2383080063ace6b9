// Sums of weights over whole chunks, in plain loops for the compiler to vectorise.

constexpr int64_t HALF = LANES / 2;
// Whether a residual's weights may be relative to powers of two.
constexpr bool WEIGHS_BY_EXPONENT = false;

// Entries come in pairs: two of 16 bits make one load, and the sum's lanes are those of the pairs.
struct FloatSource {
  // The low bits of a payload are added to the exponent and may turn NaN into a number.
  static constexpr bool CHECKS = true;
  const float* values;
  SPECKER_INLINE void pair(const float* at, int64_t lane, float* first, float* second) {
    *first = at[lane], *second = at[HALF + lane];
  }
};

struct Bfloat16Source {
  static constexpr bool CHECKS = false;
  const uint16_t* values;
  SPECKER_INLINE void pair(const uint16_t* at, int64_t lane, float* first, float* second) {
    uint32_t word;
    __builtin_memcpy(&word, at + 2 * lane, sizeof word);
    *first = float_from_bits(word << 16), *second = float_from_bits(word & 0xffff0000u);
  }
};

struct Float16Source {
  static constexpr bool CHECKS = false;
  const uint16_t* values;
  SPECKER_INLINE void pair(const uint16_t* at, int64_t lane, float* first, float* second) {
    *first = widen_float16(at[lane]), *second = widen_float16(at[HALF + lane]);
  }
};

template <class Source>
static float largest_of_sample(const Source& source) {
  float largest[HALF];
#pragma omp simd
  for (int64_t lane = 0; lane < HALF; ++lane) {
    float most = -__builtin_inff(), other = most;
    for (int64_t part = 0; part < SAMPLE; part += LANES) {
      float first, second;
      Source::pair(source.values + part, lane, &first, &second);
      most = larger(first, most), other = larger(second, other);
    }
    largest[lane] = larger(most, other);
  }
  return largest_lane<HALF>(largest);
}

// Sums relative to 2^exponent. What lies too far below it to weigh is not looked at for the largest value either.
// Returns false where an entry is no number or exceeds the reference by far.
template <class Source>
static bool sum_relative_to(float exponent, bool, const Source& source, int64_t padded, const ExponentialScale scale,
                            ShardSum* whole) {
  const float magic = MAGIC - exponent, lowest = (exponent - LOWEST_EXPONENT) / scale.high;
  float largest[LANES], checks[HALF];
  double lanes[LANES] = {};
  for (int64_t lane = 0; lane < LANES; ++lane) largest[lane] = lowest;
  for (int64_t lane = 0; lane < HALF; ++lane) checks[lane] = 0.0f;
  for (int64_t begin = 0; begin < padded; begin += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < HALF; ++lane) {
      float most = largest[lane], other = largest[HALF + lane], check = checks[lane], sum = 0.0f, rest = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        float first, second;
        Source::pair(source.values + begin + part, lane, &first, &second);
        first = larger(lowest, first), second = larger(lowest, second);
        most = larger(first, most), other = larger(second, other);
        if (Source::CHECKS) check += first + second;
        sum += shifted_power(first, scale, magic), rest += shifted_power(second, scale, magic);
      }
      largest[lane] = most, largest[HALF + lane] = other, checks[lane] = check;
      lanes[lane] += static_cast<double>(sum), lanes[HALF + lane] += static_cast<double>(rest);
    }
  }
  whole->largest = largest_lane<LANES>(largest);
  whole->mass = sum_of_lanes<LANES>(lanes) * EXPONENT_SHIFT;
  const float check = sum_of_lanes<HALF>(checks);
  return whole->largest * scale.high - exponent <= LARGEST_EXPONENT && check == check && whole->mass >= 0.0;
}

// Weights of differences to a reference, `threshold` and above.
template <bool FILTERED>
static double sum_exponentials(const ExponentialScale scale, const Entries& entries, float reference, float threshold) {
  const auto weigh_one = [=](float value) { return shifted_exponential(value - reference, scale); };
  return sum_terms<FILTERED>(entries, threshold, weigh_one) * EXPONENT_SHIFT;
}

template <bool FILTERED>
static void weigh_exponentials(const ExponentialScale scale, const Entries& entries, float reference, float threshold,
                               float* weights) {
#pragma omp simd
  for (int64_t index = 0; index < entries.padded; ++index) {
    const float value = entries.values[index];
    const float weight = exponential(value - reference, scale);
    weights[index] = !FILTERED || value >= threshold ? weight : 0.0f;
  }
}

// Weights relative to 2^exponent, of values above and below the bracket.
static SplitMass split_mass(const Entries& entries, float exponent, const ExponentialScale scale,
                            const Bracket bracket) {
  const float magic = MAGIC - exponent, lowest = (exponent - LOWEST_EXPONENT) / scale.high;
  double above[LANES] = {}, below[LANES] = {};
  for (int64_t begin = 0; begin < entries.padded; begin += CHUNK) {
    const float* values = entries.values + begin;
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) {
      float high = 0.0f, low = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        const float value = larger(lowest, values[part + lane]);
        const float weight = shifted_power(value, scale, magic);
        high += value > bracket.high ? weight : 0.0f;
        low += value < bracket.low ? weight : 0.0f;
      }
      above[lane] += static_cast<double>(high), below[lane] += static_cast<double>(low);
    }
  }
  return {sum_of_lanes<LANES>(above) * EXPONENT_SHIFT, sum_of_lanes<LANES>(below) * EXPONENT_SHIFT};
}
