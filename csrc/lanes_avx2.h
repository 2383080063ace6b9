// Vectors of 8 lanes: the few operations for which plain loops have no words, a table in a register above all.
#define SPECKER_LANES 8

using Floats = __m256;
using Words = __m256i;

SPECKER_INLINE Floats load_floats(const float* at) { return _mm256_loadu_ps(at); }
SPECKER_INLINE Words load_words(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
SPECKER_INLINE void store(float* at, Floats values) { _mm256_storeu_ps(at, values); }
SPECKER_INLINE Floats all_floats(float value) { return _mm256_set1_ps(value); }
SPECKER_INLINE Words all_words(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
SPECKER_INLINE Words words_of(Floats values) { return _mm256_castps_si256(values); }
SPECKER_INLINE Floats floats_of(Words words) { return _mm256_castsi256_ps(words); }

SPECKER_INLINE Words add(Words left, Words right) { return _mm256_add_epi32(left, right); }
SPECKER_INLINE Words both(Words left, Words right) { return _mm256_and_si256(left, right); }
template <int BITS>
SPECKER_INLINE Words shift_left(Words words) {
  return _mm256_slli_epi32(words, BITS);
}
SPECKER_INLINE Words least_signed(Words left, Words right) { return _mm256_min_epi32(left, right); }
// Maxima and minima of lanes of 32 or 16 bits.
template <int BITS>
SPECKER_INLINE Words most_signed(Words left, Words right) {
  return BITS == 32 ? _mm256_max_epi32(left, right) : _mm256_max_epi16(left, right);
}
template <int BITS>
SPECKER_INLINE Words most_unsigned(Words left, Words right) {
  return BITS == 32 ? _mm256_max_epu32(left, right) : _mm256_max_epu16(left, right);
}
template <int BITS>
SPECKER_INLINE Words least_unsigned(Words left, Words right) {
  return BITS == 32 ? _mm256_min_epu32(left, right) : _mm256_min_epu16(left, right);
}

SPECKER_INLINE Floats fused(Floats left, Floats right, Floats addend) { return _mm256_fmadd_ps(left, right, addend); }
// NaN on the left gives the right.
SPECKER_INLINE Floats larger(Floats left, Floats right) { return _mm256_max_ps(left, right); }
// `chosen` where value >= bound, else 0.
SPECKER_INLINE Floats where_reached(Floats value, Floats bound, Floats chosen) {
  return _mm256_and_ps(_mm256_cmp_ps(value, bound, _CMP_GE_OQ), chosen);
}
// `from`, less `value` where `measure` >= bound.
SPECKER_INLINE Floats less_where_reached(Floats measure, Floats bound, Floats from, Floats value) {
  return from - where_reached(measure, bound, value);
}
// max(value, 0) where `measure` >= bound, else 0: by its bits, of which a sign makes a negative integer.
SPECKER_INLINE Floats positive_where_reached(Floats measure, Floats bound, Floats value) {
  return where_reached(measure, bound, floats_of(most_signed<32>(words_of(value), _mm256_setzero_si256())));
}

// The entry of a table of eight that the low three bits name.
SPECKER_INLINE Words look_up(Words table, Words index) { return _mm256_permutevar8x32_epi32(table, index); }
SPECKER_INLINE Words load_table(const uint32_t* eight) { return load_words(eight); }

SPECKER_INLINE Floats widen_halves(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Adds the values to float64 sums.
SPECKER_INLINE void add_to(double* sums, Floats values) {
  const __m128 low = _mm256_castps256_ps128(values), high = _mm256_extractf128_ps(values, 1);
  _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), _mm256_cvtps_pd(low)));
  _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_loadu_pd(sums + 4), _mm256_cvtps_pd(high)));
}

// Folds lanes by halves; the one that is left stands in every lane.
template <class Choose>
SPECKER_INLINE int32_t fold_lanes(Words words, Choose choose) {
  words = choose(words, _mm256_permute2x128_si256(words, words, 1));
  words = choose(words, _mm256_shuffle_epi32(words, 0x4e));
  words = choose(words, _mm256_shuffle_epi32(words, 0xb1));
  return _mm256_extract_epi32(words, 0);
}
SPECKER_INLINE int32_t most_signed_lane(Words words) { return fold_lanes(words, most_signed<32>); }
SPECKER_INLINE uint32_t most_unsigned_lane(Words words) {
  return static_cast<uint32_t>(fold_lanes(words, most_unsigned<32>));
}
SPECKER_INLINE uint32_t least_unsigned_lane(Words words) {
  return static_cast<uint32_t>(fold_lanes(words, least_unsigned<32>));
}
