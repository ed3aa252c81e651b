// The filter's evidence: the speed surfaces of the devices that the databases know, in the order in
// which they are asked. Internal to tuning_db.
//
// The first device is that of the newest run of the first database that has rows of the recipe.
// Rows of the same device (name, power limit, MIG) in later databases fill the gaps of earlier
// ones; other devices answer only where the first cannot, and only as `modelled`.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tuning_db/surface.hpp"

namespace f8::tuning_db {

class Evidences {
 public:
  // device: only rows of the device of this name; empty: all.
  [[nodiscard]] static Result<Evidences> gather(std::string_view recipe, std::string_view device,
                                                std::span<const Database* const> dbs);
  [[nodiscard]] bool empty() const { return surfaces_.empty(); }
  [[nodiscard]] const std::string& device() const;  // not empty()
  [[nodiscard]] const Surface& first() const { return *surfaces_.front(); }
  [[nodiscard]] std::optional<Estimate> estimate(Shape shape) const;

 private:
  std::vector<std::unique_ptr<const Surface>> surfaces_;
};

}  // namespace f8::tuning_db
