#include "tools/float8-tune/dist/finding.hpp"

#include <cmath>
#include <limits>

#include "base/format.hpp"

namespace f8::cli {

double sqnr_db(const std::vector<float>& expected, const std::vector<float>& got) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (expected.size() != got.size()) return -kInfinity;
  double signal = 0;
  double noise = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = double{expected[i]} - double{got[i]};
    signal += double{expected[i]} * double{expected[i]};
    noise += difference * difference;
  }
  if (std::isnan(signal) || std::isnan(noise)) return -kInfinity;
  return noise == 0 ? kInfinity : 10 * std::log10(signal / noise);
}

void add_bits(Finding& finding, int rank, const Bytes& expected, const Bytes& got) {
  const size_t bytes = different(expected, got);
  if (bytes == 0) return;
  finding.different += bytes;
  finding.notes.push_back(f8::format("rank {} differs in {}: {} of {} bytes", rank, finding.check,
                                     bytes, expected.size()));
}

Finding close_by(std::string check, const Bytes& expected, const Bytes& got, Dtype type,
                 double needed_db) {
  Finding finding{.check = std::move(check),
                  .bits = false,
                  .sqnr_db = sqnr_db(decode(expected, type), decode(got, type)),
                  .needed_db = needed_db,
                  .notes = {}};
  if (!finding.is_good()) {
    finding.notes.push_back(
        f8::format("all ranks differ in {}: an SQNR of {:.1f} dB, {:.0f} needed", finding.check,
                   finding.sqnr_db, needed_db));
  }
  return finding;
}

}  // namespace f8::cli
