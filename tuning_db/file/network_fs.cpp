// File systems that several hosts mount at once, by statfs magic. WAL keeps its index in shared
// memory, which two hosts do not share, and remote locks are not always kept: writing there can
// destroy the database.
#include <sys/statfs.h>

#include <algorithm>
#include <array>

#include "tuning_db/state.hpp"

namespace f8::tuning_db {
namespace {

struct NetworkFs {
  uint64_t magic;
  const char* name;
};

constexpr std::array kNetworkFs = {
    NetworkFs{0x6969, "NFS"},        NetworkFs{0x517b, "SMB"},
    NetworkFs{0xfe534d42, "SMB2"},   NetworkFs{0xff534d42, "CIFS"},
    NetworkFs{0x0bd00bd0, "Lustre"}, NetworkFs{0x47504653, "GPFS"},
    NetworkFs{0x19830326, "BeeGFS"}, NetworkFs{0x00c36400, "Ceph"},
    NetworkFs{0x5346414f, "AFS"},    NetworkFs{0x01161970, "GFS2"},
    NetworkFs{0x7461636f, "OCFS2"},  NetworkFs{0x20030528, "OrangeFS"},
    NetworkFs{0x6b414653, "AFS"},    NetworkFs{0x73757245, "Coda"},
};

}  // namespace

Status refuse_network_fs(const std::filesystem::path& path, uint64_t magic) {
  const auto* found = std::ranges::find(kNetworkFs, magic, &NetworkFs::magic);
  if (found == kNetworkFs.end()) return {};
  return fail(ErrorCode::kUnsupported,
              "{}: a tuning database is not written on a network file system ({}); write it on a "
              "local disk and merge it when the sweep is done",
              path.string(), found->name);
}

uint64_t fs_magic(const std::filesystem::path& path) {
  struct statfs info {};
  if (::statfs(path.c_str(), &info) != 0) return 0;
  // Some magics have the top bit set, which f_type extends.
  return static_cast<uint64_t>(info.f_type) & 0xffffffffU;
}

}  // namespace f8::tuning_db
