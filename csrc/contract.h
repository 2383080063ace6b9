// What the operators hand to the kernels: status bits and views of raw memory. Knows neither torch nor vectors.
#pragma once

#include <cstdint>

namespace specker {

// The numbers of specker/status.py.
enum Status : int32_t {
  TARGET_INVALID = 1,
  DRAFT_INVALID = 2,
  DRAFT_TOKEN_PLACEHOLDER = 4,
  DRAFT_TOKEN_OUT_OF_RANGE = 8,
  DRAFT_TOKEN_IMPOSSIBLE = 16,
  RESIDUAL_EMPTY = 32,
  INVALID_TEMPERATURE = 64,
  INVALID_TOP_P = 128,
  INVALID_MIN_P = 256,
  INVALID_NUM_DRAFT_TOKENS = 512,
  INVALID_UNIFORMS = 1024,
  INVALID_DRAFT_INDEX = 2048,
};

constexpr int64_t PLACEHOLDER_TOKEN_ID = -1;

// One predicate in every backend: a temperature below this is greedy.
constexpr double GREEDY_TEMPERATURE = 1e-5;

constexpr uint32_t DRAFT_PURPOSE = 0;
constexpr uint32_t VERIFY_PURPOSE = 1;

constexpr int RECEIPT_FIELDS = 4;

enum class DType : int32_t { FLOAT32, BFLOAT16, FLOAT16 };

// One number a sequence, int32 or int64; stride 0 broadcasts, a null pointer is "off".
struct Integers {
  const void* data;
  bool is_int64;
  int64_t stride;
};

// One number a sequence, float32 or float64; stride 0 broadcasts, a null pointer is "off".
struct Reals {
  const void* data;
  bool is_float64;
  int64_t stride;
};

// Row (sequence, index) of a padded or flat tensor starts at sequence * stride_sequence + (start + index) * stride_row.
struct Rows {
  const void* data;
  DType dtype;
  bool is_probs;
  int64_t stride_sequence;
  int64_t stride_row;
};

// A sparse bias and an allowed-token mask of the rows of one tensor; null pointers are "off".
struct Adjustments {
  const int64_t* bias_offsets;  // (batch + 1)
  const int64_t* bias_token_ids;  // ascending within a sequence
  const float* bias_values;
  const int32_t* allowed_tokens;  // one bit a token
  int64_t allowed_stride_sequence;
  int64_t allowed_stride_row;
};

struct SamplingParameters {
  Reals temperature;
  Integers top_k;
  Reals top_p;
  Reals min_p;
};

// Outputs come first, then inputs, sizes and strides; tensors that were not asked for or not given are null.
struct VerifyArguments {
  int64_t* token_ids;        // (batch, gamma + 1)
  int64_t* num_accepted;     // (batch)
  int64_t* num_emitted;      // (batch)
  int32_t* status;           // (batch)
  float* logprobs;           // (batch, gamma + 1)
  float* accept_probs;       // (batch, gamma)
  float* expected_accepted;  // (batch)
  bool returns_accept_probs;  // the pointers above may be null for empty tensors

  Integers draft_token_ids;  // stride: from one position to the next
  int64_t draft_token_ids_stride_sequence;
  Rows target;
  Rows draft;
  bool has_draft;  // an empty tensor has no memory, but is there
  const double* receipt;  // token_logit, row_max, threshold, weight_sum
  int64_t receipt_stride_sequence;
  int64_t receipt_stride_row;
  int64_t receipt_stride_field;
  Integers num_draft_tokens;
  Integers cu_num_draft_tokens;
  Integers draft_index;
  SamplingParameters sampling;
  SamplingParameters draft_sampling;
  Adjustments adjustments;
  Adjustments draft_adjustments;
  const int64_t* draft_columns;  // of a reduced draft vocabulary, ordered by target id; null is one column a token
  const int64_t* draft_column_target_ids;
  Integers seed;
  Integers position;
  const double* uniforms;  // accept, emission
  int64_t uniforms_stride_sequence;
  int64_t uniforms_stride_row;
  int64_t uniforms_stride_field;

  int64_t batch;
  int64_t gamma;
  int64_t vocab;
  int64_t draft_vocab;
  int64_t draft_slots;  // leading rows of the draft tensor, for draft_index
  int64_t total_draft_tokens;
  bool has_bonus_rows;  // a row behind the drafts of each sequence; flat target rows may be one a draft token
};

struct SampleArguments {
  int64_t* token_ids;  // (batch)
  int32_t* status;     // (batch)
  double* receipt;     // (batch, RECEIPT_FIELDS)

  Rows logits;
  SamplingParameters sampling;
  Adjustments adjustments;
  Integers seed;
  Integers position;

  int64_t batch;
  int64_t vocab;
};

// Integers of every sequence, int32 or int64, one or several; stride 0 broadcasts, a null pointer is "off".
struct Cells {
  void* data;
  bool is_int64;
  int64_t stride_sequence;
  int64_t stride_index;
};

static inline int64_t integer_at(const void* data, bool is_int64, int64_t offset) {
  return is_int64 ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
}

static inline int64_t integer_at(const Integers& integers, int64_t offset) {
  return integer_at(integers.data, integers.is_int64, offset);
}

static inline double real_at(const Reals& reals, int64_t offset) {
  return reals.is_float64 ? static_cast<const double*>(reals.data)[offset]
                          : static_cast<const float*>(reals.data)[offset];
}

static inline int64_t cell_at(const Cells& cells, int64_t sequence, int64_t index = 0) {
  return integer_at(cells.data, cells.is_int64, sequence * cells.stride_sequence + index * cells.stride_index);
}

// What a round is written into, behind what `verify` told of it.
struct DeliverArguments {
  Cells output_token_ids;  // (batch, gamma + 1), or (output_size) where there are places
  Cells output_places;     // (batch, columns)
  Cells passed_total;      // (batch), added to, as the next two
  Cells accepted_total;
  Cells emitted_total;
  Cells status_total;  // (batch), or-ed into

  const int64_t* token_ids;     // (batch, gamma + 1)
  const int64_t* num_accepted;  // (batch)
  const int64_t* num_emitted;   // (batch)
  const int32_t* status;        // (batch)
  const float* accept_probs;    // (batch, gamma)
  Cells seed;                   // (batch) or (1), as position
  Cells position;
  Cells bonus_token_ids;  // (batch)
  Cells places;           // (batch, >= gamma + 1)

  int64_t padding;
  int64_t gamma;
  int64_t columns;
  int64_t output_size;
};

void deliver_sequence(const DeliverArguments& arguments, int64_t sequence);

// Runs body(context, begin, end) over parts of [0, count), on one thread or several; results do not depend on which.
struct Executor {
  void (*run)(int64_t count, void (*body)(void* context, int64_t begin, int64_t end), void* context);
};

// One build of the kernels. Each call serves one sequence.
struct Kernels {
  const char* name;
  void (*verify)(const VerifyArguments& arguments, int64_t sequence, Executor executor);
  void (*sample)(const SampleArguments& arguments, int64_t sequence, Executor executor);
  // Writes exp(differences / temperature) for differences <= 0; count is a multiple of 64.
  void (*weigh)(const float* differences, float* weights, int64_t count, double temperature);
};

const Kernels& default_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

}  // namespace specker
