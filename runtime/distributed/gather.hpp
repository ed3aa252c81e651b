// The gather of a tensor in fp8 that ranks hold by rows, into the copies that GEMMs read, one byte an
// element on the wire and the inverse scales with it. q of the shards lies under each other in the
// whole tensor and qt side by side, or as it arrives (float8_tensor.qt_shards).
//
//   workspace := part*             of those that do not arrive in place
//   part      := slot[ranks]       [lines][shard's width], dense, in whole 16 bytes
//
// A part (q, qt, or the scales of either) is lines of bytes of which each shard has a width. A part of
// one line, of shards of equal rows, is gathered in place. Any other is packed into the rank's slot,
// gathered there and copied to its columns, by 2-D copies on the device.
#pragma once

#include "float8/float8.h"
#include "runtime/device/context.hpp"

struct ncclComm;

namespace f8::runtime {

struct GatherCall {
  float8_tensor shard;
  float8_tensor whole;  // of which copies that are null are not gathered; their memory is written
  int64_t shard_rows = 0;  // of all shards but the last ones
  ncclComm* communicator = nullptr;
  float8_buffer workspace = {};
};

// The bytes of workspace of any rank's call.
[[nodiscard]] size_t gather_workspace_bytes(const float8_tensor& whole, int64_t shard_rows,
                                            int ranks);
[[nodiscard]] Status gather(Context& context, const GatherCall& call, Stream stream);

}  // namespace f8::runtime
