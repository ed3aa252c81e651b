// The verdicts of a filter on a model, as a file that a trainer reads without SQLite: what
// `float8-tune filter --verdicts FILE` writes. Ranks that read the same bytes decide alike.
//
// File grammar (UTF-8; recipes/sealed_text.hpp has the first and the last line):
//   file     := "float8-filter 2" LF "recipe " NAME LF "tokens " INT LF { decision } "end " HASH LF
//   decision := ("convert" | "keep") TAB FQN TAB "n" INT "k" INT TAB EVIDENCE TAB SPEEDUP " " LO
//               " " HI TAB REASON LF
// FQN is a layer's name, once in a file; a part between dots that is "*" stands for any number, as
// in layers.*.attention.wq. EVIDENCE is "measured", "interpolated", "modelled" or "rule"; speedups
// are positive and the shortest that read back the same. FQN and REASON hold no control characters.
#pragma once

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
  std::string recipe;
  int64_t tokens = 0;
  std::vector<Decision> decisions;

  // kInvalidArgument for what the grammar cannot hold.
  [[nodiscard]] Result<std::string> serialize() const;
  // Accepts what serialize() writes and nothing else; kUnsupported for another version, kCorrupt
  // for everything else, saying which line.
  [[nodiscard]] static Result<FilterFile> parse(std::string_view text);
  bool operator==(const FilterFile&) const = default;
};

// Finds the decisions of a file, which must outlive it, without going through all of them.
class FilterIndex {
 public:
  explicit FilterIndex(const FilterFile& file);
  // The decision of this name, else the first one whose pattern it fits; null: there is none.
  [[nodiscard]] const FilterFile::Decision* find(std::string_view fqn) const;

 private:
  std::unordered_map<std::string_view, const FilterFile::Decision*> names_;  // patterns too
  std::vector<const FilterFile::Decision*> patterns_;                        // in the file's order
};

// "layers.*.wq" fits "layers.12.wq" and nothing that is no number there.
[[nodiscard]] bool fits_pattern(std::string_view pattern, std::string_view fqn);

}  // namespace f8
