// Garbage collection: removes what nobody can use from a database file and gives its space back.
//
// Always removed: the trials of screenings whose run is finished, runs without trials, and the
// problems, candidates, toolchains, methods and devices that nothing refers to. Superseded trials are
// removed where the options ask. Trials are kept that are of the toolchain and method which count now
// for their problem and device class: so the tuning table is the same before and after.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace f8::tuning_db {

// With both conditions, a trial is removed that meets both.
struct GcOptions {
  std::optional<int64_t> toolchains_but{};           // all but the newest N of a device class
  std::optional<std::chrono::seconds> older_than{};  // by the trial's last change of state
  bool include_current = false;                      // also trials that count now
  bool dry_run = false;
  bool back_up = true;
};

// Superseded trials of one device and toolchain.
struct GcToolchain {
  std::string device, toolchain;  // for people
  int64_t trials = 0;
};

struct GcReport {
  std::vector<std::pair<std::string_view, int64_t>> removed;  // rows by kind
  std::vector<GcToolchain> superseded;                        // what these trials were
  int64_t bytes_before = 0, bytes_after = 0;
  std::filesystem::path backup;  // empty where none was made
  [[nodiscard]] bool is_empty() const;
};

// The removal is one transaction, and a dry run is made on a copy in memory. Refused while a run is
// being measured, and of a file that another process has open.
[[nodiscard]] Result<GcReport> collect_garbage(const std::filesystem::path& path,
                                               const GcOptions& options);

}  // namespace f8::tuning_db
