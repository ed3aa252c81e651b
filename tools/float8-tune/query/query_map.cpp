// The heat map of query --map. A cell has the filter's estimate as digits and a mark for its
// evidence; its colour is the filter's verdict, where colours are allowed.
#include "tools/float8-tune/query/query_map.hpp"

#include <optional>
#include <set>

#include "recipes/model/filter_rule.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tuning_db/estimate/estimator.hpp"

namespace f8::cli {
namespace {

using tuning_db::Estimate;

constexpr size_t kMaxCells = 1024;
constexpr double kNeeded = 1 + kFilterMargin;

struct Map {
  int64_t m = 0;
  std::set<int64_t> n, k;
  std::vector<std::optional<Estimate>> cells;  // n by n, in each of them k by k
};

Result<Map> map_of(const std::vector<Shape>& shapes, const tuning_db::Estimator& estimator) {
  Map map;
  map.m = shapes.front().m;
  for (const Shape& shape : shapes) {
    if (shape.m != map.m) {
      return fail(ErrorCode::kInvalidArgument,
                  "--mnk: a map is of one M, and {} and {} are given; give one, with ranges as N "
                  "and K, e.g. {},1024:16384:x2,1024:16384:x2",
                  map.m, shape.m, map.m);
    }
    map.n.insert(shape.n);
    map.k.insert(shape.k);
  }
  if (map.n.size() * map.k.size() > kMaxCells) {
    return fail(ErrorCode::kInvalidArgument,
                "--mnk: a map of {} x {} cells is too large to read; {} cells are the most; narrow "
                "its ranges",
                map.n.size(), map.k.size(), kMaxCells);
  }
  for (const int64_t n : map.n) {
    for (const int64_t k : map.k) map.cells.push_back(estimator.estimate({map.m, n, k}));
  }
  return map;
}

std::string_view mark_of(const Estimate& e) {
  if (e.evidence == Evidence::kMeasured) return " ";
  return e.evidence == Evidence::kInterpolated ? "~" : "?";
}

std::string_view color_of(const Estimate& e) {
  if (e.lo > kNeeded) return "\x1b[32m";
  return e.hi > kNeeded ? "\x1b[33m" : "\x1b[31m";
}

std::string cell_text(const std::optional<Estimate>& e, bool color) {
  if (!e) return "     - ";
  const std::string text = f8::format("{:6.2f}{}", e->speedup, mark_of(*e));
  return color ? f8::format("{}{}\x1b[0m", color_of(*e), text) : text;
}

Json to_json(const Map& map, const Recipe& recipe, const tuning_db::Estimator& estimator) {
  Json json = {{"m", map.m},
               {"recipe", recipe.name},
               {"device", estimator.device()},
               {"results", Json::array()}};
  auto cell = map.cells.begin();
  for (const int64_t n : map.n) {
    for (const int64_t k : map.k) {
      Json one = {{"n", n}, {"k", k}, {"evidence", nullptr}};
      if (*cell) {
        one["evidence"] = to_string((*cell)->evidence);
        add_interval(one, "speedup", (*cell)->speedup, (*cell)->lo, (*cell)->hi);
      }
      json["results"].push_back(std::move(one));
      ++cell;
    }
  }
  return json;
}

void print_text(const Map& map, const Recipe& recipe, const tuning_db::Estimator& estimator,
                bool color) {
  print(f8::format("speedup of a linear against bf16, forward + backward: m={}, {}, {}\n", map.m,
                   recipe.name, estimator.device()));
  std::string lines = "   N \\ K";
  for (const int64_t k : map.k) lines += f8::format(" {:>7}", k);
  lines += '\n';
  auto cell = map.cells.begin();
  for (const int64_t n : map.n) {
    lines += f8::format("{:>8}", n);
    for (size_t i = 0; i < map.k.size(); ++i) lines += " " + cell_text(*cell++, color);
    while (lines.ends_with(' ')) lines.pop_back();
    lines += '\n';
  }
  print_styled(lines);
  print("~ interpolated, ? modelled, - unknown");
  print(color ? f8::format("; green converts: its interval is above {:g}; yellow is ambiguous\n",
                           kNeeded)
              : "\n");
}

}  // namespace

Result<int> print_map(const std::vector<Shape>& shapes, const Recipe& recipe,
                      const TuningTable& table, const std::string& device, const Global& global) {
  const auto estimator = estimator_of(table, recipe, device);
  if (estimator.empty()) {
    return fail(
        ErrorCode::kNotFound,
        "there are no measurements of recipe {}{}{}; on a GPU: float8-tune sweep --mnk M,N,K "
        "--recipe {} --db {}",
        recipe.name, device.empty() ? "" : " on ", device, recipe.name, database_to_write(global));
  }
  const Map map = F8_TRY(map_of(shapes, estimator));
  if (global.json) {
    print_json(to_json(map, recipe, estimator));
  } else {
    print_text(map, recipe, estimator, stdout_color(global));
  }
  return kExitOk;
}

}  // namespace f8::cli
