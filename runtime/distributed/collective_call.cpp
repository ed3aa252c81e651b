#include "runtime/distributed/collective_call.hpp"

#include <array>

#include "base/format.hpp"

namespace f8::runtime {
namespace {

constexpr std::array kKindNames = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter",
                                   "ncclBroadcast"};
constexpr std::array kOps = {"sum", "prod", "max", "min", "avg"};

}  // namespace

size_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclUint8:
      return 1;
    case ncclBfloat16:
    case ncclFloat16:
      return 2;
    default:
      return 4;
  }
}

std::string in_words(const CollectiveCall& call) {
  const bool reduces =
      call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  return f8::format("{} of {} elements of {} bytes{}{}{}",
                    kKindNames[static_cast<size_t>(call.kind)], call.count,
                    element_bytes(call.type), reduces ? " (" : "",
                    reduces ? kOps[static_cast<size_t>(call.op)] : "", reduces ? ")" : "");
}

}  // namespace f8::runtime
