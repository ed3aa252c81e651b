// Gathering rows into surfaces: see evidence.hpp.
#include "tuning_db/evidence.hpp"

#include <algorithm>
#include <map>

namespace f8::tuning_db {
namespace {

// What a class is to a lookup across databases: of its other fields, the memory that a driver
// reports differs by a little from release to release.
std::string identity(const DeviceClass& d) {
  return fmt::format("{}\n{}\n{}", d.name, d.power_limit_w, d.mig);
}

// The bf16 linear that this row was measured against.
const TrialRow* twin_of(const TrialRow& row, const std::vector<TrialRow>& bf16) {
  const TrialRow* same_run = nullptr;
  for (const TrialRow& b : bf16) {
    if (b.problem != row.problem) continue;
    if (row.result.ratio && b.uuid == row.result.ratio->pair_uuid) return &b;
    if (b.run_uuid == row.run_uuid) same_run = &b;
  }
  return same_run;
}

std::optional<SpeedPoint> to_point(const TrialRow& row, const std::vector<TrialRow>& bf16) {
  if (!row.result.timing) return std::nullopt;
  const Timing& fp8 = *row.result.timing;
  const TrialRow* twin = twin_of(row, bf16);
  SpeedPoint p{.shape = row.problem.shape, .row = row};
  if (row.result.ratio) {
    p.speedup = row.result.ratio->ratio;
    p.lo = row.result.ratio->lo;
    p.hi = row.result.ratio->hi;
    p.bf16_ns = twin != nullptr ? twin->result.timing->median_ns : p.speedup * fp8.median_ns;
    return p;
  }
  // Not measured interleaved: the intervals of both times make a wider one of their ratio.
  if (twin == nullptr || fp8.ci_lo_ns <= 0) return std::nullopt;
  const Timing& b = *twin->result.timing;
  p.speedup = b.median_ns / fp8.median_ns;
  p.lo = b.ci_lo_ns / fp8.ci_hi_ns;
  p.hi = b.ci_hi_ns / fp8.ci_lo_ns;
  p.bf16_ns = b.median_ns;
  return p;
}

bool better(const TrialRow& a, const TrialRow& b) {
  if (a.problem.bias != b.problem.bias) return !a.problem.bias;
  if (a.at != b.at) return a.at > b.at;
  return a.uuid < b.uuid;
}

struct Group {
  std::string identity;
  std::map<Shape, SpeedPoint> points;
};

}  // namespace

Result<Evidences> Evidences::gather(std::string_view recipe, std::string_view device,
                                    std::span<const Database* const> dbs) {
  std::vector<Group> groups;
  for (const Database* db : dbs) {
    const std::vector<TrialRow> rows = F8_TRY(db->linears(recipe));
    const std::vector<TrialRow> bf16 = F8_TRY(db->linears(recipe, Impl::kBf16));
    std::map<std::string, std::map<Shape, SpeedPoint>> found;
    for (const TrialRow& row : rows) {
      if (!device.empty() && row.device_name != device) continue;
      auto point = to_point(row, bf16);
      if (!point) continue;
      auto& points = found[identity(row.device)];
      const auto [at, is_new] = points.emplace(row.problem.shape, *point);
      if (!is_new && better(row, at->second.row)) at->second = *std::move(point);
    }
    const std::vector<DeviceClass> devices = F8_TRY(db->devices());
    for (const DeviceClass& d : devices) {
      const auto points = found.find(identity(d));
      if (points == found.end()) continue;
      auto group = std::ranges::find(groups, points->first, &Group::identity);
      if (group == groups.end()) group = groups.insert(groups.end(), {points->first, {}});
      group->points.merge(std::move(points->second));  // keeps what is there
      found.erase(points);
    }
  }
  Evidences evidences;
  for (Group& group : groups) {
    std::vector<SpeedPoint> points;
    for (auto& [shape, point] : group.points) points.push_back(std::move(point));
    evidences.surfaces_.push_back(std::make_unique<const Surface>(std::move(points)));
  }
  return evidences;
}

const std::string& Evidences::device() const {
  return first().points().front().row.device_name;
}

std::optional<Estimate> Evidences::estimate(Shape shape) const {
  for (const auto& surface : surfaces_) {
    auto e = surface->estimate(shape);
    if (!e) continue;
    if (surface != surfaces_.front()) {
      e->evidence = Evidence::kModelled;
      e->basis = "on another device than the first: " + e->basis;
    }
    return e;
  }
  return std::nullopt;
}

}  // namespace f8::tuning_db
