// A model of what a collective takes on the wire:
//
//   time = launch + steps inside hosts * step + steps between hosts * step
//          + bytes that a rank receives / bandwidth
//
// Its rules are those by which NCCL chooses an algorithm:
//   all-gather,       a ring through all ranks that crosses from each host to the next once:
//   reduce-scatter    ranks - 1 steps, hosts - 1 of them between hosts; a rank receives
//                     (ranks - 1) / ranks of all bytes
//   all-reduce        the faster one of two such rings, and of a tree: along the ranks of a host
//                     and up a binary tree of hosts, and back, all bytes each way
// Every rank has a network card of its own, so that a ring which has p ranks on each host enters it
// over p cards; the slower one of NVLink and these cards bounds it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace f8::tuning_db {

enum class Collective : uint8_t { kAllGather, kReduceScatter, kAllReduce };
inline constexpr std::array kCollectives = {Collective::kAllGather, Collective::kReduceScatter,
                                            Collective::kAllReduce};
[[nodiscard]] std::string_view to_string(Collective collective);  // "all_gather", ...

// Ranks that call a collective, spread evenly over hosts.
struct RankGroup {
  int64_t ranks = 1;
  int64_t hosts = 1;
  bool operator==(const RankGroup&) const = default;
};

// What a model multiplies its constants with.
struct WireTerms {
  double nvlink_steps = 0;   // inside hosts
  double network_steps = 0;  // between them
  double bytes = 0;          // that a rank receives
  double cards = 0;          // over which they enter a host; 0: one host
  bool has_nvlink = true;    // more than one rank on a host
};

struct WireLink {
  double step_us = 0;   // from rank to rank, before the first byte
  double gb_per_s = 0;  // to a rank; 1e9 bytes a second
};

struct WireModel {
  double launch_us = 0;
  WireLink nvlink;           // inside a host
  WireLink network;          // between hosts, a card
  double cast_gb_per_s = 0;  // what a cast reads and writes; H100, docs/lab/casts.md
  double error = 0;          // root mean square of relative errors, of figures left out of the fit
  std::vector<RankGroup> measured{};  // the groups of these figures; others are predicted
  std::string source{};
  std::string date{};  // empty: not known

  // The constants that float8 comes with (wire_constants.cpp).
  [[nodiscard]] static const WireModel& fitted();

  // bytes: of the whole tensor, as every rank has it after an all-gather or before a
  // reduce-scatter. One rank takes no time.
  [[nodiscard]] double us(Collective collective, RankGroup group, double bytes) const;
  // The terms of that time, by the faster one of ring and tree.
  [[nodiscard]] WireTerms terms(Collective collective, RankGroup group, double bytes) const;
  [[nodiscard]] std::string origin() const;  // source and date
  [[nodiscard]] bool is_measured(RankGroup group) const;
  // Half of the width of an interval, as a share of the time: twice the error.
  [[nodiscard]] double half_width() const { return 2 * error; }
};

}  // namespace f8::tuning_db
