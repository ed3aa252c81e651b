// The page: one HTML file that needs nothing else. It is well-formed XML too, so a strict parser
// reads it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/measurements.hpp"

namespace f8::report {

// The decision for a model, as `float8-tune filter` gives it.
struct ModelDecision {
  std::string title;    // the model, tokens and recipe
  std::string summary;  // one sentence
  DataTable table;
};

struct Page {
  std::string version;  // of the program
  std::vector<Figure> figures;
  std::optional<ModelDecision> model;
  std::string recipe;  // which is chosen at first; empty: the first one
};

// All figures that the measurements allow, named, in the order of the page's sections.
[[nodiscard]] std::vector<Figure> all_figures(const Measurements& measurements);
[[nodiscard]] std::vector<DataTable> provenance(const Measurements& measurements);
[[nodiscard]] std::string page_html(const Page& page, const Measurements& measurements);

}  // namespace f8::report
