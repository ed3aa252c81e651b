// The parameters of the fingerprint kernel, shared with the host like those of kernel_args.cuh, and
// apart from them since no other kernel's text has to change with these.
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

// Zeros at first; FLOAT8_FINGERPRINT_BYTES of device memory. Between launches `sum` and
// `blocks_done` are 0.
struct FingerprintState {
  u64 value[2];  // of the weight in the comparison before
  u64 sum[2];    // over the blocks of the launch that runs
  u32 blocks_done;
  u32 padding[3];
};
static_assert(sizeof(FingerprintState) == 48);

// Rows of bytes; one row where they follow each other.
struct FingerprintWeight {
  const u8* w;
  i64 pitch;      // of rows, in bytes
  i64 row_bytes;  // even
  u64 seed;
  FingerprintState* state;
  u32* valid;  // becomes 0 where the weight has another fingerprint than before
  u32 rows;
  i32 first_block;
  i32 blocks;
  i32 padding;
};

inline constexpr i32 kMaxFingerprints = 32;  // of a launch
struct FingerprintArgs {
  i32 count;
  i32 padding;
  FingerprintWeight tensors[kMaxFingerprints];
};
static_assert(sizeof(FingerprintArgs) <= 4096);

}  // namespace f8::kernels
