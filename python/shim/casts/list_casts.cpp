// The casts of shards, which ranks hold, and of the tensors of a list in few launches.
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/shim/base/errors.hpp"
#include "python/shim/casts/cast.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {
namespace {

// The casts of many tensors of one device.
struct CastList {
  std::vector<Cast> casts;
  std::vector<const Quantizer*> quantizers;
  std::vector<float8_quantize_args> args;
  float8_step step;

  // `dtypes`: what each x is rounded to; empty: x is cast as it is.
  void add(const std::vector<Tensor>& x, size_t i, int64_t config, int64_t operand,
           const std::vector<int64_t>& dtypes, const ShardRows& shard = {},
           int64_t copies = FLOAT8_BOTH_COPIES) {
    if (!dtypes.empty() && dtypes.size() != x.size()) {
      throw std::invalid_argument("float8: a list has a dtype for each tensor, or none");
    }
    const Cast& cast = casts.emplace_back(x[i], config, operand, copies, shard,
                                          dtypes.empty() ? kOwnType : dtypes[i]);
    if (cast.place.key() != place().key()) {
      throw std::invalid_argument("float8: the tensors of a list are on different devices");
    }
    quantizers.push_back(&quantizer_for(cast.key, cast.place));
    args.push_back(cast.args());
  }

  [[nodiscard]] const Place& place() const { return casts.front().place; }

  // The args of a call, which are good until this list changes.
  [[nodiscard]] float8_quantize_list_args list_args() const {
    float8_quantize_list_args all;
    all.tensors = args.data();
    all.count = args.size();
    all.step = &step;
    return all;
  }

  // All tensors of a list are in a first step, or none is.
  void set_scales(size_t i, const Tensor& state, int64_t layout) {
    float8_step of_tensor;
    casts[i].set_scales(args[i].scales, of_tensor, state, layout, false);
    if (i > 0 && of_tensor.first_step != step.first_step) {
      throw std::invalid_argument(
          "float8: some scale states of a list are in their first step, and some are not; cast "
          "them "
          "in two lists");
    }
    step = of_tensor;
  }

  // Casts into copies that are given, else into new ones, which are the result.
  std::vector<Tensor> run(const std::optional<std::vector<Tensor>>& into) {
    if (into && into->size() != 2 * args.size()) {
      throw std::invalid_argument(
          "float8: a list casts into q and qt of each tensor, or into none");
    }
    std::vector<Tensor> made;
    for (size_t i = 0; i < args.size(); ++i) {
      const Quantizer& quantizer = *quantizers[i];
      for (const auto& [at, bytes] :
           {std::pair{2 * i, quantizer.q_bytes}, {2 * i + 1, quantizer.qt_bytes}}) {
        if (!into) {
          made.push_back(empty_bytes(static_cast<int64_t>(bytes), place().device));
        } else {
          check_copy((*into)[at], bytes, place().device, "a copy in fp8");
        }
      }
      const std::vector<Tensor>& copies = into ? *into : made;
      const bool has_q = quantizer.q_bytes > 0;  // else qt is all of the tensor
      args[i].tensor.data = copies[2 * i + (has_q ? 0 : 1)].mutable_data_ptr();
      if (has_q && quantizer.qt_bytes > 0) {
        args[i].transposed.data = copies[2 * i + 1].mutable_data_ptr();
      }
    }
    const QuantizerList& list = quantizer_list_for(quantizers, place());
    const Workspace workspace(place(), list.workspace_bytes, Counts::kInFront);
    float8_quantize_list_args all = list_args();
    all.workspace.data = workspace.data();
    check(float8_quantize_list(list.list, &all, place().stream));
    return made;
  }
};

// The casts of the shards of many tensors.
struct ShardList : CastList {
  int64_t amax_words = 0;
  int64_t row_amax_words = 0;

  ShardList(const std::vector<Tensor>& x, const std::vector<int64_t>& config, int64_t operand,
            const std::vector<int64_t>& rows_max, const std::vector<int64_t>& whole_rows,
            const std::vector<int64_t>& first_rows, const std::vector<int64_t>& dtypes,
            const std::vector<int64_t>& copies = {}) {
    if (x.empty() || config.size() != x.size() || rows_max.size() != x.size()) {
      throw std::invalid_argument(
          "float8: a list of shards has at least one, each with a config and the most rows");
    }
    if (whole_rows.size() != first_rows.size() ||
        (!whole_rows.empty() && whole_rows.size() != x.size())) {
      throw std::invalid_argument(
          "float8: a list of shards has the rows of each whole and each first row, or none");
    }
    if (!copies.empty() && copies.size() != x.size()) {
      throw std::invalid_argument("float8: a list of shards has the copies of each, or none");
    }
    for (size_t i = 0; i < x.size(); ++i) {
      if (rows_max[i] < 1) throw std::invalid_argument("float8: a shard has at least one row");
      ShardRows shard{.most = rows_max[i]};
      if (!whole_rows.empty()) {
        shard.whole = whole_rows[i];
        shard.first = first_rows[i];
      }
      add(x, i, config[i], operand, dtypes, shard,
          copies.empty() ? int64_t{FLOAT8_BOTH_COPIES} : copies[i]);
      amax_words += quantizers.back()->amax_words;
      row_amax_words += quantizers.back()->row_amax_words;
    }
  }

  // The words of all shards follow each other.
  void set_words(const Tensor& amax, const Tensor& row_amax) {
    auto* at = static_cast<uint32_t*>(amax.mutable_data_ptr());
    auto* row_at = static_cast<uint32_t*>(row_amax.mutable_data_ptr());
    for (size_t i = 0; i < args.size(); ++i) {
      const Quantizer& quantizer = *quantizers[i];
      if (quantizer.amax_words > 0) args[i].amax = at;
      if (quantizer.row_amax_words > 0) args[i].row_amax = row_at;
      at += quantizer.amax_words;
      row_at += quantizer.row_amax_words;
    }
  }
};

uint32_t* words_of(const Tensor& words, int64_t count) {
  return count == 0 ? nullptr : static_cast<uint32_t*>(words.mutable_data_ptr());
}

QuantizerKey key_of_shards(int64_t rows_max, int64_t cols, int64_t config, int64_t operand,
                           int64_t whole_rows, int64_t copies) {
  return {.config = Config(config).of_casts(),
          .rows_max = rows_max,
          .cols = cols,
          .device = -1,
          .operand = static_cast<int8_t>(operand_of(operand)),
          .copies = checked_copies(copies),
          .over_ranks = true,
          .whole_rows = whole_rows};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_amax(const Tensor& x, int64_t config, int64_t operand,
                                         int64_t rows_max) {
  const Cast cast(x, config, operand, FLOAT8_BOTH_COPIES, {.most = rows_max});
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  Tensor amax = empty_words(quantizer.amax_words, cast.place.device);
  Tensor row_amax = empty_words(quantizer.row_amax_words, cast.place.device);
  float8_quantize_args args = cast.args();
  args.amax = words_of(amax, quantizer.amax_words);
  args.row_amax = words_of(row_amax, quantizer.row_amax_words);
  check(float8_quantize_amax(quantizer.quantizer, &args, cast.place.stream));
  return {amax, row_amax};
}

std::tuple<Tensor, Tensor> quantize_shard(const Tensor& x, const Tensor& amax,
                                          const Tensor& row_amax, int64_t config, int64_t operand,
                                          int64_t rows_max) {
  const Cast cast(x, config, operand, FLOAT8_BOTH_COPIES, {.most = rows_max});
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  check_words(amax, quantizer.amax_words, cast.place.device);
  check_words(row_amax, quantizer.row_amax_words, cast.place.device);
  Tensor q = empty_bytes(static_cast<int64_t>(quantizer.q_bytes), cast.place.device);
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), cast.place.device);
  float8_quantize_args args = cast.args();
  args.amax = words_of(amax, quantizer.amax_words);
  args.row_amax = words_of(row_amax, quantizer.row_amax_words);
  run_quantizer(quantizer, cast.place, q, qt, args);
  return {q, qt};
}

std::tuple<Tensor, Tensor> quantize_amax_list(std::vector<Tensor> x, std::vector<int64_t> config,
                                              int64_t operand, std::vector<int64_t> rows_max,
                                              std::vector<int64_t> whole_rows,
                                              std::vector<int64_t> first_rows,
                                              std::vector<int64_t> dtypes) {
  ShardList shards(x, config, operand, rows_max, whole_rows, first_rows, dtypes);
  Tensor amax = empty_words(shards.amax_words, shards.place().device);
  Tensor row_amax = empty_words(shards.row_amax_words, shards.place().device);
  shards.set_words(amax, row_amax);
  const QuantizerList& list = quantizer_list_for(shards.quantizers, shards.place());
  const float8_quantize_list_args all = shards.list_args();
  check(float8_quantize_list_amax(list.list, &all, shards.place().stream));
  return {amax, row_amax};
}

std::vector<Tensor> quantize_shard_list(
    std::vector<Tensor> x, std::vector<Tensor> amax, std::vector<Tensor> row_amax,
    std::vector<int64_t> config, int64_t operand, std::vector<int64_t> rows_max,
    std::vector<int64_t> whole_rows, std::vector<int64_t> first_rows, std::vector<int64_t> dtypes,
    std::optional<std::vector<Tensor>> into, std::vector<int64_t> copies) {
  ShardList shards(x, config, operand, rows_max, whole_rows, first_rows, dtypes, copies);
  if (amax.size() != x.size() || row_amax.size() != x.size()) {
    throw std::invalid_argument("float8: a list of shards has the words of the maxima of each");
  }
  const Device device = shards.place().device;
  for (size_t i = 0; i < x.size(); ++i) {
    const Quantizer& quantizer = *shards.quantizers[i];
    check_words(amax[i], quantizer.amax_words, device);
    check_words(row_amax[i], quantizer.row_amax_words, device);
    shards.args[i].amax = words_of(amax[i], quantizer.amax_words);
    shards.args[i].row_amax = words_of(row_amax[i], quantizer.row_amax_words);
  }
  return shards.run(into);
}

std::vector<Tensor> quantize_list(std::vector<Tensor> x, int64_t config, int64_t operand,
                                  std::vector<Tensor> scales, int64_t layout,
                                  std::vector<int64_t> dtypes,
                                  std::optional<std::vector<Tensor>> into) {
  if (x.empty() || scales.size() != x.size()) {
    throw std::invalid_argument(
        "float8: a list of casts has at least one tensor, each with its part of a scale state");
  }
  CastList list;
  for (size_t i = 0; i < x.size(); ++i) {
    list.add(x, i, config, operand, dtypes);
    list.set_scales(i, scales[i], layout);
  }
  return list.run(into);
}

std::tuple<int64_t, int64_t> amax_words(int64_t rows_max, int64_t cols, int64_t config,
                                        int64_t operand, int64_t whole_rows, int64_t copies) {
  const CopyLayout at =
      copy_layout(key_of_shards(rows_max, cols, config, operand, whole_rows, copies), 0);
  return {at.amax_words, at.row_amax_words};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> copy_layout_of(
    int64_t rows_max, int64_t rows, int64_t cols, int64_t config, int64_t operand, int64_t copies,
    bool over_ranks, int64_t whole_rows) {
  QuantizerKey key = key_of_shards(rows_max, cols, config, operand, whole_rows, copies);
  key.over_ranks = over_ranks;
  const CopyLayout at = copy_layout(key, rows);
  return {at.q_pitch, at.q_scales, at.scales_in_qt ? 1 : 0, at.qt_pitch, at.qt_scales};
}

}  // namespace float8_torch
