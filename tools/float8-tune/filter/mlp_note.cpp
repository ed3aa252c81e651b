#include "tools/float8-tune/filter/mlp_note.hpp"

#include <string>
#include <vector>

#include "base/format.hpp"

namespace f8::cli {

void note_mlps(const TuningTable& table, const Recipe& recipe, const AskedDevice& device,
               const tuning_db::MlpCounts& mlps, const Global& global) {
  if (!recipe.is_fp8_throughout()) {
    note(global,
         "--fuse: float8.torch.fuse leaves MLPs of recipe {}, whose GEMMs are not all in fp8, so "
         "that each linear is judged by itself",
         recipe.name);
    return;
  }
  if (mlps.all == 0) {
    note(global, "--fuse: the model has no MLP of linears that may be converted");
    return;
  }
  if (mlps.as_wholes == mlps.all) return;
  std::vector<std::string> devices = devices_with(
      table, table.mlps(), [&](const LinearSpeedup& row) { return row.recipe == recipe.name; });
  const bool own = std::erase(devices, device.name) > 0;
  std::string why = "rows of these are stronger evidence than those of MLPs";
  if (!own && devices.empty()) {
    why = f8::format("there are no measurements of MLPs of recipe {}", recipe.name);
  } else if (!own) {
    why =
        f8::format("MLPs of recipe {} were {}", recipe.name, elsewhere_hint(devices, device.name));
  }
  note(global, "--fuse: {} of {} MLPs are judged by their linears: {}", mlps.all - mlps.as_wholes,
       mlps.all, why);
}

}  // namespace f8::cli
