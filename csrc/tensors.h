// Tensors as the kernels take them: raw pointers, strides and flags. Included by operators.cpp alone.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "contract.h"

namespace specker {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor allocate(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor allocate(std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(sizes.begin()[1], 1);
  return allocate(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype);
}

template <class Element>
Element* data_of(const Tensor& tensor, bool wanted = true) {
  return wanted ? static_cast<Element*>(tensor.mutable_data_ptr()) : nullptr;
}

int64_t broadcast_stride(const Tensor& tensor) { return tensor.numel() == 1 ? 0 : tensor.stride(0); }

Integers integers(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return {nullptr, false, 0};
  const ScalarType dtype = tensor->scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, name, ": expected dtype int64 or int32");
  return {tensor->const_data_ptr(), dtype == ScalarType::Long, broadcast_stride(*tensor)};
}

Reals reals(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return {nullptr, false, 0};
  const ScalarType dtype = tensor->scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Double || dtype == ScalarType::Float, name,
                  ": expected dtype float64 or float32");
  return {tensor->const_data_ptr(), dtype == ScalarType::Double, broadcast_stride(*tensor)};
}

DType logits_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::FLOAT32;
    case ScalarType::BFloat16:
      return DType::BFLOAT16;
    case ScalarType::Half:
      return DType::FLOAT16;
    default:
      STD_TORCH_CHECK(false, name, ": expected dtype float32, bfloat16 or float16");
      return DType::FLOAT32;
  }
}

Rows rows(const OptionalTensor& tensor, bool is_probs, const char* name) {
  if (!tensor) return {nullptr, DType::FLOAT32, is_probs, 0, 0};
  const int64_t rank = tensor->dim();
  STD_TORCH_CHECK(tensor->size(rank - 1) <= 1 || tensor->stride(rank - 1) == 1, name,
                  ": expected a contiguous last axis");
  return {tensor->const_data_ptr(), logits_dtype(*tensor, name), is_probs, rank == 3 ? tensor->stride(0) : 0,
          tensor->stride(rank - 2)};
}

SamplingParameters parameters(const Tensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                              const OptionalTensor& min_p) {
  return {reals(temperature, "temperature"), integers(top_k, "top_k"), reals(top_p, "top_p"), reals(min_p, "min_p")};
}

template <class Element>
const Element* elements(const OptionalTensor& tensor, ScalarType dtype, const char* name) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == dtype, name, ": unexpected dtype");
  const int64_t last = tensor->dim() - 1;
  STD_TORCH_CHECK(tensor->size(last) <= 1 || tensor->stride(last) == 1, name, ": expected a contiguous last axis");
  return static_cast<const Element*>(tensor->const_data_ptr());
}

Adjustments adjustments(const OptionalTensor& bias_offsets, const OptionalTensor& bias_token_ids,
                        const OptionalTensor& bias_values, const OptionalTensor& allowed_tokens) {
  return {elements<int64_t>(bias_offsets, ScalarType::Long, "bias_offsets"),
          elements<int64_t>(bias_token_ids, ScalarType::Long, "bias_token_ids"),
          elements<float>(bias_values, ScalarType::Float, "bias_values"),
          elements<int32_t>(allowed_tokens, ScalarType::Int, "allowed_tokens"),
          allowed_tokens ? allowed_tokens->stride(0) : 0,
          allowed_tokens ? allowed_tokens->stride(1) : 0};
}

const double* doubles(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Double, name, ": expected dtype float64");
  return static_cast<const double*>(tensor->const_data_ptr());
}

Cells cells(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return {nullptr, false, 0, 0};
  const ScalarType dtype = tensor->scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, name, ": expected dtype int64 or int32");
  // One element stands for the whole batch; several positions of it do not.
  return {tensor->mutable_data_ptr(), dtype == ScalarType::Long, tensor->size(0) == 1 ? 0 : tensor->stride(0),
          tensor->stride(tensor->dim() - 1)};
}

}  // namespace
}  // namespace specker
