// The ops that cast an operand apart from a linear (ops.cpp says what they do).
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "python/shim/plans/plans.hpp"

namespace float8_torch {

// The quantizer of an operand with so many rows, whose type has this code of PyTorch's.
[[nodiscard]] QuantizerKey cast_key(Config config, const Place& place, float8_operand operand,
                                    int64_t rows, int64_t cols, int32_t dtype, int64_t copies);

std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t config, int64_t operand, bool backward,
                                    const std::optional<Tensor>& scales, int64_t layout,
                                    bool evaluate);
Tensor quantize_again(const Tensor& x, const Tensor& x_qt, int64_t config,
                      const std::optional<Tensor>& scales, int64_t layout,
                      const std::optional<Tensor>& behind);
std::tuple<Tensor, Tensor> quantize_rms_norm(const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd, int64_t config, bool backward,
                                             const std::optional<Tensor>& scales, int64_t layout,
                                             bool evaluate);
Tensor quantize_rms_norm_again(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                               const Tensor& x_qt, int64_t config);
std::tuple<Tensor, Tensor> quantize_layer_norm(const Tensor& x, const Tensor& weight,
                                               const std::optional<Tensor>& bias,
                                               const Tensor& mean, const Tensor& rstd,
                                               int64_t config, bool backward,
                                               const std::optional<Tensor>& scales, int64_t layout,
                                               bool evaluate);
Tensor quantize_layer_norm_again(const Tensor& x, const Tensor& weight,
                                 const std::optional<Tensor>& bias, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& x_qt, int64_t config);
// `activation`: a float8_activation; with `up` what it makes of x is a gate.
std::tuple<Tensor, Tensor> quantize_activation(const Tensor& x, const std::optional<Tensor>& up,
                                               int64_t activation, int64_t config, bool backward,
                                               const std::optional<Tensor>& scales, int64_t layout,
                                               bool evaluate);
Tensor quantize_activation_again(const Tensor& x, const std::optional<Tensor>& up,
                                 int64_t activation, const Tensor& x_qt, int64_t config,
                                 const std::optional<Tensor>& scales, int64_t layout,
                                 const Tensor& behind);
std::tuple<Tensor, Tensor, Tensor> quantize_activation_backward(const Tensor& grad, const Tensor& x,
                                                                int64_t activation, int64_t config,
                                                                bool sums,
                                                                const std::optional<Tensor>& scales,
                                                                int64_t layout);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_glu_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t activation, int64_t config,
    bool sums, std::vector<Tensor> scales, int64_t layout);
std::tuple<Tensor, Tensor, Tensor> quantize_merged_glu_backward(
    const Tensor& grad, const Tensor& gate_up, bool up_first, int64_t activation, int64_t config,
    bool sums, const std::optional<Tensor>& scales, int64_t layout);
// The casts of the same where ranks have other columns, in two calls.
std::tuple<Tensor, Tensor, Tensor> quantize_activation_amax(const Tensor& x,
                                                            const std::optional<Tensor>& up,
                                                            const std::optional<Tensor>& grad,
                                                            int64_t activation, int64_t config);
std::vector<Tensor> quantize_activation_shard(const Tensor& x, const std::optional<Tensor>& up,
                                              const std::optional<Tensor>& grad, const Tensor& left,
                                              const Tensor& amax, const Tensor& row_amax,
                                              int64_t activation, int64_t config);

// A weight's kept copies come with their state: a fingerprint, and the flag that says whether the
// copies are of the weight that it is of.
inline constexpr size_t kWeightStateBytes = 64;
static_assert(FLOAT8_FINGERPRINT_BYTES + sizeof(uint32_t) <= kWeightStateBytes);
// The seed of the fingerprint of a weight of type `own`, whose kept copies are of it as a `wanted`, which is
// a float8_dtype.
[[nodiscard]] inline uint64_t fingerprint_seed(int32_t wanted, float8_dtype own) {
  return static_cast<uint64_t>(wanted) << 8 | static_cast<uint64_t>(own);
}
// The seed with which a part of a weight, from that byte on, has its share of the weight's fingerprint, which is
// the sum of the shares: a chunk of 16 bytes is mixed with its number times this factor, and the seed
// (recipes/reference/fingerprint.hpp).
[[nodiscard]] inline uint64_t fingerprint_seed_at(uint64_t seed, uint64_t byte) {
  constexpr uint32_t kFactor = 0x9E3779B1U;
  const uint32_t low = static_cast<uint32_t>(seed) + static_cast<uint32_t>(byte / 16) * kFactor;
  return (seed >> 32 << 32) | low;
}
// Compares the bytes of a weight of type `own`, of which copies for a type `wanted` are kept, with those of
// its state. Returns the flag of the state, under which a cast is left out, or the one that is given, of
// another weight with the same copies.
uint32_t* compare_weight(float8_context* context, const Matrix& weight, float8_dtype own,
                         int32_t wanted, const Tensor& state, const Place& place,
                         uint32_t* flag = nullptr);
// Makes the state one of no weight: its fingerprint is one of which there is no cast.
void forget_weight(const Tensor& state);
// Calls `cast` with that flag.
template <class Cast>
void compare_and_cast(float8_context* context, const Matrix& weight, float8_dtype own,
                      int32_t wanted, const Tensor& state, const Place& place, const Cast& cast) {
  uint32_t* const flag = compare_weight(context, weight, own, wanted, state, place);
  try {
    cast(flag);
  } catch (...) {
    forget_weight(state);
    throw;
  }
}
// Casts the weight for an x of that type into its copies where they are not of these bytes. The
// device decides, so that nothing waits.
void refresh_weight(const Tensor& weight, const Tensor& q, const Tensor& qt, const Tensor& state,
                    int64_t config, int32_t dtype);
void cast_weight(const Tensor& weight, const Tensor& q, const Tensor& qt, const Tensor& state,
                 const Tensor& like, int64_t config);

std::tuple<Tensor, Tensor> quantize_amax(const Tensor& x, int64_t config, int64_t operand,
                                         int64_t rows_max);
std::tuple<Tensor, Tensor> quantize_shard(const Tensor& x, const Tensor& amax,
                                          const Tensor& row_amax, int64_t config, int64_t operand,
                                          int64_t rows_max);
std::tuple<int64_t, int64_t> amax_words(int64_t rows_max, int64_t cols, int64_t config,
                                        int64_t operand, int64_t whole_rows, int64_t copies);
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> copy_layout_of(
    int64_t rows_max, int64_t rows, int64_t cols, int64_t config, int64_t operand, int64_t copies,
    bool over_ranks, int64_t whole_rows);

// The same for the shards of many tensors, in few launches.
std::tuple<Tensor, Tensor> quantize_amax_list(std::vector<Tensor> x, std::vector<int64_t> config,
                                              int64_t operand, std::vector<int64_t> rows_max,
                                              std::vector<int64_t> whole_rows,
                                              std::vector<int64_t> first_rows,
                                              std::vector<int64_t> dtypes);
std::vector<Tensor> quantize_shard_list(
    std::vector<Tensor> x, std::vector<Tensor> amax, std::vector<Tensor> row_amax,
    std::vector<int64_t> config, int64_t operand, std::vector<int64_t> rows_max,
    std::vector<int64_t> whole_rows, std::vector<int64_t> first_rows, std::vector<int64_t> dtypes,
    std::optional<std::vector<Tensor>> into, std::vector<int64_t> copies);
std::vector<Tensor> quantize_list(std::vector<Tensor> x, int64_t config, int64_t operand,
                                  std::vector<Tensor> scales, int64_t layout,
                                  std::vector<int64_t> dtypes,
                                  std::optional<std::vector<Tensor>> into);

}  // namespace float8_torch
