// Vectors of 16 lanes: the few operations for which plain loops have no words, a table in a register above all.
#define SPECKER_LANES 16

using Floats = __m512;
using Words = __m512i;

SPECKER_INLINE Floats load_floats(const float* at) { return _mm512_loadu_ps(at); }
SPECKER_INLINE Words load_words(const void* at) { return _mm512_loadu_si512(at); }
SPECKER_INLINE void store(float* at, Floats values) { _mm512_storeu_ps(at, values); }
SPECKER_INLINE Floats all_floats(float value) { return _mm512_set1_ps(value); }
SPECKER_INLINE Words all_words(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
SPECKER_INLINE Words words_of(Floats values) { return _mm512_castps_si512(values); }
SPECKER_INLINE Floats floats_of(Words words) { return _mm512_castsi512_ps(words); }

SPECKER_INLINE Words add(Words left, Words right) { return _mm512_add_epi32(left, right); }
SPECKER_INLINE Words both(Words left, Words right) { return _mm512_and_si512(left, right); }
template <int BITS>
SPECKER_INLINE Words shift_left(Words words) {
  return _mm512_slli_epi32(words, BITS);
}
SPECKER_INLINE Words least_signed(Words left, Words right) { return _mm512_min_epi32(left, right); }
// Maxima and minima of lanes of 32 or 16 bits.
template <int BITS>
SPECKER_INLINE Words most_signed(Words left, Words right) {
  return BITS == 32 ? _mm512_max_epi32(left, right) : _mm512_max_epi16(left, right);
}
template <int BITS>
SPECKER_INLINE Words most_unsigned(Words left, Words right) {
  return BITS == 32 ? _mm512_max_epu32(left, right) : _mm512_max_epu16(left, right);
}
template <int BITS>
SPECKER_INLINE Words least_unsigned(Words left, Words right) {
  return BITS == 32 ? _mm512_min_epu32(left, right) : _mm512_min_epu16(left, right);
}

SPECKER_INLINE Floats fused(Floats left, Floats right, Floats addend) { return _mm512_fmadd_ps(left, right, addend); }
// NaN on the left gives the right.
SPECKER_INLINE Floats larger(Floats left, Floats right) { return _mm512_max_ps(left, right); }
// `chosen` where value >= bound, else 0.
SPECKER_INLINE Floats where_reached(Floats value, Floats bound, Floats chosen) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(value, bound, _CMP_GE_OQ), chosen);
}
// `from`, less `value` where `measure` >= bound.
SPECKER_INLINE Floats less_where_reached(Floats measure, Floats bound, Floats from, Floats value) {
  return _mm512_mask_sub_ps(from, _mm512_cmp_ps_mask(measure, bound, _CMP_GE_OQ), from, value);
}
// max(value, 0) where `measure` >= bound, else 0: by its bits, of which a sign makes a negative integer.
SPECKER_INLINE Floats positive_where_reached(Floats measure, Floats bound, Floats value) {
  const __mmask16 reached = _mm512_cmp_ps_mask(measure, bound, _CMP_GE_OQ);
  return floats_of(_mm512_maskz_max_epi32(reached, words_of(value), _mm512_setzero_si512()));
}

// The entry of a table of eight, twice over in its register, that the low three bits name.
SPECKER_INLINE Words look_up(Words table, Words index) { return _mm512_permutexvar_epi32(index, table); }
SPECKER_INLINE Words load_table(const uint32_t* eight) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(eight)));
}

SPECKER_INLINE Floats widen_halves(const uint16_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Adds the values to float64 sums.
SPECKER_INLINE void add_to(double* sums, Floats values) {
  const __m256 low = _mm512_castps512_ps256(values), high = _mm512_extractf32x8_ps(values, 1);
  _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), _mm512_cvtps_pd(low)));
  _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), _mm512_cvtps_pd(high)));
}

SPECKER_INLINE int32_t most_signed_lane(Words words) { return _mm512_reduce_max_epi32(words); }
SPECKER_INLINE uint32_t most_unsigned_lane(Words words) { return _mm512_reduce_max_epu32(words); }
SPECKER_INLINE uint32_t least_unsigned_lane(Words words) { return _mm512_reduce_min_epu32(words); }
