// Attention as graphs of cuDNN's frontend, whose headers are compiled in here and nowhere else. A graph is of the sizes
// and strides of a call. The first call that has them builds it, within some 50 ms, or a second where cuDNN compiles a
// kernel; later ones find it. Calls of a plan take a lock and allocate on the host.
//
// Graphs of packed sequences are of rounded sizes, so that packs of other numbers of sequences and tokens share one: there
// are more sequences, without tokens, and a launch before cuDNN's (attention_spans) tells where each lies. A forward has one behind it
// too (attention_finish).
#include "runtime/attention/cudnn/cudnn.hpp"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

#include "base/dynlib.hpp"
#include "base/without_exceptions.hpp"
#include "runtime/attention/cudnn/graph_sizes.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"

// The frontend finds cuDNN's functions through it.
void* cudnn_frontend::cudnn_dlhandle = nullptr;

namespace f8::runtime {
namespace fe = cudnn_frontend;

namespace {

constexpr int kLeastVersion = 90501;  // the first with a backward of heads of 256
constexpr int kBadVersion = 91000;    // whose attention NVIDIA's own frontend refuses in part
constexpr int kLeastOfPacks = 90600;  // has no packs of shared heads before
// 9.14 has wrong gradients of packed heads of 256, and dk and dv of packs lie as k and v do.
constexpr int kLeastOfGoodPacks = 91900;
constexpr size_t kMostGraphs = 128;  // of a plan

std::string version_text(int version) {
  return f8::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<int> load() {
  const DynamicLibrary library =
      F8_TRY(DynamicLibrary::open("libcudnn.so.9", "cuDNN 9.5.1",
                                  "install cuDNN 9 for CUDA 13, or the wheel nvidia-cudnn-cu13"));
  fe::cudnn_dlhandle = library.handle();
  size_t (*get_version)() = nullptr;
  F8_TRY(library.resolve("cudnnGetVersion", get_version));
  const auto version = static_cast<int>(get_version());
  if (version < kLeastVersion || version == kBadVersion) {
    return fail(ErrorCode::kEnvironment,
                "libcudnn.so.9 is cuDNN {}; attention needs {} or newer, and not {}",
                version_text(version), version_text(kLeastVersion), version_text(kBadVersion));
  }
  return version;
}

// This object is made after cuDNN's own static objects, so it is destroyed before them. What lives longer, such as a
// context in static memory, must leave cuDNN alone, and ends with the process.
std::atomic<bool> g_cudnn_is_gone{false};
struct LoadedCudnn {
  Result<int> version = without_exceptions(load);
  LoadedCudnn() = default;
  ~LoadedCudnn() { g_cudnn_is_gone.store(true, std::memory_order_release); }
  LoadedCudnn(const LoadedCudnn&) = delete;
  LoadedCudnn& operator=(const LoadedCudnn&) = delete;
};

Status check(fe::error_t error, const char* what) {
  if (error.is_good()) return {};
  const bool unsupported = error.get_code() == fe::error_code_t::GRAPH_NOT_SUPPORTED;
  return fail(unsupported ? ErrorCode::kUnsupported : ErrorCode::kCuda, "cuDNN {}: {} ({})",
              version_text(cudnn_version().value_or(0)), error.get_message(), what);
}

}  // namespace

Result<int> cudnn_version() {
  if (g_cudnn_is_gone.load(std::memory_order_acquire)) {
    return fail(ErrorCode::kEnvironment, "cuDNN has gone: the process is ending");
  }
  static const LoadedCudnn loaded;
  return loaded.version;
}

// A handle has one stream at a time, so that calls of a context take turns.
struct CudnnHandle {
  CudnnHandle() = default;
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  ~CudnnHandle() {
    if (handle != nullptr && !g_cudnn_is_gone) (void)fe::detail::destroy_handle(handle);
  }

  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
};

namespace {

Result<std::shared_ptr<CudnnHandle>> handle_of(Context::State& state) {
  F8_TRY(cudnn_version());
  const std::lock_guard lock(state.cudnn_mutex);
  if (state.cudnn == nullptr) {
    auto made = std::make_shared<CudnnHandle>();
    if (const cudnnStatus_t status = fe::detail::create_handle(&made->handle);
        status != CUDNN_STATUS_SUCCESS) {
      made->handle = nullptr;
      return fail(ErrorCode::kCuda, "cudnnCreate: {}", fe::detail::get_error_string(status));
    }
    state.cudnn = std::move(made);
  }
  return state.cudnn;
}

// In the order of kernels::AttentionSpan; lse is the last one. Of a pack each has a tensor of starts too.
enum Tensor : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kDout,
  kDq,
  kDk,
  kDv,
  kLse,
  kTokensQ,
  kTokensKv,
  kStarts = 100
};

using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

// A call's sizes and strides, which a graph is built for.
struct GraphKey {
  AttentionPass pass;
  GraphSizes sizes;
  std::array<std::array<int64_t, 3>, 8> strides;  // by Tensor, without lse
  auto operator<=>(const GraphKey&) const = default;
};

struct Graph {
  fe::graph::Graph graph;
  size_t workspace = 0;
  uint64_t used = 0;  // when
};

class CudnnAttention final : public AttentionProvider {
 public:
  // The kernels before cuDNN's and behind its forward are those of packs, or null.
  CudnnAttention(std::shared_ptr<Context> context, const AttentionDesc& desc, const Kernel* spans,
                 const Kernel* finish)
      : context_(std::move(context)), desc_(desc), spans_(spans), finish_(finish) {}
  ~CudnnAttention() override {
    if (!g_cudnn_is_gone) return;
    for (auto& [key, graph] : graphs_) (void)graph.release();
  }
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  Result<size_t> workspace_bytes(AttentionPass pass, const ProviderCall& call) const override {
    return with_graph(pass, call, [](cudnnHandle_t, const Graph& graph) -> Result<size_t> {
      return graph.workspace;
    });
  }

  Status run(AttentionPass pass, const ProviderCall& call, Stream stream) const override {
    if (pass == AttentionPass::kBackward) F8_TRY(check_gradients(call));
    return with_graph(pass, call, [&](cudnnHandle_t handle, const Graph& graph) -> Status {
      if (graph.workspace > call.workspace.bytes) {
        return fail(ErrorCode::kUnsupported,
                    "cuDNN needs {} bytes of workspace for tensors with these strides, and {} for "
                    "dense ones [batch][tokens][heads][head_dim], which are the bytes that calls "
                    "have; give it dense tensors",
                    graph.workspace, call.workspace.bytes);
      }
      if (const cudnnStatus_t status = fe::detail::set_stream(handle, stream);
          status != CUDNN_STATUS_SUCCESS) {
        return fail(ErrorCode::kCuda, "cudnnSetStream: {}", fe::detail::get_error_string(status));
      }
      std::unordered_map<int64_t, void*> tensors = {{kQ, call.q.data},
                                                    {kK, call.k.data},
                                                    {kV, call.v.data},
                                                    {kO, call.o.data},
                                                    {kLse, call.lse}};
      if (pass == AttentionPass::kBackward) {
        tensors.insert({{kDout, call.dout.data},
                        {kDq, call.dq.data},
                        {kDk, call.dk.data},
                        {kDv, call.dv.data}});
      }
      const GraphSizes sizes = graph_sizes(desc_, call.sizes);
      if (desc_.packed) F8_TRY(write_spans(pass, call, sizes, stream, tensors));
      F8_TRY(check(graph.graph.execute(
                       handle, tensors,
                       static_cast<char*>(call.workspace.data) + PackSpans(desc_, sizes).bytes),
                   "execute"));
      if (!desc_.packed || pass == AttentionPass::kBackward) return {};
      return finish(call, sizes, stream);
    });
  }

 private:
  // cuDNN writes dq of a pack where q would lie, whatever the strides of dq are (9.19); older ones do so with dk and dv too.
  [[nodiscard]] Status check_gradients(const ProviderCall& call) const {
    if (!desc_.packed) return {};
    F8_TRY(check_strides('q', call.q, call.dq));
    if (F8_TRY(cudnn_version()) >= kLeastOfGoodPacks) return {};
    F8_TRY(check_strides('k', call.k, call.dk));
    return check_strides('v', call.v, call.dv);
  }
  [[nodiscard]] Status check_strides(char name, const float8_heads& operand,
                                     const float8_heads& gradient) const {
    if (gradient.token_stride == operand.token_stride &&
        gradient.head_stride == operand.head_stride) {
      return {};
    }
    return fail(ErrorCode::kUnsupported,
                "cuDNN has d{} of packed sequences with the strides of {}, which are {} between "
                "tokens and {} between heads, and d{}'s are {} and {}; give it {}",
                name, name, operand.token_stride, operand.head_stride, name, gradient.token_stride,
                gradient.head_stride,
                desc_.recipe == AttentionRecipe::kBf16
                    ? f8::format("{} and d{} with the same strides", name, name)
                    : f8::format("a dense d{}", name));
  }

  // Enqueues what tells a pack's graph where its sequences lie, and adds it to the tensors.
  Status write_spans(AttentionPass pass, const ProviderCall& call, const GraphSizes& sizes,
                     Stream stream, std::unordered_map<int64_t, void*>& tensors) const {
    const PackSpans spans(desc_, sizes);
    const bool backward = pass == AttentionPass::kBackward;
    char* const data = static_cast<char*>(call.workspace.data);
    auto* const tokens = reinterpret_cast<int32_t*>(data + spans.tokens);
    auto* const starts = reinterpret_cast<int64_t*>(data + spans.starts);
    kernels::AttentionSpanArgs args{
        .offsets = call.offsets,
        .lse = backward ? call.lse : nullptr,
        .tokens = tokens,
        .starts = reinterpret_cast<kernels::i64*>(starts),
        .padded_lse = reinterpret_cast<float*>(data + spans.lse),
        .gradients = {static_cast<kernels::u16*>(call.dq.data),
                      static_cast<kernels::u16*>(call.dk.data),
                      static_cast<kernels::u16*>(call.dv.data)},
        .head_strides = {call.dq.head_stride, call.dk.head_stride, call.dv.head_stride},
        .strides = {call.q.token_stride, call.k.token_stride, call.v.token_stride,
                    call.o.token_stride, call.dout.token_stride, call.dq.token_stride,
                    call.dk.token_stride, call.dv.token_stride, backward ? 1 : desc_.heads_q},
        .longest = {static_cast<int32_t>(sizes.tokens_q), static_cast<int32_t>(sizes.tokens_kv)},
        .sequences = static_cast<int32_t>(call.sizes.batch),
        .padded = static_cast<int32_t>(sizes.batch),
        .queries = static_cast<int32_t>(call.sizes.tokens_q),
        .padded_queries = static_cast<int32_t>(sizes.packed_q),
        .heads_kv = static_cast<int32_t>(desc_.heads_kv),
        .head_dim = static_cast<int32_t>(desc_.head_dim)};
    const Context::State& state = context_->state();
    F8_TRY(launch_with(args, state.driver, *spans_, backward ? desc_.heads_q : 1,
                       state.options.programmatic_launch, stream));
    tensors[kLse] = args.padded_lse;
    tensors[kTokensQ] = tokens;
    tensors[kTokensKv] = tokens + sizes.batch;
    for (int64_t span = 0; span < kernels::kAttentionSpans; ++span) {
      tensors[kStarts + kQ + span] = starts + span * (sizes.batch + 1);
    }
    return {};
  }

  // Enqueues what cuDNN's forward of a pack leaves to do.
  Status finish(const ProviderCall& call, const GraphSizes& sizes, Stream stream) const {
    const char* const data = static_cast<const char*>(call.workspace.data);
    const kernels::AttentionFinishArgs args{
        .blocks = call.blocks,
        .library_lse = reinterpret_cast<const float*>(data + PackSpans(desc_, sizes).lse),
        .lse = call.lse,
        .o = static_cast<kernels::u16*>(call.o.data),
        .queries = static_cast<int32_t>(call.sizes.tokens_q),
        .heads = static_cast<int32_t>(desc_.heads_q),
        .head_dim = static_cast<int32_t>(desc_.head_dim),
        .longest = {static_cast<int32_t>(sizes.tokens_q), static_cast<int32_t>(sizes.tokens_kv)},
        .window = window()};
    const Context::State& state = context_->state();
    return launch_with(args, state.driver, *finish_,
                       desc_.blocks(call.sizes.batch, call.sizes.tokens_q),
                       state.options.programmatic_launch, stream);
  }

  [[nodiscard]] int32_t window() const {
    return static_cast<int32_t>(
        std::min<int64_t>(desc_.window, std::numeric_limits<int32_t>::max()));
  }

  // Calls `use` with the context's handle and the graph of a call, which it makes where there are none: a plan that is
  // never asked for a backward in bf16 costs neither.
  template <class Use>
  auto with_graph(AttentionPass pass, const ProviderCall& call, const Use& use) const
      -> decltype(use(nullptr, std::declval<const Graph&>())) {
    return without_exceptions([&]() -> decltype(use(nullptr, std::declval<const Graph&>())) {
      // cuDNN's backward of one query is refused, or gives NaN.
      if (pass == AttentionPass::kBackward && !desc_.packed && call.sizes.tokens_q == 1) {
        return fail(ErrorCode::kUnsupported,
                    "cuDNN has no backward of one query; take two queries or more, or recipe fp8");
      }
      Context::State& state = context_->state();
      const ScopedContext current(state.driver, state.primary);
      F8_TRY(current.status());
      const auto handle = F8_TRY(handle_of(state));
      const std::lock_guard lock(handle->mutex);
      Graph* const graph = F8_TRY(find_or_build(pass, call, handle->handle));
      graph->used = ++clock_;
      return use(handle->handle, *graph);
    });
  }

  Result<Graph*> find_or_build(AttentionPass pass, const ProviderCall& call,
                               cudnnHandle_t handle) const {
    const GraphKey key = key_of(pass, call);
    const auto found = graphs_.find(key);
    if (found != graphs_.end()) return found->second.get();
    auto made = std::make_unique<Graph>();
    F8_TRY(build(key, handle, *made));
    if (graphs_.size() >= kMostGraphs) {
      graphs_.erase(std::ranges::min_element(graphs_, {},
                                             [](const auto& each) { return each.second->used; }));
    }
    return graphs_.emplace(key, std::move(made)).first->second.get();
  }

  GraphKey key_of(AttentionPass pass, const ProviderCall& call) const {
    GraphKey key{pass, graph_sizes(desc_, call.sizes), {}};
    const float8_heads* const tensors[] = {&call.q,    &call.k,  &call.v,  &call.o,
                                           &call.dout, &call.dq, &call.dk, &call.dv};
    const size_t count = pass == AttentionPass::kForward ? 4 : 8;
    for (size_t i = 0; i < count; ++i) {
      key.strides[i] = {desc_.packed ? 0 : tensors[i]->batch_stride, tensors[i]->head_stride,
                        tensors[i]->token_stride};
    }
    return key;
  }

  // A pack's tensor of starts, which the graph has once.
  TensorPtr starts(fe::graph::Graph& graph, const GraphKey& key, Tensor which) const {
    if (!desc_.packed) return nullptr;
    return graph.tensor(words(kStarts + which, key.sizes.batch + 1, fe::DataType_t::INT64));
  }

  static fe::graph::Tensor_attributes words(int64_t uid, int64_t count, fe::DataType_t type) {
    return fe::graph::Tensor_attributes()
        .set_uid(uid)
        .set_data_type(type)
        .set_dim({count, 1, 1, 1})
        .set_stride({1, 1, 1, 1});
  }

  // The attributes of a tensor [batch, heads, tokens, head_dim].
  fe::graph::Tensor_attributes heads(fe::graph::Graph& graph, const GraphKey& key,
                                     Tensor which) const {
    const bool of_keys = which == kK || which == kV || which == kDk || which == kDv;
    const auto [b, h, t] = key.strides[static_cast<size_t>(which - kQ)];
    const int64_t tokens = of_keys ? key.sizes.tokens_kv : key.sizes.tokens_q;
    auto attributes = fe::graph::Tensor_attributes()
                          .set_uid(which)
                          .set_data_type(fe::DataType_t::BFLOAT16)
                          .set_dim({key.sizes.batch, of_keys ? desc_.heads_kv : desc_.heads_q,
                                    tokens, desc_.head_dim})
                          .set_stride({desc_.packed ? tokens * t : b, h, t, 1});
    if (desc_.packed) attributes.set_ragged_offset(starts(graph, key, which));
    return attributes;
  }

  // cuDNN's forward of a pack writes [tokens][heads], and its backward reads [heads][tokens], as the caller has it.
  fe::graph::Tensor_attributes lse(fe::graph::Graph& graph, const GraphKey& key) const {
    const int64_t queries = key.sizes.tokens_q, heads = desc_.heads_q;
    const int64_t row = desc_.packed ? key.sizes.packed_q : queries;
    const bool by_tokens = desc_.packed && key.pass == AttentionPass::kForward;
    auto attributes = fe::graph::Tensor_attributes()
                          .set_uid(kLse)
                          .set_data_type(fe::DataType_t::FLOAT)
                          .set_dim({key.sizes.batch, heads, queries, 1})
                          .set_stride(by_tokens ? std::vector<int64_t>{heads * queries, 1, heads, 1}
                                                : std::vector<int64_t>{heads * row, row, 1, 1});
    if (desc_.packed) attributes.set_ragged_offset(starts(graph, key, kLse));
    return attributes;
  }

  template <class Attributes>
  Attributes with_mask(Attributes attributes) const {
    attributes.set_attn_scale(desc_.scale);
    if (desc_.causal) {
      attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0);
    }
    if (desc_.window > 0) attributes.set_diagonal_band_left_bound(window());
    return attributes;
  }

  // Says how many tokens each sequence of a pack has.
  template <class Attributes>
  Attributes with_tokens(fe::graph::Graph& graph, const GraphKey& key,
                         Attributes attributes) const {
    if (!desc_.packed) return attributes;
    const auto tokens = [&](Tensor which) {
      return graph.tensor(words(which, key.sizes.batch, fe::DataType_t::INT32));
    };
    return attributes.set_padding_mask(true)
        .set_seq_len_q(tokens(kTokensQ))
        .set_seq_len_kv(tokens(kTokensKv));
  }

  static void write_as(const TensorPtr& output, fe::graph::Tensor_attributes as) {
    output->set_output(true)
        .set_uid(as.get_uid())
        .set_data_type(as.get_data_type())
        .set_dim(as.get_dim())
        .set_stride(as.get_stride());
    if (const TensorPtr starts = as.get_ragged_offset()) output->set_ragged_offset(starts);
  }

  Status build(const GraphKey& key, cudnnHandle_t handle, Graph& out) const {
    fe::graph::Graph& graph = out.graph;
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const auto read = [&](Tensor which) { return graph.tensor(heads(graph, key, which)); };
    const auto write = [&](const TensorPtr& output, Tensor which) {
      write_as(output, heads(graph, key, which));
    };
    const TensorPtr q = read(kQ), k = read(kK), v = read(kV);
    if (key.pass == AttentionPass::kForward) {
      auto attributes = with_mask(fe::graph::SDPA_attributes().set_generate_stats(true));
      const auto [o, stats] = graph.sdpa(q, k, v, with_tokens(graph, key, std::move(attributes)));
      write(o, kO);
      write_as(stats, lse(graph, key));
    } else {
      const TensorPtr o = read(kO), dout = read(kDout), stats = graph.tensor(lse(graph, key));
      auto attributes = with_tokens(graph, key, with_mask(fe::graph::SDPA_backward_attributes()));
      if (desc_.packed) {
        attributes.set_max_total_seq_len_q(key.sizes.packed_q)
            .set_max_total_seq_len_kv(key.sizes.packed_kv);
      }
      const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, dout, stats, attributes);
      write(dq, kDq);
      write(dk, kDk);
      write(dv, kDv);
    }
    F8_TRY(check(graph.build(handle, {fe::HeurMode_t::A}), "build"));
    int64_t bytes = 0;
    F8_TRY(check(graph.get_workspace_size(bytes), "workspace"));
    out.workspace = PackSpans(desc_, key.sizes).bytes + static_cast<size_t>(bytes);
    return {};
  }

  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
  const Kernel* spans_;
  const Kernel* finish_;
  // Under the handle's lock.
  mutable std::map<GraphKey, std::unique_ptr<Graph>> graphs_;
  mutable uint64_t clock_ = 0;
};

}  // namespace

Result<AttentionProviderPtr> create_cudnn_attention(const std::shared_ptr<Context>& context,
                                                    const AttentionDesc& desc) {
  return without_exceptions([&]() -> Result<AttentionProviderPtr> {
    const int version = F8_TRY(cudnn_version());
    if (desc.packed && version < kLeastOfPacks) {
      return fail(ErrorCode::kUnsupported,
                  "cuDNN {} has no packed sequences of shared heads; {} and newer have them",
                  version_text(version), version_text(kLeastOfPacks));
    }
    const Kernel *spans = nullptr, *finish = nullptr;
    if (desc.packed) {
      if (desc.head_dim == 256 && version < kLeastOfGoodPacks) {
        return fail(ErrorCode::kUnsupported,
                    "cuDNN {} has wrong gradients of packed heads of 256; {} and newer are right",
                    version_text(version), version_text(kLeastOfGoodPacks));
      }
      const auto kernel = [&](codegen::AttentionStep step) {
        return context->kernel(codegen::AttentionCastSpec{
            .head_dim = static_cast<int>(desc.head_dim), .step = step, .packed = true});
      };
      spans = F8_TRY(kernel(codegen::AttentionStep::kSpans));
      if (desc.recipe == AttentionRecipe::kBf16) {
        finish = F8_TRY(kernel(codegen::AttentionStep::kFinish));
      }
    }
    return std::make_unique<const CudnnAttention>(context, desc, spans, finish);
  });
}

}  // namespace f8::runtime
