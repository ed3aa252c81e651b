// What tells the program of an emulated device from that of a GPU; all else is the same objects.
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {

constinit const bool kEmulated = FLOAT8_EMULATED;

}  // namespace f8::runtime::gpu
