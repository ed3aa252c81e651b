// Many matrices cast alike, each with its own scales: the weights of a model. Planned once from
// their sizes, then run with pointers: an amax launch (where the scales need one) and a cast launch
// for every kernels::kMaxListed matrices, as evenly as they divide.
//
// A plan is immutable and shared between threads; a workspace is one run's at a time.
#pragma once

#include <memory>
#include <vector>

#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

struct MatrixSize {
  int64_t rows = 0;
  int64_t cols = 0;  // a multiple of 16
};

class QuantizeList {
 public:
  // `cast` as for a few matrices: whether the kernels are those for lists is the plan's to say.
  [[nodiscard]] static Result<QuantizeList> plan(const std::shared_ptr<Context>& context,
                                                 const codegen::CastSpec& cast,
                                                 std::vector<MatrixSize> sizes);
  // The kernels of a plan for `count` matrices.
  [[nodiscard]] static std::vector<codegen::KernelSpec> kernel_specs(const codegen::CastSpec& cast,
                                                                     size_t count);

  [[nodiscard]] const std::vector<MatrixSize>& sizes() const { return sizes_; }
  [[nodiscard]] size_t launches() const;  // of kernels, in a run
  [[nodiscard]] size_t workspace_bytes() const { return static_cast<size_t>(words_) * 4; }
  // One operand for each planned matrix, in order and of its size. Where the maxima go is the
  // list's to say: partials, tile_amax, row_amax and col_amax are not looked at. Enqueues on
  // `stream`; no allocation, lock or synchronisation. `noop_flag`: where it holds 1, kernels with a
  // flag do nothing.
  [[nodiscard]] Status run(std::span<const QuantizeOperand> operands, void* workspace,
                           Stream stream, const uint32_t* noop_flag = nullptr) const;

 private:
  // The offsets of a matrix's amax buffers in the workspace, in 32-bit words.
  struct Words {
    int64_t partials, row, column;
  };
  QuantizeList() = default;
  template <class AmaxArgs, class CastArgs>
  [[nodiscard]] Status run_groups(std::span<const QuantizeOperand> operands, uint32_t* words,
                                  const uint32_t* noop_flag, Stream stream) const;
  [[nodiscard]] Status check(std::span<const QuantizeOperand> operands,
                             const void* workspace) const;
  [[nodiscard]] size_t groups() const;

  std::shared_ptr<Context> context_;
  codegen::CastSpec cast_;
  std::vector<MatrixSize> sizes_;
  std::vector<Words> at_;
  int64_t words_ = 0;
  const Kernel* amax_kernel_ = nullptr;  // null: no maxima are needed before the cast
  const Kernel* cast_kernel_ = nullptr;
};

}  // namespace f8::runtime
