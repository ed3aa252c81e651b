// Attention as graphs of cuDNN's frontend, whose headers are compiled in here and nowhere else. A graph is of the sizes
// and strides of a call. The first call that has them builds it, within some 50 ms, or a second where cuDNN compiles a
// kernel; later ones find it. Calls of a plan take a lock and allocate on the host.
#include "runtime/attention/cudnn/cudnn.hpp"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <array>
#include <map>
#include <mutex>
#include <unordered_map>

#include "base/dynlib.hpp"
#include "base/without_exceptions.hpp"
#include "runtime/device/context_state.hpp"

// The frontend finds cuDNN's functions through it.
void* cudnn_frontend::cudnn_dlhandle = nullptr;

namespace f8::runtime {
namespace fe = cudnn_frontend;

namespace {

constexpr int kLeastVersion = 90501;  // the first with a backward of heads of 256
constexpr int kBadVersion = 91000;    // whose attention NVIDIA's own frontend refuses in part
constexpr size_t kMostGraphs = 128;   // of a plan

std::string version_text(int version) {
  return f8::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<int> load() {
  const DynamicLibrary library = F8_TRY(DynamicLibrary::open(
      "libcudnn.so.9", "install cuDNN 9 for CUDA 13, or the wheel nvidia-cudnn-cu13"));
  fe::cudnn_dlhandle = library.handle();
  const auto version = static_cast<int>(fe::detail::get_backend_version());
  if (version < kLeastVersion || version == kBadVersion) {
    return fail(ErrorCode::kEnvironment,
                "libcudnn.so.9 is cuDNN {}; attention needs {} or newer, and not {}",
                version_text(version), version_text(kLeastVersion), version_text(kBadVersion));
  }
  return version;
}

Status check(fe::error_t error, const char* what) {
  if (error.is_good()) return {};
  const bool unsupported = error.get_code() == fe::error_code_t::GRAPH_NOT_SUPPORTED;
  return fail(unsupported ? ErrorCode::kUnsupported : ErrorCode::kCuda, "cuDNN {}: {} ({})",
              version_text(cudnn_version().value_or(0)), error.get_message(), what);
}

}  // namespace

Result<int> cudnn_version() {
  static const Result<int> version = without_exceptions(load);
  return version;
}

// A handle has one stream at a time, so that calls of a context take turns.
struct CudnnHandle {
  CudnnHandle() = default;
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  // At the end of a process cuDNN may be gone, as it is where a context lies in static memory; what is left of the handle
  // ends with the process.
  ~CudnnHandle() {
    if (handle != nullptr) (void)fe::detail::destroy_handle(handle);
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

enum Tensor : int64_t { kQ = 1, kK, kV, kO, kLse, kDout, kDq, kDk, kDv };

using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

// A call's sizes and strides, which a graph is built for.
struct GraphKey {
  AttentionPass pass;
  std::array<int64_t, 3> sizes;
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
  CudnnAttention(std::shared_ptr<Context> context, const AttentionDesc& desc,
                 std::shared_ptr<CudnnHandle> handle)
      : context_(std::move(context)), desc_(desc), handle_(std::move(handle)) {}

  Result<size_t> workspace_bytes(AttentionPass pass, const ProviderCall& call) const override {
    return with_graph(pass, call,
                      [](const Graph& graph) -> Result<size_t> { return graph.workspace; });
  }

  Status run(AttentionPass pass, const ProviderCall& call, Stream stream) const override {
    return with_graph(pass, call, [&](const Graph& graph) -> Status {
      if (graph.workspace > call.workspace.bytes) {
        return fail(ErrorCode::kUnsupported,
                    "cuDNN needs {} bytes of workspace for tensors with these strides, and {} for "
                    "dense ones [batch][tokens][heads][head_dim], which are the bytes that calls "
                    "have; give it dense tensors",
                    graph.workspace, call.workspace.bytes);
      }
      if (const cudnnStatus_t status = fe::detail::set_stream(handle_->handle, stream);
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
      return check(graph.graph.execute(handle_->handle, tensors, call.workspace.data), "execute");
    });
  }

 private:
  // Calls `use` with the graph of a call, which it builds where there is none.
  template <class Use>
  auto with_graph(AttentionPass pass, const ProviderCall& call, const Use& use) const
      -> decltype(use(std::declval<const Graph&>())) {
    return without_exceptions([&]() -> decltype(use(std::declval<const Graph&>())) {
      // cuDNN's backward of one query is refused, or gives NaN.
      if (pass == AttentionPass::kBackward && call.sizes.tokens_q == 1) {
        return fail(ErrorCode::kUnsupported,
                    "cuDNN has no backward of one query; take two queries or more, or recipe fp8");
      }
      const Context::State& state = context_->state();
      const ScopedContext current(state.driver, state.primary);
      F8_TRY(current.status());
      const std::lock_guard lock(handle_->mutex);
      Graph* const graph = F8_TRY(find_or_build(pass, call));
      graph->used = ++clock_;
      return use(*graph);
    });
  }

  Result<Graph*> find_or_build(AttentionPass pass, const ProviderCall& call) const {
    const GraphKey key = key_of(pass, call);
    const auto found = graphs_.find(key);
    if (found != graphs_.end()) return found->second.get();
    auto made = std::make_unique<Graph>();
    F8_TRY(build(key, *made));
    if (graphs_.size() >= kMostGraphs) {
      graphs_.erase(std::ranges::min_element(graphs_, {},
                                             [](const auto& each) { return each.second->used; }));
    }
    return graphs_.emplace(key, std::move(made)).first->second.get();
  }

  GraphKey key_of(AttentionPass pass, const ProviderCall& call) const {
    GraphKey key{pass, {call.sizes.batch, call.sizes.tokens_q, call.sizes.tokens_kv}, {}};
    const float8_heads* const tensors[] = {&call.q,    &call.k,  &call.v,  &call.o,
                                           &call.dout, &call.dq, &call.dk, &call.dv};
    const size_t count = pass == AttentionPass::kForward ? 4 : 8;
    for (size_t i = 0; i < count; ++i) {
      key.strides[i] = {tensors[i]->batch_stride, tensors[i]->head_stride,
                        tensors[i]->token_stride};
    }
    return key;
  }

  // The attributes of a tensor [batch, heads, tokens, head_dim].
  fe::graph::Tensor_attributes heads(const GraphKey& key, Tensor which) const {
    const bool of_keys = which == kK || which == kV || which == kDk || which == kDv;
    const auto [b, h, t] = key.strides[static_cast<size_t>(which > kLse ? which - 2 : which - 1)];
    return fe::graph::Tensor_attributes()
        .set_uid(which)
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({key.sizes[0], of_keys ? desc_.heads_kv : desc_.heads_q,
                  key.sizes[of_keys ? 2 : 1], desc_.head_dim})
        .set_stride({b, h, t, 1});
  }

  fe::graph::Tensor_attributes lse(const GraphKey& key) const {
    const int64_t queries = key.sizes[1];
    return fe::graph::Tensor_attributes()
        .set_uid(kLse)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({key.sizes[0], desc_.heads_q, queries, 1})
        .set_stride({desc_.heads_q * queries, queries, 1, 1});
  }

  template <class Attributes>
  Attributes with_mask(Attributes attributes) const {
    attributes.set_attn_scale(desc_.scale);
    if (desc_.causal) {
      attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0);
    }
    if (desc_.window > 0) {
      attributes.set_diagonal_band_left_bound(
          static_cast<int>(std::min<int64_t>(desc_.window, std::numeric_limits<int32_t>::max())));
    }
    return attributes;
  }

  static void write_as(const TensorPtr& output, const fe::graph::Tensor_attributes& as) {
    output->set_output(true)
        .set_uid(as.get_uid())
        .set_data_type(as.get_data_type())
        .set_dim(as.get_dim())
        .set_stride(as.get_stride());
  }

  Status build(const GraphKey& key, Graph& out) const {
    fe::graph::Graph& graph = out.graph;
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const TensorPtr q = graph.tensor(heads(key, kQ)), k = graph.tensor(heads(key, kK));
    const TensorPtr v = graph.tensor(heads(key, kV));
    if (key.pass == AttentionPass::kForward) {
      const auto [o, stats] =
          graph.sdpa(q, k, v, with_mask(fe::graph::SDPA_attributes().set_generate_stats(true)));
      write_as(o, heads(key, kO));
      write_as(stats, lse(key));
    } else {
      const TensorPtr o = graph.tensor(heads(key, kO)), dout = graph.tensor(heads(key, kDout));
      const auto [dq, dk, dv] =
          graph.sdpa_backward(q, k, v, o, dout, graph.tensor(lse(key)),
                              with_mask(fe::graph::SDPA_backward_attributes()));
      write_as(dq, heads(key, kDq));
      write_as(dk, heads(key, kDk));
      write_as(dv, heads(key, kDv));
    }
    F8_TRY(check(graph.build(handle_->handle, {fe::HeurMode_t::A}), "build"));
    int64_t bytes = 0;
    F8_TRY(check(graph.get_workspace_size(bytes), "workspace"));
    out.workspace = static_cast<size_t>(bytes);
    return {};
  }

  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
  std::shared_ptr<CudnnHandle> handle_;
  // Under the handle's lock.
  mutable std::map<GraphKey, std::unique_ptr<Graph>> graphs_;
  mutable uint64_t clock_ = 0;
};

}  // namespace

Result<AttentionProviderPtr> create_cudnn_attention(const std::shared_ptr<Context>& context,
                                                    const AttentionDesc& desc) {
  return without_exceptions([&]() -> Result<AttentionProviderPtr> {
    Context::State& state = context->state();
    const ScopedContext current(state.driver, state.primary);
    F8_TRY(current.status());
    return std::make_unique<const CudnnAttention>(context, desc, F8_TRY(handle_of(state)));
  });
}

}  // namespace f8::runtime
