// Many matrices cast alike, each with its own scales: the weights of a model. Planned once from
// their largest sizes, then run with pointers and rows: an amax launch (where the scales need one)
// and a cast launch for every kernels::kMaxListed matrices, as evenly as they divide. Matrices
// without rows are left out.
//
// A plan is immutable and shared between threads; a workspace is one run's at a time.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

struct MatrixSize {
  int64_t rows = 0;
  int64_t cols = 0;  // a multiple of 16
};

struct ListOptions {
  // The maxima are the operands' own words (partials, row_amax and col_amax), which find() raises
  // and cast() reads, so that ranks can reduce them in between. The caller clears them.
  bool given_maxima = false;
  // Leaves the maxima of each tile's rows and columns where fits_tile_amax() holds, which takes a
  // larger workspace.
  bool tile_amax = false;
  // Casts few small matrices in one launch, which needs `sync` in a run.
  bool one_launch = false;
  bool operator==(const ListOptions&) const = default;
};

class QuantizeList {
 public:
  // `cast` is as for a few matrices: the plan decides whether the kernels are those for lists.
  // `sizes` have the most rows of a run.
  [[nodiscard]] static Result<QuantizeList> plan(const std::shared_ptr<Context>& context,
                                                 const codegen::CastSpec& cast,
                                                 std::vector<MatrixSize> sizes,
                                                 const ListOptions& options = {});
  // The kernels of a plan for `count` matrices.
  [[nodiscard]] static std::vector<codegen::KernelSpec> kernel_specs(
      const codegen::CastSpec& cast, size_t count, const ListOptions& options = {});

  [[nodiscard]] const std::vector<MatrixSize>& sizes() const { return sizes_; }
  // The most kernel launches of a run.
  [[nodiscard]] size_t launches() const;
  // Those of a run with matrices of these sizes that is given `sync`.
  [[nodiscard]] size_t launches(std::span<const QuantizeOperand> operands) const;
  [[nodiscard]] size_t workspace_bytes() const { return static_cast<size_t>(words_) * 4; }
  // The operands are those of the planned matrices in order, with up to their rows. A list without
  // given_maxima overwrites partials, tile_amax, row_amax and col_amax. Work is enqueued on
  // `stream`; there is no allocation, lock or synchronisation. Kernels with a flag do nothing where
  // `noop_flag` holds 1. `sync` is quantize_sync_bytes() of memory: if it is given, few small
  // matrices are cast in one launch.
  [[nodiscard]] Status run(std::span<const QuantizeOperand> operands, void* workspace,
                           Stream stream, const uint32_t* noop_flag = nullptr,
                           void* sync = nullptr) const;
  // The halves of a run with given_maxima.
  [[nodiscard]] Status find(std::span<const QuantizeOperand> operands, Stream stream) const;
  [[nodiscard]] Status cast(std::span<const QuantizeOperand> operands, Stream stream) const;

 private:
  // The offsets of a matrix's amax buffers in the workspace, in 32-bit words.
  struct Words {
    int64_t partials, row, column, tiles;
  };
  struct Run {
    std::span<const QuantizeOperand> operands = {};
    uint32_t* words = nullptr;
    const uint32_t* noop_flag = nullptr;
    void* sync = nullptr;
    Stream stream = nullptr;
    bool finds = false, casts = false;
  };
  using Group = std::array<QuantizeOperand, kernels::kMaxListed>;
  QuantizeList() = default;
  [[nodiscard]] Result<int64_t> lay_out(const std::optional<codegen::AmaxSpec>& amax, int sm_count);
  [[nodiscard]] Status start(const Run& run) const;
  template <class AmaxArgs, class CastArgs>
  [[nodiscard]] Status run_groups(const Run& run) const;
  [[nodiscard]] size_t take_group(const Run& run, size_t group, Group& out) const;
  [[nodiscard]] bool is_one_launch(const Run& run) const;
  [[nodiscard]] Status check(const Run& run) const;
  [[nodiscard]] bool has_tile_amax(const QuantizeOperand& x) const;
  [[nodiscard]] size_t groups() const;

  std::shared_ptr<Context> context_;
  codegen::CastSpec cast_;
  ListOptions options_;
  std::vector<MatrixSize> sizes_;
  std::vector<Words> at_;
  int64_t cleared_words_ = 0;  // at the front of the workspace, which a run sets to 0
  int64_t words_ = 0;
  const Kernel* amax_kernel_ = nullptr;  // null: no maxima are needed before the cast
  const Kernel* cast_kernel_ = nullptr;
  const Kernel* one_launch_kernel_ = nullptr;  // null: matrices are never cast in one launch
};

}  // namespace f8::runtime
