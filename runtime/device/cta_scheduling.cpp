#include "runtime/device/cta_scheduling.hpp"

#include <numeric>
#include <utility>
#include <vector>

namespace f8::runtime {
namespace {

// Each CTA writes the number of its SM and stays until all others are placed.
constexpr const char* kProbe = R"ptx(
.version 8.0
.target sm_90
.address_size 64
.visible .entry float8_cta_probe(.param .u64 sms)
{
  .reg .pred more;
  .reg .b32 sm, block;
  .reg .b64 at, offset, start, now;
  mov.u64 start, %clock64;
  ld.param.u64 at, [sms];
  cvta.to.global.u64 at, at;
  mov.u32 sm, %smid;
  mov.u32 block, %ctaid.x;
  mul.wide.u32 offset, block, 4;
  add.u64 at, at, offset;
  st.global.u32 [at], sm;
again:
  mov.u64 now, %clock64;
  sub.u64 now, now, start;
  setp.lt.u64 more, now, 30000;
  @more bra again;
  ret;
}
)ptx";
constexpr int kOneAnSm = 200 * 1024;  // bytes of shared memory: two CTAs do not fit an SM
constexpr int kTries = 4;

// The resources of a probe, freed at its end.
struct Probe {
  const Driver& driver;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CUdeviceptr sms = 0;
  CUstream stream = nullptr;

  explicit Probe(const Driver& of) : driver(of) {}
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;
  ~Probe() {
    if (stream != nullptr) driver.stream_destroy(stream);
    if (sms != 0) driver.mem_free(sms);
    if (module != nullptr) driver.module_unload(module);
  }

  [[nodiscard]] bool open(size_t blocks) {
    return driver.module_load_data(&module, kProbe) == CUDA_SUCCESS &&
           driver.module_get_function(&function, module, "float8_cta_probe") == CUDA_SUCCESS &&
           driver.func_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     kOneAnSm) == CUDA_SUCCESS &&
           driver.mem_alloc(&sms, blocks * sizeof(uint32_t)) == CUDA_SUCCESS &&
           driver.stream_create(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
  }

  // The SMs of the first CTAs of clusters; empty where it fails.
  [[nodiscard]] std::vector<uint32_t> place(size_t blocks, unsigned cluster_size) {
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {cluster_size, 1, 1};
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(blocks);
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 32;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = kOneAnSm;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster_size > 1 ? 1 : 0;
    void* parameters[] = {&sms};
    std::vector<uint32_t> all(blocks);
    if (driver.launch_kernel_ex(&config, function, parameters, nullptr) != CUDA_SUCCESS ||
        driver.memcpy_dtoh_async(all.data(), sms, blocks * sizeof(uint32_t), stream) !=
            CUDA_SUCCESS ||
        driver.stream_synchronize(stream) != CUDA_SUCCESS) {
      return {};
    }
    std::vector<uint32_t> firsts;
    for (size_t i = 0; i < blocks; i += cluster_size) firsts.push_back(all[i]);
    return firsts;
  }
};

}  // namespace

ClusterRemap identity_remap() {
  ClusterRemap remap;
  std::iota(remap.begin(), remap.end(), kernels::u8{0});
  return remap;
}

ClusterRemap remap_of_first(const ClusterRemap& remap, size_t clusters) {
  constexpr kernels::u8 kNone = kernels::kMaxRemappedClusters;
  ClusterRemap cluster_at;
  cluster_at.fill(kNone);
  for (size_t i = 0; i < clusters; ++i) cluster_at[remap[i]] = static_cast<kernels::u8>(i);
  ClusterRemap ranks = identity_remap();
  kernels::u8 rank = 0;
  for (const kernels::u8 cluster : cluster_at) {
    if (cluster != kNone) ranks[cluster] = rank++;
  }
  return ranks;
}

std::optional<ClusterRemap> cluster_remap(std::span<const uint32_t> blocks,
                                          std::span<const uint32_t> clusters) {
  constexpr kernels::u8 kNone = kernels::kMaxRemappedClusters;
  const size_t count = clusters.size();
  if (count > kernels::kMaxRemappedClusters || blocks.size() != 2 * count) return std::nullopt;
  ClusterRemap index_of;  // of a TPC, in the order of single CTAs
  index_of.fill(kNone);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t tpc = blocks[2 * i] / 2;
    if (tpc >= count || index_of[tpc] != kNone) return std::nullopt;
    if ((blocks[2 * i] ^ 1U) != blocks[2 * i + 1]) return std::nullopt;
    index_of[tpc] = static_cast<kernels::u8>(i);
  }
  ClusterRemap remap = identity_remap();
  for (size_t i = 0; i < count; ++i) {
    const uint32_t tpc = clusters[i] / 2;
    if (tpc >= count || index_of[tpc] == kNone) return std::nullopt;
    remap[i] = std::exchange(index_of[tpc], kNone);
  }
  return remap;
}

bool scheduled_alike(std::span<const uint32_t> blocks, std::span<const uint32_t> others) {
  if (blocks.empty() || blocks.size() != others.size()) return false;
  std::vector<uint32_t> next(blocks.size());
  for (size_t i = 0; i + 1 < blocks.size(); ++i) {
    if (blocks[i] >= next.size()) return false;
    next[blocks[i]] = blocks[i + 1];
  }
  size_t same = 0;
  for (size_t i = 0; i + 1 < others.size(); ++i) {
    if (others[i] >= next.size()) return false;
    if (next[others[i]] == others[i + 1]) ++same;
  }
  return same >= others.size() * 7 / 8;
}

ClusterRemap probe_cluster_remap(const Driver& driver, int sm_count) {
  const auto blocks = static_cast<size_t>(sm_count / 2 * 2);
  Probe probe(driver);
  if (!probe.open(blocks)) return identity_remap();
  for (int i = 0; i < kTries; ++i) {
    const std::vector<uint32_t> before = probe.place(blocks, 1);
    const std::vector<uint32_t> clusters = probe.place(blocks, 2);
    if (!scheduled_alike(before, probe.place(blocks, 1))) continue;
    if (const auto remap = cluster_remap(before, clusters)) return *remap;
  }
  return identity_remap();
}

}  // namespace f8::runtime
