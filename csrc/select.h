// Selection without sorting: from values with measures, and over the order of float32.

static inline uint32_t order_of(float value) {
  // Adding 0 makes -0 and 0 one value.
  const float canonical = value + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &canonical, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

static inline float value_of(uint32_t order) {
  return float_from_bits(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu));
}

// The least float32 that is not below a float64.
static inline float ceil_to_float(double value) {
  const float nearest = static_cast<float>(value);
  return static_cast<double>(nearest) < value ? nextafterf(nearest, __builtin_inff()) : nearest;
}

static inline float floor_to_float(double value) {
  const float nearest = static_cast<float>(value);
  return static_cast<double>(nearest) > value ? nextafterf(nearest, -__builtin_inff()) : nearest;
}

struct Selection {
  float value;
  double above;    // measure of what is larger than the value
  double reached;  // the same with what equals it
};

// Lanes of a selection's sums, and entries that are read at a time.
constexpr int64_t SELECT_LANES = 16;
constexpr int64_t SELECT_STEP = 128;

static inline float median(float first, float second, float third) {
  const float low = first < second ? first : second;
  const float high = first < second ? second : first;
  return third < low ? low : third > high ? high : third;
}

// A median of three medians where there are enough values for it to pay.
static inline float choose_pivot(const float* values, int64_t count) {
  const float* last = values + count - 1;
  const int64_t step = count / 8;
  if (step < 8) return median(values[0], values[count / 2], *last);
  return median(median(values[0], values[step], values[2 * step]),
                median(values[3 * step], values[4 * step], values[5 * step]),
                median(values[6 * step], values[7 * step], *last));
}

struct Sides {
  double greater;  // measure of the values > the pivot
  double equal;    // of those equal to it
};

// Counts, or sums measures; NaN is on neither side.
template <bool COUNTS>
static Sides measure_sides(const float* values, const double* measures, int64_t padded, float pivot) {
  double greater[SELECT_LANES] = {}, equal[SELECT_LANES] = {};
  for (int64_t begin = 0; begin < padded; begin += SELECT_STEP) {
#pragma omp simd
    for (int64_t lane = 0; lane < SELECT_LANES; ++lane) {
      double more = greater[lane], same = equal[lane];
#pragma GCC unroll 8
      for (int64_t part = begin; part < begin + SELECT_STEP; part += SELECT_LANES) {
        const float value = values[part + lane];
        const double measure = COUNTS ? 1.0 : measures[part + lane];
        more += value > pivot ? measure : 0.0;
        same += value == pivot ? measure : 0.0;
      }
      greater[lane] = more, equal[lane] = same;
    }
  }
  return {sum_of_lanes<SELECT_LANES>(greater), sum_of_lanes<SELECT_LANES>(equal)};
}

// Moves the values on one side of the pivot to the front. Written without a branch, which would be mispredicted.
template <bool COUNTS>
static int64_t keep_side(float* values, double* measures, int64_t count, float pivot, bool greater) {
  int64_t kept = 0;
  for (int64_t index = 0; index < count; ++index) {
    const float value = values[index];
    values[kept] = value;
    if (!COUNTS) measures[kept] = measures[index];
    kept += static_cast<int64_t>(greater ? value > pivot : value < pivot);
  }
  return kept;
}

// The largest value whose entries >= it, with `above` from others larger still, reach `wanted`; else the least value.
// `values`, and measures unless it COUNTS, are written to and have room for whole steps.
template <bool COUNTS>
static Selection select(float* values, double* measures, int64_t count, double above, double wanted) {
  while (true) {
    const float pivot = choose_pivot(values, count);
    const int64_t padded = ceil_div(count, SELECT_STEP) * SELECT_STEP;
    for (int64_t index = count; index < padded; ++index) values[index] = __builtin_nanf("");
    const Sides sides = measure_sides<COUNTS>(values, measures, padded, pivot);
    const double reached = above + sides.greater + sides.equal;
    const bool greater = sides.greater > 0.0 && above + sides.greater >= wanted;
    if (!greater && reached >= wanted) return {pivot, above + sides.greater, reached};
    const int64_t kept = keep_side<COUNTS>(values, measures, count, pivot, greater);
    if (kept == 0) return {pivot, above + sides.greater, reached};
    if (!greater) above = reached;
    count = kept;
  }
}
