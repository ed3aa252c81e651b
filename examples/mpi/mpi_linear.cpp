// Ranks that MPI starts, a process and a device each, compute one linear layer in fp8. They share its weight
// by rows (FSDP): each casts its own rows, with the scales of the whole weight, and gathers those of the
// others at a byte an element.
//
//   mpirun -n 4 mpi_linear                  on four GPUs of one host
//   mpirun -n 4 mpi_linear --table FILE     rank 0 alone reads the file
//   mpirun -n 4 mpi_linear --emulate        without a GPU
//
// MPI gives a process its rank, all processes the tuning table of rank 0, and NCCL its id. Then NCCL reduces
// and gathers. An emulated device has its tensors in host memory, where MPI itself does that.
//
// Exit status: 0 where y is that of one device, 1 where something failed, 2 where this machine has no
// Hopper GPU.
#include <mpi.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <float8/float8.hpp>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_memory.hpp"

namespace {

constexpr std::int64_t kTokens = 64, kK = 256, kRows = 128;  // of a rank

using Bf16 = std::uint16_t;  // the upper half of a float

void check(float8_status status) {
  if (status != FLOAT8_OK) throw float8::Exception({status, float8_last_error()});
}
void check(const float8::Status& status) {
  if (!status) throw float8::Exception({status.code(), status.message()});
}
void check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  throw std::runtime_error(call + (std::string(": ") + ncclGetErrorString(result)));
}

std::vector<Bf16> random_matrix(std::int64_t rows, std::int64_t columns, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<Bf16> values(static_cast<std::size_t>(rows * columns));
  for (Bf16& value : values) {
    const float sample = normal(generator);
    std::uint32_t bits;
    std::memcpy(&bits, &sample, sizeof bits);
    value = static_cast<Bf16>(bits >> 16);
  }
  return values;
}

// Memory of a GPU, or of the host where the device is emulated.
class Memory {
 public:
  Memory(bool emulate, int device) {
    if (!emulate) device_.emplace(device);
  }
  void* allocate(std::size_t bytes) {
    if (device_) return device_->allocate(bytes);
    host_.emplace_back(std::aligned_alloc(256, (bytes + 256) / 256 * 256), std::free);
    return host_.back().get();
  }
  void* upload(const std::vector<Bf16>& values) {
    if (device_) return device_->upload(values);
    void* const to = allocate(values.size() * sizeof(Bf16));
    std::memcpy(to, values.data(), values.size() * sizeof(Bf16));
    return to;
  }
  std::vector<Bf16> download(const void* from, std::size_t count) {
    if (device_) return device_->download<Bf16>(from, count);
    std::vector<Bf16> values(count);
    std::memcpy(values.data(), from, count * sizeof(Bf16));
    return values;
  }

 private:
  std::optional<Device> device_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> host_;
};

// The ranks, and the collectives that they call together.
class Ranks {
 public:
  Ranks() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    MPI_Comm host = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &local_rank);
    MPI_Comm_free(&host);
  }
  ~Ranks() {
    if (nccl_ != nullptr) ncclCommDestroy(nccl_);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // All ranks take the tuning table of rank 0, so that their kernels, and results, are the same.
  void share_table(float8::Context& context) const {
    std::string text = rank == 0 ? context.table().value() : "";
    std::uint64_t size = text.size();
    MPI_Bcast(&size, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    text.resize(size);
    MPI_Bcast(&text[0], static_cast<int>(size), MPI_CHAR, 0, MPI_COMM_WORLD);
    if (rank > 0) static_cast<void>(context.set_table(text).value());
  }
  // NCCL's communicator of all ranks; each rank's device is current.
  void connect() {
    ncclUniqueId id{};
    if (rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    check(ncclCommInitRank(&nccl_, count, id, rank), "ncclCommInitRank");
  }
  // Maxima over ranks, which are the bits of numbers without a sign.
  void sync_amax(std::uint32_t* words, std::size_t size) const {
    if (nccl_ != nullptr) return check(float8_amax_sync(words, size, nccl_, nullptr));
    MPI_Allreduce(MPI_IN_PLACE, words, static_cast<int>(size), MPI_UINT32_T, MPI_MAX,
                  MPI_COMM_WORLD);
  }
  // q of the whole weight and the scale of each row: in shards of equal rows, those of the ranks lie under
  // each other.
  void gather_q(const float8::Context& context, const float8::Tensor& own,
                const float8::Tensor& whole) const {
    if (nccl_ != nullptr) {
      float8::GatherArgs args;
      args.shard = &own;
      args.whole = &whole;
      args.shard_rows = own.rows;
      args.communicator = nccl_;
      check(float8_gather_tensor(context.get(), &args, nullptr));
      return check(float8_comm_wait(context.get(), nccl_, "the gather of w", 0, nullptr));
    }
    const auto gather = [](const void* from, void* to, std::int64_t bytes) {
      MPI_Allgather(from, static_cast<int>(bytes), MPI_BYTE, to, static_cast<int>(bytes), MPI_BYTE,
                    MPI_COMM_WORLD);
    };
    gather(own.q, const_cast<void*>(whole.q), own.rows * own.ld_q);
    gather(own.q_inverse_scale, const_cast<float*>(whole.q_inverse_scale), own.rows * 4);
  }
  [[nodiscard]] bool all(bool holds) const {
    int of_all = holds ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &of_all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return of_all == 1;
  }

  int rank = 0;
  int count = 1;
  int local_rank = 0;  // among those of this host

 private:
  ncclComm_t nccl_ = nullptr;  // null: MPI does what it would do
};

// y of this rank's tokens, with the weight gathered from its shards.
std::vector<Bf16> sharded(const Ranks& ranks, const float8::Context& context, Memory& memory,
                          const float8::Linear& linear, void* workspace, const void* x,
                          const std::vector<Bf16>& w) {
  float8::QuantizerDesc desc;
  desc.operand = FLOAT8_WEIGHT;
  desc.cols = kK;
  desc.recipe = float8::Recipe::rowwise();
  desc.rows_max = kRows * ranks.count;
  const auto whole = float8::Quantizer::plan(context, desc).value();
  desc.rows_max = kRows;
  desc.over_ranks = true;
  const auto shard = float8::Quantizer::plan(context, desc).value();

  const auto first = w.begin() + ranks.rank * kRows * kK;
  float8::QuantizeArgs args;
  args.x.data = memory.upload({first, first + kRows * kK});
  args.tensor.data = memory.allocate(shard.tensor_bytes());
  args.amax = static_cast<std::uint32_t*>(memory.allocate(shard.amax_words() * 4));
  args.row_amax = static_cast<std::uint32_t*>(memory.allocate(shard.row_amax_words() * 4));
  check(shard.find_amax(args, nullptr));
  ranks.sync_amax(args.amax, shard.amax_words());
  check(shard.run(args, nullptr));

  const float8::Tensor own = shard.view(args.tensor.data, kRows).value();
  float8::Tensor q = whole.view(memory.allocate(whole.tensor_bytes()), kRows * ranks.count).value();
  q.qt = nullptr;  // a forward reads q alone
  ranks.gather_q(context, own, q);

  float8::ForwardArgs forward;
  forward.x.data = x;
  forward.w.fp8 = &q;
  const auto elements = static_cast<std::size_t>(kTokens * kRows * ranks.count);
  forward.y.data = memory.allocate(elements * sizeof(Bf16));
  forward.workspace.data = workspace;
  check(linear.forward(forward, nullptr));
  return memory.download(forward.y.data, elements);
}

// The same with the whole weight on this device.
std::vector<Bf16> on_one_device(Memory& memory, const float8::Linear& linear, void* workspace,
                                const void* x, const std::vector<Bf16>& w) {
  float8::ForwardArgs forward;
  forward.x.data = x;
  forward.w.data = memory.upload(w);
  const std::size_t elements = kTokens * w.size() / kK;
  forward.y.data = memory.allocate(elements * sizeof(Bf16));
  forward.workspace.data = workspace;
  check(linear.forward(forward, nullptr));
  return memory.download(forward.y.data, elements);
}

int run(Ranks& ranks, bool emulate, const std::string& table) {
  float8::ContextOptions options;
  options.emulate = emulate;
  options.no_table = ranks.rank > 0;  // it gets that of rank 0
  const int device = emulate ? ranks.local_rank % 8 : ranks.local_rank;
  float8::Context context = float8::Context::create(device, options).value();
  if (ranks.rank == 0 && !table.empty()) static_cast<void>(context.load_table(table).value());
  ranks.share_table(context);
  Memory memory(emulate, device);
  if (!emulate) ranks.connect();

  float8::LinearDesc desc;
  desc.m_max = kTokens;
  desc.n = kRows * ranks.count;
  desc.k = kK;
  desc.recipe = float8::Recipe::rowwise();
  const auto linear = float8::Linear::plan(context, desc).value();
  void* const workspace = memory.allocate(linear.workspace_bytes());
  // All ranks know the whole weight, so that the result can be compared.
  const auto w = random_matrix(desc.n, desc.k, 1);
  const void* const x =
      memory.upload(random_matrix(kTokens, kK, 2 + static_cast<unsigned>(ranks.rank)));
  const bool equal = ranks.all(sharded(ranks, context, memory, linear, workspace, x, w) ==
                               on_one_device(memory, linear, workspace, x, w));
  if (ranks.rank == 0) {
    std::printf("%d ranks, tuning table %016llx: y is %s\n", ranks.count,
                static_cast<unsigned long long>(context.table_hash()),
                equal ? "that of one device" : "not that of one device");
  }
  return equal ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  bool emulate = false;
  std::string table;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--emulate") == 0) emulate = true;
    if (std::strcmp(argv[i], "--table") == 0 && i + 1 < argc) table = argv[++i];
  }
  int status = 1;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    Ranks ranks;
    status = run(ranks, emulate, table);
  } catch (const float8::Exception& error) {
    std::fprintf(stderr, "mpi_linear: rank %d: %s\n", rank, error.what());
    const bool unfit = error.code() == FLOAT8_ENVIRONMENT || error.code() == FLOAT8_UNSUPPORTED;
    MPI_Abort(MPI_COMM_WORLD, unfit ? 2 : 1);  // the others wait for this rank
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_linear: rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
