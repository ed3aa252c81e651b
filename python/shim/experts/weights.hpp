// The weights of experts in fp8, apart from their calls (ops.cpp says what the ops do).
#pragma once

#include <optional>
#include <tuple>

#include "python/shim/base/config.hpp"
#include "python/shim/base/tensors.hpp"

namespace float8_torch {

inline void set(float8_matrix& field, const Matrix& matrix) {
  field.data = matrix.data;
  field.ld = matrix.stride;
}

// A weight [experts][n][k] that a call is given: its elements, or a copy in fp8 with its inverse scales.
class ExpertWeight {
 public:
  struct Size {
    int64_t experts, n, k;
  };
  ExpertWeight() = default;
  // Elements are in a type of PyTorch's. Throws where there are neither, or the sizes are others.
  // `q`: the copy is q, else qt.
  ExpertWeight(const std::optional<Tensor>& weight, const std::optional<Tensor>& copy,
               const std::optional<Tensor>& scales, const Size& size, Config config, int32_t dtype,
               const Device& device, bool q);
  // The field is good for as long as this.
  void set(float8_matrix& field) const;

 private:
  Matrix elements_;
  std::optional<float8_tensor> view_;
};

// Casts w into q and qt, which experts_copies() gave the sizes of; with the maxima of all ranks' rows where
// they are given. With a second weight of its size the copies are of each expert's rows of both. `scales` is the part
// of a scale state, whose recipe has delayed scaling; then amax is given in a first step alone.
void experts_cast(const Tensor& w, const Tensor& q, const Tensor& qt,
                  const std::optional<Tensor>& amax, const std::optional<Tensor>& row_amax,
                  int64_t config, int64_t dtype, const std::optional<Tensor>& second_w,
                  const std::optional<Tensor>& scales, int64_t scale_layout);
// Casts w for rows of like's type into its kept copies, where they are not of its bytes; `state` is as that of
// refresh_weight (casts.hpp). With a second weight [experts][n][k] the copies are of each expert's rows of both,
// and `state` has two.
void experts_refresh(const Tensor& w, const Tensor& q, const Tensor& qt, const Tensor& state,
                     const Tensor& like, int64_t config, const std::optional<Tensor>& second_w);
std::tuple<Tensor, Tensor> experts_amax(const Tensor& w, int64_t config, int64_t dtype,
                                        const std::optional<Tensor>& second_w);
// Bytes of q and of qt with their scales; pitch and scales of q, whether these lie in qt's buffer; pitch and
// scales of qt.
std::tuple<int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t> experts_copies(
    int64_t experts, int64_t n, int64_t k, int64_t config, bool over_ranks);

}  // namespace float8_torch
