#include "tools/float8-tune/report/figures/page.hpp"

#include <algorithm>
#include <set>

#include "recipes/mlp.hpp"
#include "recipes/model/filter_rule.hpp"
#include "tools/float8-tune/report/figures/attention.hpp"
#include "tools/float8-tune/report/figures/kernels.hpp"
#include "tools/float8-tune/report/figures/model_quality.hpp"
#include "tools/float8-tune/report/figures/speedups.hpp"
#include "tools/float8-tune/report/figures/text.hpp"

namespace f8::report {
namespace {

using tuning_db::EstimateScore;

struct Section {
  const char *id, *title, *words;
  std::vector<std::string_view> kinds;
};
const Section kSections[] = {
    {"speedups",
     "Speedup of linears",
     "How many times faster a linear (forward and backward, casts included) is in float8 than in "
     "bf16. Blue is faster, orange slower, and the digits say the same.",
     {"speedup", "experts", "mlps"}},
    {"attention",
     "Attention in fp8",
     "Forward and backward of attention with their casts, and the results against fp64.",
     {"attention-speed", "accuracy"}},
    {"time",
     "Where a linear's time goes",
     "The parts of forward and backward. A GEMM's part is its time alone; what the GEMMs leave is "
     "amax, "
     "casts and gaps between kernels. Where neighbours overlap, the parts add up to more than the "
     "linear "
     "takes.",
     {"time"}},
    {"kernels",
     "Kernels against the hardware and cuBLASLt",
     "GEMMs alone, without casts.",
     {"roofline", "library"}},
    {"models",
     "What the models predict",
     "The cost model chooses a kernel where nothing was measured; the estimator says the speedup "
     "of a "
     "shape that was not measured.",
     {"regret", "coverage", "prediction", "policy"}}};

DataTable policy_table(const std::vector<std::pair<std::string, EstimateScore>>& rows) {
  DataTable table{.caption = "Time lost against the best choice",
                  .columns = {"recipe", "linears", "filter", "torchao", "all float8", "all bf16"},
                  .rows = {}};
  for (const auto& [recipe, score] : rows) {
    const tuning_db::DecisionRegrets& regrets = score.regrets;
    table.rows.push_back({recipe, f8::format("{}", score.shapes), percent(regrets.measured),
                          has_torchao_rule(recipe) ? percent(regrets.torchao) : "no rule",
                          percent(regrets.convert_all), percent(regrets.keep_all)});
  }
  return table;
}

// Adds the time of a row in fp8, its speedup and the interval of that.
void add_times(std::vector<std::string>& cells, const tuning_db::TrialResult& result) {
  const auto& ratio = result.ratio;
  cells.push_back(microseconds(result.timing->median_ns));
  cells.push_back(ratio ? f8::format("{:.3f}", ratio->ratio) : "");
  cells.push_back(ratio ? f8::format("{:.3f} to {:.3f}", ratio->lo, ratio->hi) : "");
}

// The expert linears of all devices.
std::optional<Figure> experts_table(const Measurements& measurements) {
  if (measurements.experts.empty()) return std::nullopt;
  DataTable table{.caption = "Expert linears, forward and backward",
                  .columns = {"recipe", "M", "N", "K", "experts", "skew", "float8 us", "speedup",
                              "interval", "output", "grad_input", "grad_weight", "device"},
                  .rows = {}};
  for (const tuning_db::TrialRow& row : measurements.experts) {
    const Shape s = row.problem.shape();
    const auto [experts, skew] = row.problem.groups();
    std::vector<std::string> cells = {row.problem.recipe};
    for (const int64_t size : {s.m, s.n, s.k, experts, skew})
      cells.push_back(f8::format("{}", size));
    add_times(cells, row.result);
    for (const std::string_view part : spec_of(row.problem.op).parts) {
      const auto* kernel = find_kernel(row.result.kernels, part);
      cells.push_back(kernel == nullptr ? "" : kernel->config);
    }
    cells.push_back(row.device_name);
    table.rows.push_back(std::move(cells));
  }
  return Figure{.kind = "experts",
                .title = "Speedup of expert linears",
                .description =
                    "The linears of a mixture's experts, M rows of all experts together. "
                    "The bf16 baseline is the faster of grouped GEMMs and a call of cuBLASLt for "
                    "each expert. A skew of 0 "
                    "is an even routing, 1 is Zipf's law, and under 100 one expert has all "
                    "rows.",
                .table = std::move(table)};
}

// The MLPs of all devices.
std::optional<Figure> mlps_table(const Measurements& measurements) {
  if (measurements.mlps.empty()) return std::nullopt;
  DataTable table{.caption = "MLPs, forward and backward",
                  .columns = {"recipe", "M", "hidden", "features", "gate", "experts", "skew",
                              "float8 us", "speedup", "interval", "device"},
                  .rows = {}};
  for (const tuning_db::TrialRow& row : measurements.mlps) {
    const MlpShape mlp = mlp_shape(row.problem.dims);
    std::vector<std::string> cells = {row.problem.recipe};
    for (const int64_t size : {mlp.m, mlp.n, mlp.k}) cells.push_back(f8::format("{}", size));
    cells.emplace_back(mlp.gate ? "yes" : "no");
    for (const int64_t size : {mlp.groups.experts, mlp.groups.skew}) {
      cells.push_back(f8::format("{}", size));
    }
    add_times(cells, row.result);
    cells.push_back(row.device_name);
    table.rows.push_back(std::move(cells));
  }
  return Figure{.kind = "mlps",
                .title = "Speedup of fused MLPs",
                .description =
                    "MLPs as one function, as float8.torch.fuse runs them, with the casts of all "
                    "weights. The bf16 baseline has the linears' fastest GEMMs, and copies in "
                    "the place of activations that move as many bytes.",
                .table = std::move(table)};
}

class Collection {
 public:
  void add(std::optional<Figure> figure) {
    if (figure) figures_.push_back(*std::move(figure));
  }
  std::vector<Figure> take() {
    const auto place = [](const Figure& figure) {
      size_t at = 0;
      for (const Section& section : kSections) {
        for (const std::string_view kind : section.kinds) {
          if (figure.kind == kind) return at;
          ++at;
        }
      }
      return at;
    };
    std::ranges::stable_sort(figures_, {}, place);
    name_figures(figures_);
    return std::move(figures_);
  }

 private:
  std::vector<Figure> figures_;
};

std::string article(const Figure& figure) {
  std::string out = "<article data-figure=\"" + figure.kind + "\"";
  if (!figure.device.empty()) out += " data-device=\"" + escape(figure.device) + "\"";
  if (!figure.recipe.empty()) out += " data-recipe=\"" + escape(figure.recipe) + "\"";
  if (is_wide(figure) || figure.body.empty()) out += " class=\"wide\"";
  if (figure.m > 0) out += f8::format(" data-m=\"{}\"", figure.m);
  const std::string title = escape(figure.title);
  out += f8::format(" id=\"{}\"><h3>{}</h3>\n<p>{}</p>\n", figure.name, title,
                    escape(figure.description));
  const std::string scroll = f8::format(
      "<div class=\"scroll tall\" tabindex=\"0\" role=\"region\" aria-label=\"Numbers: {}\">",
      title);
  if (figure.body.empty()) return out + scroll + html(figure.table) + "</div></article>\n";
  out += is_wide(figure)
             ? f8::format("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">",
                          title)
             : std::string("<div>");
  out += inline_svg(figure) + "</div>\n";
  return out + "<details><summary>Numbers<span class=\"of\"> of this figure</span></summary>" +
         scroll + lines(figure.table) + "</div></details></article>\n";
}

std::string select(std::string_view name, std::string_view label,
                   const std::vector<std::string>& values, const std::string& chosen) {
  std::string out = f8::format(
      "<div><label for=\"choose-{}\">{}</label><select id=\"choose-{}\" name=\"{}\">"
      "<option value=\"\">all</option>",
      name, label, name, name);
  for (const std::string& value : values) {
    const std::string text = escape(value);
    out += f8::format("<option value=\"{}\"{}>{}</option>", text,
                      value == chosen ? " selected=\"selected\"" : "", text);
  }
  return out + "</select></div>\n";
}

// What most people ask for first.
constexpr std::string_view kUsualRecipe = "rowwise";
constexpr int64_t kUsualTokens = 8192;

// The recipe of which the user's database has most rows; without one the usual recipe.
std::string main_recipe(const Measurements& measurements) {
  const std::vector<std::string> recipes = measurements.recipes();
  const bool is_builtin = measurements.table.sources.front().name == "built-in";
  if (is_builtin && std::ranges::find(recipes, kUsualRecipe) != recipes.end()) {
    return std::string(kUsualRecipe);
  }
  const std::vector<TableSource>& sources = measurements.table.sources;
  const auto rows = [&](const std::string& recipe) {
    return std::ranges::count_if(measurements.table.speedups(), [&](const LinearSpeedup& row) {
      return sources[row.source].name == sources.front().name && row.recipe == recipe;
    });
  };
  return *std::ranges::max_element(recipes, {}, rows);
}

std::string controls(const Page& page, const Measurements& measurements) {
  std::vector<std::string> devices;
  std::set<int64_t> ms;
  for (const Figure& figure : page.figures) {
    if (figure.m > 0) ms.insert(figure.m);
    if (!figure.device.empty() && std::ranges::find(devices, figure.device) == devices.end()) {
      devices.push_back(figure.device);
    }
  }
  std::vector<std::string> tokens;
  for (const int64_t m : ms) tokens.push_back(f8::format("{}", m));
  const std::vector<std::string> recipes = measurements.recipes();
  const std::string recipe = page.recipe.empty() ? main_recipe(measurements) : page.recipe;
  const std::string device = devices.empty() ? "" : devices.front();
  const bool has_usual = std::ranges::any_of(page.figures, [&](const Figure& figure) {
    return figure.device == device && figure.recipe == recipe && figure.m == kUsualTokens;
  });
  const std::string m = has_usual ? f8::format("{}", kUsualTokens) : "";
  return "<div id=\"controls\" role=\"group\" aria-label=\"Which figures to show\" "
         "hidden=\"hidden\">\n" +
         select("device", "Device", devices, device) + select("recipe", "Recipe", recipes, recipe) +
         select("m", "M (tokens)", tokens, m) + "<p id=\"shown\" role=\"status\"></p></div>\n";
}

std::string model_section(const ModelDecision& model) {
  return f8::format(
      "<section id=\"model\" aria-labelledby=\"model-h\"><h2 id=\"model-h\">{}</h2>\n<p>{}</p>\n"
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
      "aria-label=\"Decisions\">{}</div></section>\n",
      escape(model.title), escape(model.summary), html(model.table));
}

std::string provenance_section(const Measurements& measurements) {
  std::string out =
      "<section id=\"provenance\" aria-labelledby=\"provenance-h\">"
      "<h2 id=\"provenance-h\">Where the numbers come from</h2>\n";
  for (const DataTable& table : provenance(measurements)) {
    out += f8::format(
        "<div class=\"scroll tall\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">{}</div>\n",
        escape(table.caption), html(table));
  }
  return out + "</section>\n";
}

std::string summary(const Measurements& measurements) {
  const auto& rows = measurements.table.speedups();
  const auto faster =
      std::ranges::count_if(rows, [](const LinearSpeedup& row) { return row.speedup >= 1; });
  std::string newest;
  for (const LinearSpeedup& row : rows) newest = std::max(newest, row.date);
  std::vector<std::string> sources;
  for (const TableSource& source : measurements.table.sources) {
    if (std::ranges::find(sources, source.name) == sources.end()) sources.push_back(source.name);
  }
  return f8::format(
      "{} measured linears of {} recipes on {} device{}, the last of {}; {} of them are at least "
      "as "
      "fast in float8 as in bf16. Measurements: {}.",
      rows.size(), measurements.recipes().size(), measurements.table.devices.size(),
      measurements.table.devices.size() == 1 ? "" : "s", newest, faster, fmt::join(sources, ", "));
}

}  // namespace

std::vector<Figure> all_figures(const Measurements& measurements) {
  Collection all;
  all.add(experts_table(measurements));
  all.add(mlps_table(measurements));
  all.add(attention_speeds(measurements));
  all.add(attention_accuracy(measurements));
  all.add(regret_curve(measurements));
  for (const SpeedupGrid& grid : speedup_grids(measurements)) {
    all.add(speedup_map(measurements, grid));
    all.add(time_by_part(measurements, grid.device, grid.recipe, grid.m));
    all.add(generated_against_library(measurements, grid.device, grid.recipe, grid.m));
  }
  for (size_t device = 0; device < measurements.table.devices.size(); ++device) {
    std::vector<std::pair<std::string, EstimateScore>> policies;
    for (const std::string& recipe : measurements.recipes()) {
      const auto rows =
          tuning_db::leave_layers_out(table_of(measurements.table, device, recipe), recipe);
      all.add(roofline(measurements, device, recipe));
      all.add(predicted_times(measurements, device, recipe));
      all.add(interval_coverage(measurements, device, recipe, rows));
      if (!rows.empty()) {
        policies.emplace_back(recipe, tuning_db::score_estimates(rows, kFilterMargin));
      }
    }
    if (policies.empty()) continue;
    all.add(Figure{
        .kind = "policy",
        .device = measurements.device_label(device),
        .title = "Regret of the decision to convert",
        .description =
            "What each policy loses on the measured linears, against converting exactly those that "
            "are faster. The filter decides each N and K from the rows of the others alone, as for "
            "a "
            "model whose shapes were never measured; it asks for a sure gain of 2 %.",
        .table = policy_table(policies)});
  }
  return all.take();
}

std::string page_html(const Page& page, const Measurements& measurements) {
  std::string out = f8::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<meta name=\"color-scheme\" content=\"light dark\"/>\n"
      "<meta name=\"generator\" content=\"float8-tune {}\"/>\n"
      "<title>float8 tuning report</title>\n<style>\n{}{}</style></head>\n<body>\n",
      escape(page.version), text::figure_css, text::page_css);
  out += "<a class=\"skip\" href=\"#main\">Skip to the figures</a>\n";
  out += f8::format(
      "<header><h1>float8 tuning report</h1>\n<p>{}</p>\n<nav aria-label=\"Sections\"><ul>",
      escape(summary(measurements)));
  if (page.model) out += "<li><a href=\"#model\">Model</a></li>";
  std::string sections;
  for (const Section& section : kSections) {
    std::string articles;
    for (const std::string_view kind : section.kinds) {
      for (const Figure& figure : page.figures) {
        if (figure.kind == kind) articles += article(figure);
      }
    }
    if (articles.empty()) continue;
    out += f8::format("<li><a href=\"#{}\">{}</a></li>", section.id, section.title);
    sections += f8::format(
        "<section id=\"{}\" aria-labelledby=\"{}-h\"><h2 id=\"{}-h\">{}</h2>\n<p>{}</p>\n"
        "<div class=\"figures\">\n{}</div></section>\n",
        section.id, section.id, section.id, section.title, section.words, articles);
  }
  out += "<li><a href=\"#provenance\">Where the numbers come from</a></li></ul></nav></header>\n";
  out += "<main id=\"main\" tabindex=\"-1\">\n";
  if (page.model) out += model_section(*page.model);
  out +=
      "<noscript><p>The numbers of a figure are lines with tabs between the cells; an empty cell "
      "is "
      "that of the line above.</p></noscript>\n";
  out += controls(page, measurements) + sections + provenance_section(measurements);
  return out + f8::format("</main>\n<script>\n{}</script></body></html>\n", text::page_js);
}

}  // namespace f8::report
