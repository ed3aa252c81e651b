#include "report/report.hpp"

#include "error.hpp"
#include "files.hpp"

namespace train {

std::string summary(const std::vector<RunResult>& runs) {
  std::string table =
      "| recipe | steps | final loss (nats/byte, smoothed) | ratio | tokens/s | ratio |\n"
      "|---|--:|--:|--:|--:|--:|\n";
  for (const RunResult& run : runs) {
    const double loss = smoothed(run.curve.loss).back();
    table += format("| %s | %zu | %.4f | %.4f | ", run.curve.name.c_str(), run.curve.loss.size(),
                    loss, loss / smoothed(runs.front().curve.loss).back());
    if (run.tokens_per_second > 0 && runs.front().tokens_per_second > 0) {
      table += format("%.0f | %.3f |\n", run.tokens_per_second,
                      run.tokens_per_second / runs.front().tokens_per_second);
    } else {
      table += "- | - |\n";  // too few steps to tell
    }
  }
  return table;
}

void write_report(const std::filesystem::path& folder, const std::vector<RunResult>& runs) {
  std::vector<Curve> curves;
  for (const RunResult& run : runs) curves.push_back(run.curve);
  write_file(folder / (curves.back().name + ".csv"), to_csv(curves.back()));
  write_file(folder / "loss.svg", to_svg(curves));
  write_file(folder / "summary.md", summary(runs));
}

}  // namespace train
