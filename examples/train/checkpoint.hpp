// A run's state between two steps. Training that goes on from it gives the same bits as training
// that did not stop.
//
//   checkpoint := "float8 train checkpoint 1" LF
//                 "run " identity LF            identity() of config.hpp
//                 "step " int LF                steps that are done
//                 "weights " int LF  "scale_bytes " int LF
//                 "payload " hash LF            32 hex digits of the bytes that follow
//   payload    := f32 loss[step]  f32 ms[step]
//                 f32 master[weights]  f32 m[weights]  f32 v[weights]  u8 scales[scale_bytes]
// Numbers of the payload are little-endian, end to end.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace f8::train {

struct Checkpoint {
  std::string run;
  std::vector<float> loss;  // of the steps that are done
  std::vector<float> ms;
  std::vector<float> master;
  std::vector<float> m;
  std::vector<float> v;
  std::vector<unsigned char> scales;  // the state of delayed scaling, as float8 saves it
};

// Whole or not at all: a reader never sees a part.
[[nodiscard]] Status save(const std::filesystem::path& path, const Checkpoint& checkpoint);
// Refuses what is damaged, and what another run (`run` differs) has left.
[[nodiscard]] Result<Checkpoint> load(const std::filesystem::path& path, const std::string& run);

}  // namespace f8::train
