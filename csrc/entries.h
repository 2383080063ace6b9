// A row in memory and its entries as float32, a shard that fits the L1 cache at a time.

constexpr int64_t SHARD = 4096;
constexpr int64_t CHUNK = 512;
constexpr int64_t LANES = 64;
constexpr int64_t BLOCK = 128;

struct Row {
  const char* data;
  DType dtype;
  bool is_probs;
  int64_t vocab;
  Adjustment adjustment;

  bool adjusts() const { return adjustment.count > 0 || adjustment.allowed; }
  bool read_in_place() const { return dtype == DType::FLOAT32 && !adjusts(); }
};

// CHUNK-aligned entries widened to float32 and padded to whole chunks with values that weigh nothing.
struct Entries {
  const float* values;
  int64_t count;
  int64_t padded;
};

static inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }
static inline int64_t num_shards(int64_t vocab) { return ceil_div(vocab, SHARD); }
static inline int64_t num_blocks(int64_t vocab) { return ceil_div(vocab, BLOCK); }

// How far ahead of the entries being read memory is asked for, into the second cache: the hardware, which fetches what
// is read in order, stops at the end of a page. Costs nothing that shows where rows lie in a cache.
constexpr int64_t FETCHED_AHEAD = 6144, CACHE_LINE = 64;

SPECKER_INLINE void fetch_ahead(const void* begin, int64_t bytes) {
  // An address and no pointer: it may lie behind the tensor.
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) + FETCHED_AHEAD;
  for (int64_t offset = 0; offset < bytes; offset += CACHE_LINE) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + static_cast<uintptr_t>(offset)), 0, 2);
  }
}

static inline int64_t width_of(DType dtype) { return dtype == DType::FLOAT32 ? 4 : 2; }

static inline Row row_at(const Rows& rows, int64_t vocab, int64_t sequence, int64_t index,
                         const Adjustment& adjustment) {
  const int64_t offset = sequence * rows.stride_sequence + index * rows.stride_row;
  const char* data = static_cast<const char*>(rows.data) + offset * width_of(rows.dtype);
  return {data, rows.dtype, rows.is_probs, vocab, adjustment};
}

SPECKER_INLINE float float_from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

SPECKER_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

SPECKER_INLINE float widen_bfloat16(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

SPECKER_INLINE float widen_float16(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  // Subnormals are integers times 2^-24; all else only moves its exponent, and twice that for inf and NaN.
  const float subnormal = static_cast<float>(static_cast<int32_t>(bits & 0x3ff)) * 0x1p-24f;
  const float normal = float_from_bits(magnitude + (magnitude >= 0x0f800000u ? 0x70000000u : 0x38000000u));
  const float value = magnitude < 0x00800000u ? subnormal : normal;
  return sign ? -value : value;
}

template <class Widen>
static void widen_all(const uint16_t* source, int64_t count, float* out, Widen widen_one) {
#pragma omp simd
  for (int64_t index = 0; index < count; ++index) out[index] = widen_one(source[index]);
}

static void widen(const Row& row, int64_t begin, int64_t count, float* out) {
  const uint16_t* source = reinterpret_cast<const uint16_t*>(row.data) + begin;
  if (row.dtype == DType::FLOAT32) {
    __builtin_memcpy(out, row.data + begin * 4, static_cast<size_t>(count) * 4);
  } else if (row.dtype == DType::BFLOAT16) {
    widen_all(source, count, out, widen_bfloat16);
  } else {
    widen_all(source, count, out, widen_float16);
  }
  if (row.adjusts()) adjust_entries(row.adjustment, row.is_probs, begin, count, out);
}

// Pads entries to whole chunks and returns how many there are then.
static inline int64_t pad_entries(bool is_probs, int64_t count, float* entries) {
  const int64_t padded = ceil_div(count, CHUNK) * CHUNK;
  const float padding = is_probs ? 0.0f : -__builtin_inff();
  for (int64_t index = count; index < padded; ++index) entries[index] = padding;
  return padded;
}

// Entries [begin, end) of a row, begin a multiple of CHUNK; float32 rows are read in place where no padding is due.
static Entries load_entries(const Row& row, int64_t begin, int64_t end, float* buffer) {
  const int64_t count = (end < row.vocab ? end : row.vocab) - begin;
  const int64_t padded = ceil_div(count, CHUNK) * CHUNK;
  if (row.read_in_place() && padded == count) {
    return {reinterpret_cast<const float*>(row.data) + begin, count, padded};
  }
  widen(row, begin, count, buffer);
  return {buffer, count, pad_entries(row.is_probs, count, buffer)};
}

template <int64_t WIDTH>
SPECKER_INLINE float largest_lane(const float* lanes) {
  if constexpr (WIDTH == 1) {
    return lanes[0];
  } else {
    float folded[WIDTH / 2];
    for (int64_t lane = 0; lane < WIDTH / 2; ++lane) folded[lane] = larger(lanes[lane], lanes[lane + WIDTH / 2]);
    return largest_lane<WIDTH / 2>(folded);
  }
}

// By halves, since each addition waits for the one before it.
template <int64_t WIDTH, class Value>
SPECKER_INLINE Value sum_of_lanes(const Value* lanes) {
  if constexpr (WIDTH == 1) {
    return lanes[0];
  } else {
    Value folded[WIDTH / 2];
#pragma omp simd
    for (int64_t lane = 0; lane < WIDTH / 2; ++lane) folded[lane] = lanes[lane] + lanes[lane + WIDTH / 2];
    return sum_of_lanes<WIDTH / 2>(folded);
  }
}

// Sums what `term` gives for the entries, `threshold` and above, in float32 over 8 terms and float64 beyond.
template <bool FILTERED, class Term>
static double sum_terms(const Entries& entries, float threshold, Term term) {
  constexpr int64_t TERMS = CHUNK / LANES;
  double lanes[LANES] = {};
  for (const float* chunk = entries.values; chunk < entries.values + entries.padded; chunk += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) {
      float terms[TERMS];
#pragma GCC unroll 8
      for (int64_t part = 0; part < TERMS; ++part) {
        const float value = chunk[part * LANES + lane];
        const float weight = term(value);
        terms[part] = !FILTERED || value >= threshold ? weight : 0.0f;
      }
      const float low = (terms[0] + terms[1]) + (terms[2] + terms[3]);
      const float high = (terms[4] + terms[5]) + (terms[6] + terms[7]);
      lanes[lane] += static_cast<double>(low + high);
    }
  }
  return sum_of_lanes<LANES>(lanes);
}

struct Measure {
  float largest;
  bool valid;
};

// The largest value, and whether there is no NaN, no +inf and, among probabilities, nothing negative. `read` gives the
// value at an index, so that rows of two bytes an entry are widened on the way.
template <bool IS_PROBS, class Read>
static Measure measure_values(int64_t padded, Read read) {
  float largest[LANES], smallest[LANES], checks[LANES];
  for (int64_t lane = 0; lane < LANES; ++lane) {
    largest[lane] = -__builtin_inff();
    smallest[lane] = 0.0f;
    checks[lane] = 0.0f;
  }
  for (int64_t begin = 0; begin < padded; begin += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) {
      float most = largest[lane], least = smallest[lane], check = checks[lane];
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        const float value = read(begin + part + lane);
        most = value > most ? value : most;
        // A sum keeps NaN and +inf, and the factor keeps finite values from growing into them.
        check = multiply_add(value, 0x1p-20f, check);
        if (IS_PROBS) least = value < least ? value : least;
      }
      largest[lane] = most, smallest[lane] = least, checks[lane] = check;
    }
  }
  Measure measure = {-__builtin_inff(), true};
  for (int64_t lane = 0; lane < LANES; ++lane) {
    if (largest[lane] > measure.largest) measure.largest = largest[lane];
    if (!(checks[lane] < __builtin_inff()) || smallest[lane] < 0.0f) measure.valid = false;
  }
  return measure;
}

template <class Read>
static inline Measure measure_values(bool is_probs, int64_t padded, Read read) {
  return is_probs ? measure_values<true>(padded, read) : measure_values<false>(padded, read);
}

static inline Measure measure_entries(const Row& row, const Entries& entries) {
  const float* values = entries.values;
  return measure_values(row.is_probs, entries.padded, [=](int64_t index) { return values[index]; });
}

// load_entries and measure_entries in one.
static Measure load_and_measure(const Row& row, int64_t begin, int64_t end, float* buffer, Entries* entries) {
  const int64_t count = (end < row.vocab ? end : row.vocab) - begin;
  if (row.dtype == DType::FLOAT32 || row.adjusts() || count % CHUNK) {
    *entries = load_entries(row, begin, end, buffer);
    return measure_entries(row, *entries);
  }
  *entries = {buffer, count, count};
  const uint16_t* source = reinterpret_cast<const uint16_t*>(row.data) + begin;
  if (row.dtype == DType::BFLOAT16) {
    return measure_values(row.is_probs, count,
                          [=](int64_t index) { return buffer[index] = widen_bfloat16(source[index]); });
  }
  return measure_values(row.is_probs, count,
                        [=](int64_t index) { return buffer[index] = widen_float16(source[index]); });
}

// The same of logits where they lie, by the bits: as signed integers they have the order of the floats that are
// positive, as unsigned ones the reverse order of those that are not. A maximum of integers costs half that of floats.
template <class Signed, class Unsigned, class Widen>
static Measure measure_words(const Unsigned* words, int64_t count, Unsigned infinity, Widen widen_one) {
  constexpr Unsigned SIGN_BIT = static_cast<Unsigned>(Unsigned(1) << (8 * sizeof(Unsigned) - 1));
  Signed most = static_cast<Signed>(SIGN_BIT);
  Unsigned widest = 0, least = static_cast<Unsigned>(~Unsigned(0));
#pragma omp simd reduction(max : most, widest) reduction(min : least)
  for (int64_t index = 0; index < count; ++index) {
    const Unsigned word = words[index];
    const Signed number = static_cast<Signed>(word);
    most = number > most ? number : most;
    widest = word > widest ? word : widest;
    least = word < least ? word : least;
  }
  const Unsigned largest = most >= 0 ? static_cast<Unsigned>(most) : least;
  const bool valid = widest <= static_cast<Unsigned>(infinity | SIGN_BIT) && (most < 0 || largest < infinity);
  return {widen_one(largest), valid};
}

static Measure measure_logits(const Row& row, int64_t begin, int64_t count) {
  const char* data = row.data + begin * width_of(row.dtype);
  if (row.dtype == DType::FLOAT32) {
    return measure_words<int32_t>(reinterpret_cast<const uint32_t*>(data), count, 0x7f800000u,
                                  [](uint32_t word) { return float_from_bits(word); });
  }
  const uint16_t* words = reinterpret_cast<const uint16_t*>(data);
  if (row.dtype == DType::BFLOAT16) {
    return measure_words<int16_t>(words, count, uint16_t{0x7f80}, [](uint16_t word) { return widen_bfloat16(word); });
  }
  return measure_words<int16_t>(words, count, uint16_t{0x7c00}, [](uint16_t word) { return widen_float16(word); });
}
