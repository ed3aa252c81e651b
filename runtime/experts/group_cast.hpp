// The casts of a matrix whose rows are groups, each with scales of its own: what a cast of the group's
// rows alone gives, bit for bit.
#pragma once

#include <algorithm>

#include "codegen/kernels/experts/group_args.cuh"
#include "runtime/device/context.hpp"

namespace f8::runtime {

// `rows` and `groups` are the most of a call. Which pointers matter is the spec's to say.
struct GroupCastCall {
  kernels::GroupsOf groups = {};  // with a layout, or of equal groups
  const void* x = nullptr;
  int64_t rows = 0;                  // of all groups, and behind them
  int64_t ld = 0;                    // of x, elements; 0: dense, as many as the cast has columns
  kernels::RowOperands source = {};  // what the spec's source reads beside x
  uint32_t* words = nullptr;         // words() of scratch
  // Where a plan has its maxima apart, `words` are those of groups and of their columns, words_of_groups(),
  // and these are those of rows, words_of_rows().
  uint32_t* row_words = nullptr;
  // The words of groups and of rows begin with these where a plan raises them (Maxima::kRaised) and has such.
  const uint32_t* group_maxima = nullptr;
  const uint32_t* row_maxima = nullptr;
  uint8_t* q = nullptr;  // [rows][row_pitch(cols)]
  // Of equal groups [groups][cols][row_pitch(group's rows)]; of a layout's [cols][ld_qt], each group from
  // its block of columns on.
  uint8_t* qt = nullptr;
  int64_t ld_qt = 0;       // with a layout: bytes, whole 128s
  float* scale = nullptr;  // tensor: [groups][kernels::kScaleStride]; delayed: one of them
  // delayed: the scale to cast with, and the word that is raised to the amax, or null
  const float* delayed = nullptr;
  uint32_t* amax = nullptr;
  // The inverse scales of q and qt, as kernels::GroupCastArgs has them.
  float* inv_row = nullptr;
  float* inv_col = nullptr;
  int64_t scale_rows = 0;               // block1x128 of q: scale_rows_of_groups()
  const uint32_t* noop_flag = nullptr;  // with the spec's flag: nothing is cast where it holds 1
};

// The rows of the 1x128 scales of q, of m rows in so many groups: each group's are padded to whole 4s.
[[nodiscard]] constexpr int64_t scale_rows_of_groups(int64_t m, int64_t groups) {
  return (m + 3 * std::min(m, groups)) / 4 * 4;
}

// The maxima of a cast come from the call's x; from x and the call, of each the larger one; or from
// find_maxima(), and run() casts with them as they are then. kAlone: there is find_maxima(), and no cast.
enum class Maxima : uint8_t { kOwn, kRaised, kApart, kAlone };

class GroupCastPlan {
 public:
  // `spec` is a cast of groups, of `rows` rows on the average: the kernels that it takes follow from
  // these.
  [[nodiscard]] static Result<GroupCastPlan> create(const std::shared_ptr<Context>& context,
                                                    const codegen::CastSpec& spec, int64_t rows,
                                                    int64_t cols, Maxima maxima = Maxima::kOwn);
  // The kernels, to be compiled side by side.
  [[nodiscard]] static std::vector<codegen::KernelSpec> specs(const codegen::CastSpec& spec,
                                                              int64_t rows, int64_t cols,
                                                              Maxima maxima = Maxima::kOwn);
  [[nodiscard]] size_t words(int64_t rows, int64_t groups) const;
  [[nodiscard]] static size_t words_of_groups(const codegen::CastSpec& spec, int64_t groups,
                                              int64_t cols);
  [[nodiscard]] static size_t words_of_rows(const codegen::CastSpec& spec, int64_t rows);
  // Those of groups themselves, without their columns'.
  [[nodiscard]] static size_t words_of_tensors(const codegen::CastSpec& spec, int64_t groups);
  // A plan with maxima apart enqueues a memset and a launch here, or nothing where the scales need no
  // words.
  [[nodiscard]] Status find_maxima(const GroupCastCall& call, Stream stream) const;
  // Enqueues a memset and one launch (two of x in fp32 or of large groups), or one launch alone where
  // rows alone or blocks have scales.
  [[nodiscard]] Status run(const GroupCastCall& call, Stream stream) const;
  [[nodiscard]] const codegen::CastSpec& spec() const { return spec_; }

 private:
  GroupCastPlan(std::shared_ptr<Context> context, const codegen::CastSpec& spec, int64_t cols)
      : context_(std::move(context)), spec_(spec), cols_(cols) {}
  [[nodiscard]] kernels::GroupCastArgs args_of(const GroupCastCall& call) const;
  [[nodiscard]] int64_t tiles_of(const GroupCastCall& call) const;
  // Sets the words that the call's x raises.
  [[nodiscard]] Status begin_words(const GroupCastCall& call, Stream stream) const;
  // The words with which one launch counts tiles.
  [[nodiscard]] size_t counters(int64_t groups) const;
  [[nodiscard]] Status quantize_rows(const kernels::CastTensor& tensor, const GroupCastCall& call,
                                     Stream stream) const;

  std::shared_ptr<Context> context_;
  codegen::CastSpec spec_;
  int64_t cols_;
  const Kernel* one_launch_ = nullptr;  // amax and cast; else those that follow
  const Kernel* amax_ = nullptr;        // null: the cast finds its scales
  const Kernel* cast_ = nullptr;
  const Kernel* rows_ = nullptr;  // in their place, for rows alone
  Maxima maxima_ = Maxima::kOwn;
};

}  // namespace f8::runtime
