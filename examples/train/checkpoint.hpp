// A checkpoint is a run's state between two steps. Training that goes on from it gives the same
// bits as training that did not stop.
//
//   checkpoint := "float8 train checkpoint 2" LF
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

namespace train {

struct Checkpoint {
  std::string run;
  std::vector<float> loss;  // losses of the steps that are done
  std::vector<float> ms;    // and their times
  std::vector<float> master;
  std::vector<float> m;
  std::vector<float> v;
  std::vector<unsigned char> scales;  // the state of delayed scaling, as float8 saves it
};

// Writes the file whole or not at all: a reader never sees a part.
void save(const std::filesystem::path& path, const Checkpoint& checkpoint);
// Throws where the file is damaged, and where another run has left it (`run` differs).
[[nodiscard]] Checkpoint load(const std::filesystem::path& path, const std::string& run);

}  // namespace train
