#include "tuning_db/estimate/wire_model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace f8::tuning_db {
namespace {

WireTerms ring_terms(Collective collective, RankGroup group, double bytes) {
  const double rings = collective == Collective::kAllReduce ? 2 : 1;
  const auto ranks = static_cast<double>(group.ranks);
  const auto hosts = static_cast<double>(group.hosts);
  return {.nvlink_steps = rings * (ranks - hosts),
          .network_steps = rings * (hosts - 1),
          .bytes = rings * bytes * (ranks - 1) / ranks,
          .cards = group.hosts > 1 ? ranks / hosts : 0,
          .has_nvlink = group.ranks > group.hosts};
}

WireTerms tree_terms(RankGroup group, double bytes) {
  WireTerms terms = ring_terms(Collective::kAllReduce, group, bytes);
  const auto hosts = static_cast<uint64_t>(group.hosts);
  terms.nvlink_steps = 2 * static_cast<double>(group.ranks / group.hosts - 1);
  terms.network_steps = 2 * static_cast<double>(std::bit_width(hosts - 1));
  terms.bytes = 2 * bytes;
  return terms;
}

double us_of(const WireModel& model, const WireTerms& terms) {
  double us_per_byte = terms.has_nvlink ? 1e-3 / model.nvlink.gb_per_s : 0;
  if (terms.cards > 0) {
    us_per_byte = std::max(us_per_byte, 1e-3 / (terms.cards * model.network.gb_per_s));
  }
  return model.launch_us + terms.nvlink_steps * model.nvlink.step_us +
         terms.network_steps * model.network.step_us + terms.bytes * us_per_byte;
}

}  // namespace

std::string_view to_string(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllReduce:
      break;
  }
  return "all_reduce";
}

WireTerms WireModel::terms(Collective collective, RankGroup group, double bytes) const {
  const WireTerms ring = ring_terms(collective, group, bytes);
  if (collective != Collective::kAllReduce) return ring;
  const WireTerms tree = tree_terms(group, bytes);
  return us_of(*this, ring) <= us_of(*this, tree) ? ring : tree;
}

double WireModel::us(Collective collective, RankGroup group, double bytes) const {
  return group.ranks <= 1 ? 0 : us_of(*this, terms(collective, group, bytes));
}

std::string WireModel::origin() const {
  return date.empty() ? source : source + ", " + date;
}

bool WireModel::is_measured(RankGroup group) const {
  return std::ranges::find(measured, group) != measured.end();
}

}  // namespace f8::tuning_db
