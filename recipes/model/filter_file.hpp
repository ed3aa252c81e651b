// The verdicts of a filter on a model, as a file that a trainer reads without SQLite: what
// `float8-tune filter --verdicts FILE` writes. Ranks that read the same bytes decide alike.
//
// File grammar (UTF-8; recipes/sealed_text.hpp has the first and the last line):
//   file       := "float8-filter " VERSION LF "recipe " NAME LF "tokens " INT LF { decision }
//                 [ "sequence " INT LF { attention } ] "end " HASH LF
//   decision   := ("convert" | "keep") TAB FQN TAB "n" INT "k" INT TAB why
//   attention  := ("bf16" | "fp8_forward" | "fp8") TAB FQN TAB "h" INT "g" INT "d" INT TAB why
//   why        := EVIDENCE TAB SPEEDUP " " LO " " HI TAB REASON LF
// VERSION is 3 where verdicts on attention follow, whose step has sequences of so many tokens, and 2 where none do.
// FQN is a layer's name, once among the linears and once among the attentions; a part between dots that is "*" stands
// for any number, as in layers.*.attention.wq. EVIDENCE is "measured", "interpolated", "modelled" or "rule"; speedups
// are positive and the shortest that read back the same. FQN and REASON hold no control characters.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.hpp"
#include "recipes/model/filter_rule.hpp"

namespace f8 {

struct FilterFile {
  struct Decision {
    std::string fqn;
    int64_t in_features = 0;
    int64_t out_features = 0;
    bool convert = false;
    std::string reason;
    Evidence evidence = Evidence::kRule;
    SpeedupInterval speedup = {};  // of forward and backward, if it is converted
    bool operator==(const Decision&) const = default;
  };
  // A layer's attention and its recipe.
  struct Attention {
    std::string fqn;
    int64_t heads_q = 0;
    int64_t heads_kv = 0;
    int64_t head_dim = 0;
    std::string recipe;  // of kAttentionRecipeNames, or that of bf16_recipe()
    std::string reason;
    Evidence evidence = Evidence::kRule;
    SpeedupInterval speedup = {};
    bool operator==(const Attention&) const = default;
  };
  std::string recipe;
  int64_t tokens = 0;
  std::vector<Decision> decisions;
  int64_t sequence = 0;  // tokens of a sequence; 0: the file has no verdicts on attention
  std::vector<Attention> attention = {};

  // kInvalidArgument for what the grammar cannot hold.
  [[nodiscard]] Result<std::string> serialize() const;
  // Accepts what serialize() writes and nothing else; kUnsupported for another version, kCorrupt
  // for everything else, saying which line.
  [[nodiscard]] static Result<FilterFile> parse(std::string_view text);
  bool operator==(const FilterFile&) const = default;
};

// Finds names, which must outlive it, without going through all of them.
class NameIndex {
 public:
  void add(std::string_view name);
  // The place of this name, else of the first one that is a pattern that it fits.
  [[nodiscard]] std::optional<size_t> find(std::string_view fqn) const;

 private:
  std::unordered_map<std::string_view, size_t> names_;  // patterns too
  std::vector<std::string_view> patterns_;              // in the order of their places
};

// Finds the decisions of a file, which must outlive it; null: there is none.
class FilterIndex {
 public:
  explicit FilterIndex(const FilterFile& file);
  [[nodiscard]] const FilterFile::Decision* find(std::string_view fqn) const;
  // The attention of this name, or the nearest one around it: that of "layers.0.attention" is found by the name of
  // a module in it, such as "layers.0.attention.inner".
  [[nodiscard]] const FilterFile::Attention* find_attention(std::string_view fqn) const;

 private:
  const FilterFile* file_;
  NameIndex linears_, attention_;
};

// "layers.*.wq" fits "layers.12.wq" and nothing that is no number there.
[[nodiscard]] bool fits_pattern(std::string_view pattern, std::string_view fqn);

}  // namespace f8
