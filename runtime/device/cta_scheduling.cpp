#include "runtime/device/cta_scheduling.hpp"

#include <numeric>
#include <utility>
#include <vector>

namespace f8::runtime {
namespace {

// Each block writes its SM's number and stays long enough for all others to be dealt.
constexpr const char* kProbe = R"ptx(
.version 8.0
.target sm_90
.address_size 64
.visible .entry float8_dealing(.param .u64 sms)
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
constexpr int kOneAnSm = 200 * 1024;  // bytes of shared memory that two blocks do not find
constexpr int kTries = 4;

// What a probe holds, freed in the end.
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
           driver.module_get_function(&function, module, "float8_dealing") == CUDA_SUCCESS &&
           driver.func_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     kOneAnSm) == CUDA_SUCCESS &&
           driver.mem_alloc(&sms, blocks * sizeof(uint32_t)) == CUDA_SUCCESS &&
           driver.stream_create(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
  }

  // The SMs of the first blocks of clusters; empty where it fails.
  [[nodiscard]] std::vector<uint32_t> deal(size_t blocks, unsigned cluster_size) {
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

PairPlaces places_as_dealt() {
  PairPlaces places;
  std::iota(places.begin(), places.end(), kernels::u8{0});
  return places;
}

PairPlaces places_of_first(const PairPlaces& places, size_t pairs) {
  constexpr kernels::u8 kNone = kernels::kMaxRemappedClusters;
  PairPlaces pair_at;
  pair_at.fill(kNone);
  for (size_t i = 0; i < pairs; ++i) pair_at[places[i]] = static_cast<kernels::u8>(i);
  PairPlaces ranks = places_as_dealt();
  kernels::u8 rank = 0;
  for (const kernels::u8 pair : pair_at) {
    if (pair != kNone) ranks[pair] = rank++;
  }
  return ranks;
}

std::optional<PairPlaces> pair_places(std::span<const uint32_t> blocks,
                                      std::span<const uint32_t> clusters) {
  constexpr kernels::u8 kNone = kernels::kMaxRemappedClusters;
  const size_t pairs = clusters.size();
  if (pairs > kernels::kMaxRemappedClusters || blocks.size() != 2 * pairs) return std::nullopt;
  PairPlaces place_of;  // of a TPC, in the order of single blocks
  place_of.fill(kNone);
  for (size_t i = 0; i < pairs; ++i) {
    const uint32_t tpc = blocks[2 * i] / 2;
    if (tpc >= pairs || place_of[tpc] != kNone) return std::nullopt;
    if ((blocks[2 * i] ^ 1U) != blocks[2 * i + 1]) return std::nullopt;
    place_of[tpc] = static_cast<kernels::u8>(i);
  }
  PairPlaces places = places_as_dealt();
  for (size_t i = 0; i < pairs; ++i) {
    const uint32_t tpc = clusters[i] / 2;
    if (tpc >= pairs || place_of[tpc] == kNone) return std::nullopt;
    places[i] = std::exchange(place_of[tpc], kNone);
  }
  return places;
}

bool dealt_alike(std::span<const uint32_t> blocks, std::span<const uint32_t> others) {
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

PairPlaces find_pair_places(const Driver& driver, int sm_count) {
  const auto blocks = static_cast<size_t>(sm_count / 2 * 2);
  Probe probe(driver);
  if (!probe.open(blocks)) return places_as_dealt();
  for (int i = 0; i < kTries; ++i) {
    const std::vector<uint32_t> before = probe.deal(blocks, 1);
    const std::vector<uint32_t> clusters = probe.deal(blocks, 2);
    if (!dealt_alike(before, probe.deal(blocks, 1))) continue;
    if (const auto places = pair_places(before, clusters)) return *places;
  }
  return places_as_dealt();
}

}  // namespace f8::runtime
