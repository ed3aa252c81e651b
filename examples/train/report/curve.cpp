#include "report/curve.hpp"

#include "error.hpp"

namespace train {

std::vector<double> smoothed(const std::vector<float>& losses) {
  std::vector<double> means;
  means.reserve(losses.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    const size_t first = i + 1 > kSmoothingSteps ? i + 1 - kSmoothingSteps : 0;
    double sum = 0;
    for (size_t j = first; j <= i; ++j) sum += double{losses[j]};
    means.push_back(sum / static_cast<double>(i + 1 - first));
  }
  return means;
}

std::string to_csv(const Curve& curve) {
  const std::vector<double> means = smoothed(curve.loss);
  std::string csv = "step,tokens,loss,smoothed_loss,lr,ms\n";
  for (size_t i = 0; i < curve.loss.size(); ++i) {
    const int64_t step = static_cast<int64_t>(i) + 1;
    csv += format("%ld,%ld,%.6g,%.6g,%.4g,%.4g\n", step, step * curve.tokens_per_step,
                  double{curve.loss[i]}, means[i], double{curve.lr[i]}, double{curve.ms[i]});
  }
  return csv;
}

}  // namespace train
