// The backend of a real device.
//
// Operand sets rotate: there are at least two, and so many that two L2 caches do not hold them
// (L2State::kHot: there is one). A timed batch is a CUDA graph of launches that take the sets in
// turn; where one launch is a batch, the batches take the sets in turn. Events lie between batches,
// which run back to back, so the device never idles inside a block.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>

#include "recipes/mlp.hpp"
#include "runtime/attention/attention.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "runtime/model/model_plan.hpp"
#include "tools/tuner/backend/backend.hpp"
#include "tools/tuner/backend/nvml.hpp"
#include "tools/tuner/backend/operands.hpp"
#include "tools/tuner/backend/producer.hpp"

namespace f8::tuner {

struct GpuBackendOptions {
  double memory_fraction = 0.6;           // the share of the free memory that it may take
  int max_sets = 128;                     // a tiny problem would take thousands to fill L2 twice
  size_t copy_bytes = size_t{256} << 20;  // the size of the copy that casts are compared with
  uint64_t seed = 1;
  std::filesystem::path cache_dir;  // empty: environment().cache_dir
};

class GpuBackend final : public Backend {
 public:
  [[nodiscard]] static Result<std::unique_ptr<GpuBackend>> create(
      int device, const GpuBackendOptions& options = {});
  [[nodiscard]] static Result<std::unique_ptr<GpuBackend>> create(
      std::shared_ptr<runtime::Context> context, const GpuBackendOptions& options = {});
  ~GpuBackend() override;

  const runtime::DeviceInfo& device() const override { return context_->device(); }
  Result<Suggested> suggestions(const Problem& gemm, bool bf16) override;
  Status open(const Problem& problem, L2State l2 = L2State::kCold) override;
  Result<Built> add(const Candidate& candidate) override;
  Result<Check> verify(int candidate) override;
  Result<double> estimate_ns(int candidate) override;
  Status set_batch(int candidate, int launches) override;
  Result<std::vector<double>> time(std::span<const int> order) override;
  Result<AttentionResults<float>> attention_results(AttentionRecipe recipe,
                                                    const AttentionShape& shape,
                                                    const AttentionData& data) override;
  DeviceState sample() override;
  double now_s() const override;
  void sleep_s(double seconds) override;

  // Opens the weights of a model's linears instead of a problem, for candidates that cast them.
  [[nodiscard]] Status open_weights(const Recipe& recipe,
                                    std::span<const runtime::MatrixSize> weights,
                                    L2State l2 = L2State::kCold);
  // Opens a tensor that casts compute, likewise.
  [[nodiscard]] Status open_producer(const Recipe& recipe, const Producer& producer,
                                     runtime::MatrixSize size, L2State l2 = L2State::kCold);
  // Adds each launch of a float8 linear, or of attention, as a candidate of its own, in order of launching.
  struct Part {
    std::string name;
    int id = 0;
    double bytes = 0;  // as those of a runtime::Step, and products
    int products = 0;
  };
  [[nodiscard]] Result<std::vector<Part>> add_steps(int linear);
  // Adds a copy on the device, the ceiling of what casts can reach.
  [[nodiscard]] Result<Built> add_copy();
  [[nodiscard]] double copy_traffic() const {  // bytes that it reads and writes together
    return 2.0 * static_cast<double>(options_.copy_bytes);
  }
  // The bytes that float8 keeps of the open attention for a backward: copies in fp8, o and lse.
  [[nodiscard]] size_t attention_saved_bytes() const;
  [[nodiscard]] const std::shared_ptr<runtime::Context>& context() const { return context_; }
  [[nodiscard]] int sets() const { return sets_; }

 private:
  using Launch = std::function<Status(runtime::Stream)>;
  struct GemmSet {
    PoolTensor a, b;
    CUdeviceptr d = 0;
  };
  // An operand's inverse scales, on the device and on the host.
  struct Scales {
    codegen::ScaleMode mode = codegen::ScaleMode::kTensor;
    int64_t stride = 0;  // from one row of block scales to the next
    std::vector<float> values;
    const float* data = nullptr;

    [[nodiscard]] float at(int64_t row, int64_t c) const;
  };
  struct LinearSet {
    PoolTensor x, w, dy;
    CUdeviceptr y = 0, dx = 0, dw = 0, saved = 0;
    CUdeviceptr workspace = 0;  // of experts, whose casts leave q there
  };
  // How the rows of open experts are shared.
  struct Routing {
    runtime::GroupLayoutPlan plan;
    DeviceBuffer offsets, layout;
    runtime::GroupLayoutCall call;
  };
  struct Weights {
    std::vector<std::shared_ptr<const runtime::Quantizer>> quantizers;
    std::vector<std::vector<runtime::QuantizeCall>> calls;  // by operand set
    std::vector<uint8_t> copies;  // samples of what the candidate that was checked before wrote
  };
  // An open attention: its operands are [b][h][s][d].
  struct OpenAttention {
    AttentionShape shape;
    std::shared_ptr<const runtime::Attention> plan;  // float8's
    struct Set {
      PoolTensor q, k, v, dout;  // dout, but of an attention_forward
    };
    std::vector<Set> sets;
  };
  // The calls of a candidate of attention, which has the memory that they write for itself.
  struct AttentionCalls {
    std::shared_ptr<const runtime::Attention> plan;
    struct Set {
      float8_attention_forward_args forward;
      std::optional<float8_attention_backward_args> backward;      // but of an attention_forward
      std::optional<float8_attention_dequantize_args> dequantize;  // of one under kFp8Forward
    };
    std::vector<Set> sets;
  };
  // An open MLP: what its calls read and write apart from copies in fp8.
  struct OpenMlp {
    MlpShape shape;
    struct Set {
      PoolTensor x, dy;
      std::vector<PoolTensor> w;    // by linears_of()
      std::vector<CUdeviceptr> dw;  // likewise
      // dh, gate and up follow each other, and so do dx and its part by up. What bf16 computes of these is
      // larger than what is read of it: it has as many bytes as a copy that moves what an activation moves.
      CUdeviceptr dh = 0, hidden = 0, y = 0, dx = 0;
      CUdeviceptr bf16_h = 0, bf16_d_hidden = 0, dx_sum = 0;
    };
    std::vector<Set> sets;
  };
  // An open producer: the operands that follow each other, what a copy of them writes, and the results in fp8.
  struct OpenProducer {
    Producer what;
    runtime::MatrixSize size;
    std::shared_ptr<const runtime::Quantizer> fused, plain;
    PoolTensor norm_weight, norm_bias;
    DeviceBuffer statistics;  // of a norm: rstd and mean of each row
    struct Set {
      std::vector<PoolTensor> operands;
      CUdeviceptr copied = 0;
      std::vector<void*> results;
    };
    std::vector<Set> sets;
    // The elements that computing the results in bf16 moves, of which a copy reads half.
    [[nodiscard]] int64_t copied_elements() const {
      return static_cast<int64_t>(what.operands() + what.results()) * size.rows * size.cols / 2;
    }
  };
  // A state of delayed scaling of the candidate's own.
  struct DelayedState {
    std::shared_ptr<const runtime::DelayedScales> scales;
    void* bytes = nullptr;
  };
  struct MlpStates {
    std::vector<DelayedState> all;  // none, or one of each linear
    std::vector<float8_scale_slots> slots;
  };
  enum class Operands { kFp8, kFp8OneScale, kBf16 };  // a GEMM's
  struct Timed {
    Candidate candidate;
    Operands operands = Operands::kFp8;
    std::vector<Launch> launch;  // by operand set
    std::vector<CUgraphExec> graphs;
    size_t next_graph = 0;
    int launches = 1;
    double estimate_ns = 0;
    std::shared_ptr<const runtime::Linear> linear;
    std::function<std::vector<runtime::Step>(size_t)>
        steps;                                  // by operand set; none of a bf16 linear
    std::vector<runtime::ForwardCall> forward;  // a linear's, by operand set
    std::vector<runtime::BackwardCall> backward;
    std::vector<float8_tensor> weights;  // in fp8, which those calls are given
    std::function<Status()> prime;       // runs once, before the first launch
    int64_t k = 0;                       // how far a GEMM's provider reads K: it may pad it
    CUdeviceptr amax = 0;                // where a GEMM leaves its result's amax; 0: nowhere
    std::shared_ptr<const AttentionCalls> attention;
  };
  // Sampled elements of a result, computed in fp64 from the host's copy of the operands.
  struct Reference {
    std::vector<int64_t> rows, cols;
    std::vector<double> values;  // rows x cols
  };

  GpuBackend(std::shared_ptr<runtime::Context> context, const runtime::Driver& driver,
             const GpuBackendOptions& options)
      : context_(std::move(context)), driver_(driver), options_(options) {}

  [[nodiscard]] std::unexpected<Error> triage(Error error);
  // The launches of a plan's forward and backward, in order.
  template <class Plan, class Forward, class Backward>
  [[nodiscard]] static std::vector<runtime::Step> steps_of(const Plan& plan, const Forward& forward,
                                                           const Backward& backward) {
    std::vector<runtime::Step> steps = plan.forward_steps(forward);
    std::ranges::move(plan.backward_steps(backward), std::back_inserter(steps));
    return steps;
  }
  [[nodiscard]] Pool& pool(const CastSetting* cast);
  // What is open, as an error names it where one operand set does not fit, and what to do then.
  struct Opened {
    std::string what;
    std::string_view remedy;
  };
  [[nodiscard]] Result<int> fit_sets(double footprint, double set_bytes, const Opened& opened);
  [[nodiscard]] Result<int> fit_sets(double footprint, double set_bytes);  // of the open problem
  [[nodiscard]] Status make_room(size_t bytes);
  void forget();

  [[nodiscard]] Status open_gemm();
  [[nodiscard]] Status open_linear();
  [[nodiscard]] Status open_routing();
  [[nodiscard]] Status open_attention();
  [[nodiscard]] Status suballocate_fp8();
  [[nodiscard]] Status suballocate_bf16();
  [[nodiscard]] Status lay_out_scales(float inv_a, float inv_b);
  [[nodiscard]] static Scales make_scales(codegen::ScaleMode mode, float inv, int64_t rows,
                                          int64_t k, int period, bool pow2);
  [[nodiscard]] Result<Built> add_gemm(const Candidate& candidate);
  // The bias differs from column to column and is exact in every type.
  [[nodiscard]] static float bias_of(int64_t column) {
    return 0.25F * static_cast<float>(column % 9 - 4);
  }
  [[nodiscard]] Status add_epilogue(const runtime::GemmDesc& desc, Timed& timed,
                                    runtime::GemmCall& call);
  [[nodiscard]] Result<Built> add_float8(const Candidate& candidate);
  struct ExpertsCalls {  // by operand set
    std::vector<runtime::ExpertsForwardCall> forward;
    std::vector<runtime::ExpertsBackwardCall> backward;
  };
  [[nodiscard]] ExpertsCalls experts_calls(std::span<const LinearSet> sets,
                                           const float8_scale_slots& slots) const;
  [[nodiscard]] Result<Built> add_experts(const Candidate& candidate);
  // The baselines in bf16: gpu_bf16.cpp.
  using GemmLaunches = std::array<Launch, 3>;  // indexed by Gemm
  [[nodiscard]] Status add_grouped_bf16(const Problem& linear, std::span<const LinearSet> sets,
                                        const LinearChoices& choices,
                                        std::vector<GemmLaunches>& launches);
  [[nodiscard]] Result<std::vector<GemmLaunches>> bf16_launches(const Problem& linear,
                                                                std::span<const LinearSet> sets,
                                                                const LinearChoices& choices);
  [[nodiscard]] Result<Built> add_bf16(const Candidate& candidate);
  // An MLP: gpu_mlp.cpp.
  [[nodiscard]] Status open_mlp();
  [[nodiscard]] Result<Built> add_mlp(const Candidate& candidate);
  [[nodiscard]] Result<std::vector<Launch>> mlp_in_bf16(const MlpChoices& choices);
  struct FusedPlans;
  struct FusedCalls;
  [[nodiscard]] Result<FusedPlans> plan_fused(const MlpChoices& choices);
  [[nodiscard]] Result<std::shared_ptr<FusedCalls>> fused_calls(
      const FusedPlans& plans, const OpenMlp::Set& set, const MlpStates& states,
      const float8_buffer& workspace, const std::function<void*(size_t)>& take) const;
  [[nodiscard]] Result<MlpStates> add_mlp_states(
      const std::vector<const std::vector<DelayedSlot>*>& linears);
  [[nodiscard]] std::function<Status()> first_step_of(
      const MlpStates& states, std::function<Status(const float8_step&)> run) const;
  [[nodiscard]] Result<std::vector<Launch>> mlp_in_fp8(const MlpChoices& choices, Timed& timed);
  [[nodiscard]] Result<std::vector<Launch>> experts_mlp_in_fp8(const MlpChoices& choices,
                                                               Timed& timed);
  // A producer: gpu_producer.cpp.
  [[nodiscard]] Status lay_out_producer(const Producer& producer, runtime::MatrixSize size);
  [[nodiscard]] Status give_statistics(runtime::MatrixSize size);
  [[nodiscard]] runtime::QuantizeCall fused_call(const OpenProducer::Set& set) const;
  [[nodiscard]] Result<Built> add_producer(const Candidate& candidate);
  [[nodiscard]] Result<Check> verify_producer(Timed& timed);
  [[nodiscard]] double produced_element(bool fused, size_t result, int64_t row, int64_t col) const;
  [[nodiscard]] Status check_copy(const float8_tensor& view, bool transposed,
                                  const std::function<double(int64_t, int64_t)>& want,
                                  const std::string& name, Check& check);
  [[nodiscard]] Result<Scales> read_scales(const float* from, const float8_cast_setting& setting,
                                           int64_t rows, int64_t cols);
  [[nodiscard]] Launch copy_of(CUdeviceptr from, CUdeviceptr to, int64_t elements) const;
  [[nodiscard]] Reference mlp_reference() const;
  [[nodiscard]] Result<Check> verify_mlp(Timed& timed);
  [[nodiscard]] Result<Built> add_attention(const Candidate& candidate);
  [[nodiscard]] Result<AttentionCalls> lay_out_attention(
      std::shared_ptr<const runtime::Attention> plan, bool is_bf16);
  [[nodiscard]] Reference attention_reference(bool of_dq) const;
  [[nodiscard]] Result<Check> verify_attention(const Timed& timed);
  [[nodiscard]] Status reserve_workspace(size_t bytes);
  [[nodiscard]] Status open_casts(const Recipe& recipe, L2State l2,
                                  const std::function<Status()>& lay_out);
  [[nodiscard]] Status lay_out_weights(const Recipe& recipe,
                                       std::span<const runtime::MatrixSize> weights);
  [[nodiscard]] Status settle_weight_scales();
  [[nodiscard]] Result<Built> add_casts(const Candidate& candidate);
  [[nodiscard]] Result<Check> verify_casts(Timed& timed);
  [[nodiscard]] Result<DelayedState> add_delayed_state(const std::vector<DelayedSlot>& slots);
  [[nodiscard]] Status add_delayed_scales(Timed& timed);
  [[nodiscard]] Status add_weights_in_fp8(Timed& timed);

  [[nodiscard]] Reference gemm_reference(Operands operands, int64_t k) const;
  [[nodiscard]] Status check_output(CUdeviceptr d, Dtype type, int64_t row_length,
                                    const Reference& reference, double tolerance, const char* name,
                                    Check& check);
  // row_of() reads a row of the result, whose name is for people.
  [[nodiscard]] Status check_rows(const std::function<Result<std::vector<float>>(int64_t)>& row_of,
                                  const Reference& reference, double tolerance, const char* name,
                                  Check& check);
  [[nodiscard]] Result<std::vector<float>> read(CUdeviceptr from, Dtype type, int64_t count);
  [[nodiscard]] Status run_once(Timed& timed);
  [[nodiscard]] Result<Check> verify_gemm(Timed& timed);
  [[nodiscard]] Result<Check> verify_linear(Timed& timed);
  [[nodiscard]] Status check_amax(const Timed& timed, CUdeviceptr d, float held, Check& check);
  [[nodiscard]] Status launch_once(Timed& timed, size_t set);
  [[nodiscard]] Result<CUgraphExec> capture(Timed& timed, size_t first_set);

  std::shared_ptr<runtime::Context> context_;
  const runtime::Driver& driver_;
  GpuBackendOptions options_;
  size_t budget_ = 0;
  CUstream stream_ = nullptr;
  std::vector<CUevent> events_;
  std::unique_ptr<DeviceSampler> sampler_;

  std::map<std::string, Pool> pools_;
  Arena results_;                         // outputs and saved buffers
  std::vector<DeviceBuffer> workspaces_;  // the last is the largest; plans may hold earlier ones
  std::vector<DeviceBuffer> buffers_;     // what belongs to one candidate: copies, weights, states
  Arena scales_;

  Problem problem_;
  Recipe recipe_;
  Shape gemm_;  // the open GEMM's own m, n and k
  L2State l2_ = L2State::kCold;
  int sets_ = 0;
  std::vector<GemmSet> fp8_sets_, bf16_sets_;
  std::vector<CUdeviceptr> outputs_;
  Scales scale_a_, scale_b_;
  std::vector<LinearSet> linear_sets_;
  std::vector<int64_t> group_rows_;   // of each expert; where there are none, all rows
  std::optional<Routing> routing_;    // none: there are no experts
  size_t saved_bytes_ = 0;            // the size of a linear set's saved buffer
  std::unique_ptr<Weights> weights_;  // null: a problem or a producer is open
  std::optional<OpenAttention> attention_;
  std::optional<OpenMlp> mlp_;
  std::optional<OpenProducer> producer_;
  std::map<std::pair<Operands, int64_t>, Reference> references_;
  std::vector<Timed> timed_;
};

}  // namespace f8::tuner
