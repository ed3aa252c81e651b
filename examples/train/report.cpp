#include "report.hpp"

#include "base/file.hpp"

namespace f8::train {

std::string summary(const std::vector<RunResult>& runs) {
  std::string table =
      "| recipe | steps | final loss (nats/byte, smoothed) | ratio | tokens/s | ratio |\n"
      "|---|--:|--:|--:|--:|--:|\n";
  for (const RunResult& run : runs) {
    const double loss = smoothed(run.curve.loss).back();
    fmt::format_to(std::back_inserter(table), "| {} | {} | {:.4f} | {:.4f} | ", run.curve.name,
                   run.curve.loss.size(), loss, loss / smoothed(runs.front().curve.loss).back());
    if (run.tokens_per_second > 0 && runs.front().tokens_per_second > 0) {
      fmt::format_to(std::back_inserter(table), "{:.0f} | {:.3f} |\n", run.tokens_per_second,
                     run.tokens_per_second / runs.front().tokens_per_second);
    } else {
      table += "- | - |\n";  // too few steps to tell
    }
  }
  return table;
}

Status write_report(const std::filesystem::path& folder, const std::vector<RunResult>& runs) {
  std::vector<Curve> curves;
  for (const RunResult& run : runs) curves.push_back(run.curve);
  F8_TRY(write_file_atomic(folder / (curves.back().name + ".csv"), to_csv(curves.back())));
  F8_TRY(write_file_atomic(folder / "loss.svg", to_svg(curves)));
  return write_file_atomic(folder / "summary.md", summary(runs));
}

}  // namespace f8::train
