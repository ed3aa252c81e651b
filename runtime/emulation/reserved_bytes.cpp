#include "runtime/emulation/reserved_bytes.hpp"

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/hash.hpp"

namespace f8::runtime::emulation {
namespace {

struct Remembered {
  std::string hash;
  const Module* owner;
};
struct Workspaces {
  std::mutex mutex;
  std::map<const void*, Remembered> all;
};
Workspaces& workspaces() {
  static Workspaces workspaces;
  return workspaces;
}

std::string hash_of(ReservedBytes bytes) {
  return hash_hex(std::string_view{static_cast<const char*>(bytes.begin), bytes.count});
}

bool are_all_the_same(ReservedBytes bytes) {
  const auto* first = static_cast<const char*>(bytes.begin);
  return std::memcmp(first, first + 1, bytes.count - 1) == 0;
}

}  // namespace

ReservedBytes reserved_bytes(const kernels::QuantizeArgs& args, int sm_count) {
  const int64_t resident = int64_t{codegen::kQuantizeBlocksPerSm} * sm_count;
  const auto first =
      static_cast<size_t>(kernels::quantize_sync_bytes(resident * kernels::kMaxTilesOfBlock));
  const auto second = static_cast<size_t>(kernels::quantize_sync_bytes(resident));
  // A launch that overlaps with another one has the second part.
  const auto* sync = reinterpret_cast<const char*>(args.sync);
  return {args.cast.overlap != 0 ? sync - first : sync, first + second};
}

bool are_untouched(ReservedBytes bytes) {
  Workspaces& known = workspaces();
  const std::lock_guard lock(known.mutex);
  const auto found = known.all.find(bytes.begin);
  if (found == known.all.end() || found->second.hash == hash_of(bytes)) return true;
  known.all.erase(found);
  return are_all_the_same(bytes);
}

void remember(ReservedBytes bytes, const Module* owner) {
  std::string hash = hash_of(bytes);
  Workspaces& known = workspaces();
  const std::lock_guard lock(known.mutex);
  known.all[bytes.begin] = {std::move(hash), owner};
}

void forget_memory(const void* begin, size_t bytes) {
  Workspaces& known = workspaces();
  const std::lock_guard lock(known.mutex);
  known.all.erase(known.all.lower_bound(begin),
                  known.all.lower_bound(static_cast<const char*>(begin) + bytes));
}

void forget_owner(const Module* owner) {
  Workspaces& known = workspaces();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.all, [owner](const auto& entry) { return entry.second.owner == owner; });
}

}  // namespace f8::runtime::emulation
