// One collective of a rank as it is compared between ranks and named in messages.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace f8::runtime {

enum class CollectiveKind : uint8_t { kAllReduce, kAllGather, kReduceScatter, kBroadcast };

// `count` is as NCCL counts: of what is sent in a gather, received in a scatter.
struct CollectiveCall {
  CollectiveKind kind{};
  size_t count = 0;
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;
  bool operator==(const CollectiveCall&) const = default;
};

[[nodiscard]] size_t element_bytes(ncclDataType_t type);
// "ncclAllReduce of 5 elements of 4 bytes (max)"
[[nodiscard]] std::string in_words(const CollectiveCall& call);

}  // namespace f8::runtime
