// Random calls of the kernels, good and bad, as operators.cpp would make them.
#pragma once

#include <algorithm>
#include <cmath>

#include "memory.h"

namespace specker {

constexpr double INF = INFINITY;
constexpr double NOT_A_NUMBER = NAN;

// Where many rows start and how they are laid out.
struct Shape {
  int64_t sequences;  // 1 for flat rows
  int64_t rows;       // of each sequence
  bool flat;
};

class CallMaker {
 public:
  CallMaker(uint64_t seed, Memory* memory) : random_(seed), memory_(*memory) {}

  VerifyArguments verify_call() {
    VerifyArguments call = {};
    call.batch = random_.pick<int64_t>({0, 1, 2, 3, 5});
    call.gamma = random_.pick<int64_t>({0, 1, 2, 4});
    call.vocab = call.draft_vocab = vocabulary();
    const bool flat = random_.chance(0.3);
    std::vector<int64_t> lengths(static_cast<size_t>(call.batch), call.gamma);
    if (random_.chance(0.6)) {
      for (int64_t& length : lengths) length = random_.between(0, call.gamma);
    }
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    call.total_draft_tokens = flat ? total : 0;
    const Shape drafted = flat ? Shape{1, total, true} : Shape{call.batch, call.gamma, false};
    call.has_bonus_rows = !flat || random_.chance(0.7);
    const int64_t flat_rows = total + (call.has_bonus_rows ? call.batch : 0);
    const Shape scored = flat ? Shape{1, flat_rows, true} : Shape{call.batch, call.gamma + 1, false};
    add_lengths(&call, lengths, flat);
    call.target = rows(scored, call.vocab, random_.chance(0.25));
    call.sampling = parameters(call.batch);
    call.draft_sampling = random_.chance(0.5) ? call.sampling : parameters(call.batch);
    call.adjustments = adjustments(call.batch, scored, call.vocab);
    add_tokens(&call, drafted);
    if (random_.chance(0.75)) add_draft(&call, drafted);
    add_random_numbers(&call, scored);
    call.returns_accept_probs = random_.chance(0.6);
    return call;
  }

  SampleArguments sample_call() {
    SampleArguments call = {};
    call.batch = random_.pick<int64_t>({0, 1, 3});
    call.vocab = vocabulary();
    call.logits = rows({call.batch, 1, false}, call.vocab, false);
    call.sampling = parameters(call.batch);
    call.adjustments = adjustments(call.batch, {call.batch, 1, false}, call.vocab);
    call.seed = integers(words(call.batch));
    call.position = integers(words(call.batch));
    return call;
  }

 private:
  int64_t vocabulary() {
    return random_.pick<int64_t>({1, 2, 3, 5, 31, 63, 64, 65, 127, 128, 129, 257, 511, 512, 513, 1000, 4095, 4096, 4097,
                                  4999, 8192, 9000, 12345});
  }

  std::vector<int64_t> words(int64_t batch) {
    std::vector<int64_t> values(static_cast<size_t>(random_.chance(0.3) ? 1 : batch));
    for (int64_t& value : values) value = static_cast<int64_t>(random_.next());
    return values;
  }

  // Elements `spread` apart in a block that ends with the last one.
  template <class Stored, class Value>
  const void* scattered(const std::vector<Value>& values, int64_t spread) {
    const int64_t count = static_cast<int64_t>(values.size());
    Stored* block = memory_.allocate<Stored>(count ? (count - 1) * spread + 1 : 0);
    for (int64_t index = 0; index < count; ++index) {
      block[index * spread] = static_cast<Stored>(values[static_cast<size_t>(index)]);
    }
    return block;
  }

  // Single numbers serve every sequence, as broadcast tensors do.
  Integers integers(const std::vector<int64_t>& values, bool may_narrow = false) {
    const int64_t spread = random_.between(1, 2);
    const bool narrow = may_narrow && random_.chance(0.5);
    const void* data = narrow ? scattered<int32_t>(values, spread) : scattered<int64_t>(values, spread);
    return {data, !narrow, values.size() == 1 ? 0 : spread};
  }

  Reals reals(int64_t batch, std::initializer_list<double> options) {
    std::vector<double> values(static_cast<size_t>(random_.chance(0.3) ? 1 : batch));
    for (double& value : values) value = random_.pick(options);
    if (!values.empty() && random_.chance(0.05)) values[0] = random_.pick({-1.0, 1.5, INF, NOT_A_NUMBER});
    const int64_t spread = random_.between(1, 2);
    const bool wide = random_.chance(0.5);
    const void* data = wide ? scattered<double>(values, spread) : scattered<float>(values, spread);
    return {data, wide, values.size() == 1 ? 0 : spread};
  }

  SamplingParameters parameters(int64_t batch) {
    SamplingParameters sampling = {};
    sampling.temperature = reals(batch, {0.0, 1e-6, 1e-4, 0.3, 1.0, 1.0, 1.5, 1e31});
    if (random_.chance(0.5)) return sampling;
    if (random_.chance(0.5)) {
      std::vector<int64_t> values(static_cast<size_t>(random_.chance(0.3) ? 1 : batch));
      for (int64_t& value : values) value = random_.pick<int64_t>({-1, 0, 1, 2, 5, 50, 700, 5000, 1 << 30});
      sampling.top_k = integers(values, true);
    }
    if (random_.chance(0.5)) sampling.top_p = reals(batch, {0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 0x1p-53, 1.0, 2.0});
    if (random_.chance(0.5)) sampling.min_p = reals(batch, {0.0, 1e-9, 0.05, 0.5, 1.0});
    return sampling;
  }

  void fill_row(char* row, int64_t vocab, DType dtype, bool is_probs) {
    enum Kind { PLAIN, TIED, FLAT, MASKED, PEAKED, NARROW, CLUSTERED, EXTREME };
    const Kind kind = random_.pick({PLAIN, PLAIN, TIED, FLAT, MASKED, PEAKED, NARROW, CLUSTERED, EXTREME});
    const int64_t peak = random_.below(vocab);
    const float nothing = is_probs ? 0.0f : -INFINITY;
    for (int64_t index = 0; index < vocab; ++index) {
      double value = 3.0 * random_.bell();
      if (kind == TIED) value = std::round(value * 2.0) / 2.0;
      if (kind == FLAT) value = 0.25;
      if (kind == PEAKED && index == peak) value = 12.0;
      // Larger where the filters take their sample of the row.
      if (kind == CLUSTERED && index / 128 % ((vocab + 2047) / 2048) == 0) value += 6.0;
      if (kind == NARROW) value = 1.0 + 0x1p-23 * static_cast<double>(index);
      float stored = static_cast<float>(is_probs ? std::exp(value) : value);
      if (kind == MASKED && index && random_.chance(0.9)) stored = nothing;
      if (kind == EXTREME) stored = random_.pick({3e38f, 1e-40f, 0.0f, is_probs ? 1.0f : -3e38f, 2.0f});
      store(row, index, dtype, stored);
    }
    if (!random_.chance(0.05)) return;
    store(row, peak, dtype, random_.pick({INFINITY, -1.0f, NAN}));
    if (random_.chance(0.5)) return;
    for (int64_t index = 0; index < vocab; ++index) store(row, index, dtype, nothing);
  }

  // Rows with poisoned gaps between them, in either order of their two leading axes, or all of them the same row.
  Rows rows(const Shape& shape, int64_t vocab, bool is_probs) {
    const DType dtype = random_.pick({DType::FLOAT32, DType::BFLOAT16, DType::FLOAT16});
    const int64_t width = dtype == DType::FLOAT32 ? 4 : 2;
    const int64_t gap = random_.pick<int64_t>({0, 16, 32}), lead = random_.pick<int64_t>({0, 0, 3}) * width;
    const int64_t stride = gap ? (vocab * width + 7) / 8 * 8 + gap : vocab * width;
    const bool repeats = shape.rows > 0 && random_.chance(0.1);
    const int64_t count = repeats ? std::min<int64_t>(shape.sequences, 1) : shape.sequences * shape.rows;
    char* block = memory_.allocate<char>(count ? lead + (count - 1) * stride + vocab * width : 0);
    for (int64_t row = 0; row < count; ++row) {
      char* begin = block + lead + row * stride;
      fill_row(begin, vocab, dtype, is_probs);
      char* end = begin + vocab * width;
      if (row + 1 < count) ASAN_POISON_MEMORY_REGION(end, static_cast<size_t>(begin + stride - end));
    }
    const void* data = block ? block + lead : block;
    if (repeats) return {data, dtype, is_probs, 0, 0};
    const int64_t apart = stride / width;
    if (shape.flat) return {data, dtype, is_probs, 0, apart};
    if (random_.chance(0.3)) return {data, dtype, is_probs, apart, shape.sequences * apart};
    return {data, dtype, is_probs, shape.rows * apart, apart};
  }

  Adjustments adjustments(int64_t batch, const Shape& shape, int64_t vocab) {
    Adjustments changes = {};
    if (random_.chance(0.15)) {
      std::vector<int64_t> offsets = {0}, ids;
      std::vector<float> values;
      for (int64_t sequence = 0; sequence < batch; ++sequence) {
        const size_t first = ids.size();
        for (int64_t count = random_.below(5); count > 0; --count) {
          ids.push_back(random_.pick({random_.below(vocab), vocab - 1}));
          values.push_back(random_.pick({1.5f, -2.0f, -INFINITY}));
        }
        std::sort(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      changes.bias_offsets = memory_.copy(offsets);
      changes.bias_token_ids = memory_.copy(ids);
      changes.bias_values = memory_.copy(values);
    }
    if (random_.chance(0.15)) {
      const bool whole = random_.chance(0.3);
      const int64_t size = (vocab + 31) / 32, count = whole ? 1 : shape.sequences * shape.rows;
      int32_t* bits = memory_.allocate<int32_t>(size * count);
      for (int64_t word = 0; word < size * count; ++word) {
        bits[word] = static_cast<int32_t>(random_.next() | random_.next());
      }
      changes.allowed_tokens = bits;
      changes.allowed_stride_sequence = whole || shape.flat ? 0 : shape.rows * size;
      changes.allowed_stride_row = whole ? 0 : size;
    }
    return changes;
  }

  void add_lengths(VerifyArguments* call, std::vector<int64_t> lengths, bool flat) {
    if (flat) {
      std::vector<int64_t> bounds = {0};
      for (const int64_t length : lengths) bounds.push_back(bounds.back() + length);
      if (random_.chance(0.05)) bounds.back() = random_.pick<int64_t>({-1, 1000, INT64_MAX});
      call->cu_num_draft_tokens = integers(bounds, true);
      // One bound is not a number for all sequences.
      if (bounds.size() == 1) call->cu_num_draft_tokens.stride = 1;
    } else if (random_.chance(0.6)) {
      if (!lengths.empty() && random_.chance(0.1)) lengths[0] = random_.pick<int64_t>({-1, call->gamma + 1, INT64_MIN});
      call->num_draft_tokens = integers(lengths, true);
    }
  }

  void add_tokens(VerifyArguments* call, const Shape& shape) {
    std::vector<int64_t> tokens(static_cast<size_t>(shape.sequences * shape.rows));
    for (int64_t& token : tokens) {
      token = random_.below(call->vocab);
      if (random_.chance(0.1)) token = random_.pick<int64_t>({-1, -2, INT32_MIN, call->vocab, INT32_MAX});
    }
    call->draft_token_ids = integers(tokens, true);
    if (tokens.size() == 1) call->draft_token_ids.stride = 1;
    call->draft_token_ids_stride_sequence = shape.flat ? 0 : shape.rows * call->draft_token_ids.stride;
  }

  void add_draft(VerifyArguments* call, const Shape& shape) {
    call->has_draft = true;
    const bool is_probs = random_.chance(0.25);
    if (random_.chance(0.2)) add_columns(call);
    const bool has_index = random_.chance(0.2);
    call->draft = rows(has_index ? Shape{call->batch, call->gamma, false} : shape, call->draft_vocab, is_probs);
    call->draft_slots = has_index || !shape.flat ? call->batch : shape.rows;
    call->draft_adjustments = adjustments(call->batch, shape, call->draft_vocab);
    if (has_index) {
      std::vector<int64_t> slots(static_cast<size_t>(call->batch));
      for (int64_t& slot : slots) {
        slot = random_.below(call->batch);
        if (random_.chance(0.1)) slot = random_.pick<int64_t>({-1, call->batch});
      }
      call->draft_index = integers(slots, true);
    } else if (!is_probs && random_.chance(0.3)) {
      add_receipt(call, shape);
    }
  }

  // A draft vocabulary of its own: each column stands for some target id.
  void add_columns(VerifyArguments* call) {
    call->draft_vocab = random_.pick<int64_t>({1, 3, 40, 5000});
    std::vector<int64_t> columns(static_cast<size_t>(call->draft_vocab)), ids(columns.size());
    for (size_t column = 0; column < columns.size(); ++column) columns[column] = static_cast<int64_t>(column);
    for (size_t column = columns.size(); column > 1; --column) {
      std::swap(columns[column - 1], columns[static_cast<size_t>(random_.below(static_cast<int64_t>(column)))]);
    }
    for (int64_t& id : ids) id = random_.below(call->vocab);
    std::sort(ids.begin(), ids.end());
    call->draft_columns = memory_.copy(columns);
    call->draft_column_target_ids = memory_.copy(ids);
  }

  // Receipts that may belong to other rows: what they say must not lead out of bounds.
  void add_receipt(VerifyArguments* call, const Shape& shape) {
    const int64_t count = shape.sequences * shape.rows;
    double* receipt = memory_.allocate<double>(count * RECEIPT_FIELDS);
    for (int64_t row = 0; row < count; ++row) {
      const double row_max = 3.0 + 3.0 * random_.uniform(), threshold = random_.pick({-INF, 0.0, row_max});
      const double value = random_.chance(0.5) ? row_max : 3.0 * random_.bell();
      const double fields[] = {value, row_max, threshold, random_.pick({1.0, 2.0, 40.0, 1e4, 0.0, NOT_A_NUMBER})};
      std::memcpy(receipt + row * RECEIPT_FIELDS, fields, sizeof fields);
    }
    call->receipt = receipt;
    call->receipt_stride_field = 1;
    call->receipt_stride_row = RECEIPT_FIELDS;
    call->receipt_stride_sequence = shape.flat ? 0 : shape.rows * RECEIPT_FIELDS;
  }

  void add_random_numbers(VerifyArguments* call, const Shape& shape) {
    if (random_.chance(0.4)) {
      call->seed = integers(words(call->batch));
      call->position = integers(words(call->batch));
      return;
    }
    std::vector<double> pairs(static_cast<size_t>(shape.sequences * shape.rows * 2));
    for (double& uniform : pairs) {
      uniform = random_.chance(0.1) ? random_.pick({0.0, 1.0 - 0x1p-53}) : random_.uniform();
      if (random_.chance(0.005)) uniform = random_.pick({-0.1, 1.0, NOT_A_NUMBER});
    }
    // The two numbers of a pair may stand apart as well.
    const int64_t count = shape.sequences * shape.rows;
    const bool apart = random_.chance(0.3);
    call->uniforms = memory_.copy(pairs);
    call->uniforms_stride_field = apart ? count : 1;
    call->uniforms_stride_row = apart ? 1 : 2;
    call->uniforms_stride_sequence = shape.flat ? 0 : shape.rows * call->uniforms_stride_row;
  }

  Random random_;
  Memory& memory_;
};

}  // namespace specker
