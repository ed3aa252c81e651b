// A C++17 trainer reduced to its first calls: a context where there is a Hopper GPU, else a status
// that says what is missing; and on the emulated device two layers, a mixture of experts and an
// attention, with all that the header offers.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <float8/float8.hpp>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kM = 16;
constexpr std::int64_t kWidth = 32;

int failures = 0;

template <class T>
T checked(float8::Result<T> result, const char* what) {
  if (result) return std::move(result).value();
  std::printf("%s: %s\n", what, result.error().message.c_str());
  std::exit(1);
}

void check(const float8::Status& status, const char* what) {
  if (status) return;
  std::printf("%s: %s\n", what, status.message().c_str());
  ++failures;
}

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s does not hold\n", what);
  ++failures;
}

using Bytes = std::vector<double>;  // aligned to 16 bytes
Bytes buffer(std::size_t bytes) {
  return Bytes(bytes / 8 + 2);
}

std::vector<std::uint16_t> ones(std::int64_t count) {  // bf16
  return std::vector<std::uint16_t>(static_cast<std::size_t>(count), 0x3f80);
}

struct Layer {
  Layer(float8::Linear plan, float8::Quantizer casts)
      : linear(std::move(plan)), quantizer(std::move(casts)) {}
  float8::Linear linear;
  float8::Quantizer quantizer;  // of the weight
  float8::ScaleSlots scales{};
  std::vector<std::uint16_t> w = ones(kWidth * kWidth);
  std::vector<float> dw = std::vector<float>(kWidth * kWidth);
  std::vector<std::uint16_t> bias = ones(kWidth);
  Bytes saved = buffer(linear.saved_bytes_with_tensors(false, true));
  Bytes w_fp8 = buffer(quantizer.tensor_bytes());
};

// Scaling of the caller's: delayed where nothing else is asked for.
float8::Recipe recipe() {
  float8_recipe settings = checked(float8::Recipe::tensorwise().settings(), "settings");
  settings.output.a.scaling = FLOAT8_DELAYED;
  settings.grad_weight.a.pow2 = 1;
  return float8::Recipe::custom("mine", settings.output, settings.grad_input, settings.grad_weight);
}

void train(const float8::Context& context) {
  float8::LinearDesc desc;
  desc.m_max = kM;
  desc.n = desc.k = kWidth;
  desc.recipe = recipe();
  desc.grad_weight_dtype = FLOAT8_F32;
  desc.bias = true;
  desc.accumulate_grad_weight = true;
  float8::QuantizerDesc weight_desc;
  weight_desc.operand = FLOAT8_WEIGHT;
  weight_desc.rows_max = weight_desc.cols = kWidth;
  weight_desc.recipe = desc.recipe;
  std::vector<Layer> layers;
  std::vector<float8::Quantizer> quantizers;
  std::vector<const float8_linear*> linears;
  std::size_t most = 0;
  for (int i = 0; i < 2; ++i) {
    layers.emplace_back(checked(float8::Linear::plan(context, desc), "plan"),
                        checked(float8::Quantizer::plan(context, weight_desc), "quantizer"));
    quantizers.push_back(layers.back().quantizer);
    linears.push_back(layers.back().linear.get());
    most = layers.back().linear.workspace_bytes();
  }
  const auto scales = checked(float8::Scales::plan(context, linears), "scales");
  const auto casts = checked(float8::QuantizerList::plan(context, quantizers), "casts");
  if (casts.workspace_bytes() > most) most = casts.workspace_bytes();
  Bytes workspace = buffer(most);
  Bytes state = buffer(scales.bytes());
  check(scales.init(state.data(), nullptr), "init");
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i].scales = checked(scales.slots(state.data(), i), "slots");
  }

  for (int step = 0; step < 2; ++step) {
    const float8::Step of_all{sizeof(float8::Step), step == 0, 0, nullptr, {}};
    std::vector<float8::QuantizeArgs> weights;
    for (Layer& layer : layers) {
      float8::QuantizeArgs args;
      args.x.data = layer.w.data();
      args.tensor.data = layer.w_fp8.data();
      args.scales = layer.scales;
      weights.push_back(args);
    }
    float8::QuantizeListArgs list;
    list.workspace.data = workspace.data();
    list.step = &of_all;
    check(casts.run(list, weights, nullptr), "run");
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      for (Layer& layer : layers) {
        const auto w_fp8 = checked(layer.quantizer.view(layer.w_fp8.data(), kWidth), "view");
        const auto x = ones(kM * kWidth);
        auto y = ones(kM * kWidth);
        auto dx = ones(kM * kWidth);
        float8::ForwardArgs forward;
        forward.x.data = x.data();
        forward.y.data = y.data();
        forward.saved.data = layer.saved.data();
        forward.bias = layer.bias.data();
        forward.w.fp8 = &w_fp8;
        forward.scales = layer.scales;
        forward.step = &of_all;
        forward.workspace.data = workspace.data();
        check(layer.linear.forward(forward, nullptr), "forward");
        check(y.front() == 0x4204 && y.back() == 0x4204, "32 products of ones and a bias");
        float8::BackwardArgs backward;
        backward.dy.data = x.data();
        backward.saved.data = layer.saved.data();
        backward.dx.data = dx.data();
        backward.dw.data = layer.dw.data();
        backward.w.fp8 = &w_fp8;
        backward.scales = layer.scales;
        backward.step = &of_all;
        backward.dw.accumulate = micro_batch > 0;
        backward.workspace.data = workspace.data();
        check(layer.linear.backward(backward, nullptr), "backward");
        check(dx.back() == 0x4200, "32 products of ones");
        check(layer.dw.back() == static_cast<float>(kM * (micro_batch + 1)), "a sum of gradients");
      }
    }
    check(scales.sync(state.data(), nullptr, nullptr), "sync");
    const auto bytes = checked(scales.save(state.data(), nullptr), "save");
    check(scales.load(state.data(), bytes, nullptr), "load");
    check(!scales.load(state.data(), bytes.data(), bytes.size() - 1, nullptr), "a cut state");
  }
  check(checked(layers[0].linear.info(), "info").find("recipe mine") != std::string::npos, "info");
  check(!checked(context.info(), "info").empty(), "info");
}

// Two experts, whose tokens take both, and an attention over the same tokens.
void mix(const float8::Context& context) {
  constexpr std::int32_t kExperts = 2;
  constexpr std::int64_t kRows = kExperts * kM;
  float8::MoeRouteDesc route_desc;
  route_desc.tokens_max = kM;
  route_desc.top_k = route_desc.experts = kExperts;
  float8::MoeCombineDesc combine_desc;
  combine_desc.tokens_max = kM;
  combine_desc.cols = kWidth;
  combine_desc.top_k = combine_desc.experts = kExperts;
  float8::GroupLayoutDesc layout_desc;
  layout_desc.m_max = kRows;
  layout_desc.experts = kExperts;
  float8::MoeDesc desc;
  desc.m_max = kRows;
  desc.dim = desc.hidden = kWidth;
  desc.experts = kExperts;
  desc.recipe = float8::Recipe::rowwise();
  const auto route = checked(float8::MoeRoute::plan(context, route_desc), "route");
  const auto combine = checked(float8::MoeCombine::plan(context, combine_desc), "combine");
  const auto layout = checked(float8::GroupLayout::plan(context, layout_desc), "layout");
  const auto moe = checked(float8::Moe::plan(context, desc), "moe");
  Bytes scratch = buffer(route.workspace_bytes()), groups = buffer(layout.bytes());
  Bytes saved = buffer(moe.saved_bytes()), workspace = buffer(moe.workspace_bytes());
  std::vector<std::int32_t> ids, index(kRows), position(kRows), offsets(kExperts);
  for (std::int64_t token = 0; token < kM; ++token) ids.insert(ids.end(), {0, 1});
  const std::vector<float> scores(kRows, 0.5F);
  std::vector<float> row_scores(kRows);
  const auto x = ones(kM * kWidth), w13 = ones(kExperts * 2 * kWidth * kWidth);
  std::vector<std::uint16_t> w2(static_cast<std::size_t>(kExperts * kWidth * kWidth), 0x3880);
  auto rows = ones(kRows * kWidth), y = ones(kM * kWidth), dx = rows, dw2 = w2;

  float8::MoeRouteArgs routing;
  routing.topk_ids = ids.data();
  routing.index = index.data();
  routing.position = position.data();
  routing.offsets = offsets.data();
  routing.scores = scores.data();
  routing.row_scores = row_scores.data();
  routing.workspace.data = scratch.data();
  check(route.run(routing, nullptr), "route");
  float8::GroupLayoutArgs grouping;
  grouping.offsets = offsets.data();
  grouping.layout.data = groups.data();
  check(layout.run(grouping, nullptr), "layout");
  check(checked(layout.error(groups.data(), nullptr), "error").code == FLOAT8_NO_GROUP_ERROR,
        "offsets");
  float8::MoeForwardArgs forward;
  forward.tokens = kM;
  forward.x.data = x.data();
  forward.index = index.data();
  forward.w13.data = w13.data();
  forward.w2.data = w2.data();
  forward.y.data = rows.data();
  forward.layout.data = groups.data();
  forward.saved.data = saved.data();
  forward.workspace.data = workspace.data();
  check(moe.forward(forward, nullptr), "forward");
  float8::MoeCombineArgs sums;
  sums.y = rows.data();
  sums.scores = scores.data();
  sums.position = position.data();
  sums.offsets = offsets.data();
  sums.out = y.data();
  check(combine.run(sums, nullptr), "combine");
  check(y.front() == 0x4000 && y.back() == 0x4000, "32 products of silu(32) 32 and 2^-14");
  float8::MoeBackwardArgs backward;
  backward.tokens = kM;
  backward.x.data = x.data();
  backward.index = index.data();
  backward.dy.data = x.data();
  backward.score = row_scores.data();
  backward.dx.data = dx.data();
  backward.dw2.data = dw2.data();
  backward.layout.data = groups.data();
  backward.saved.data = saved.data();
  backward.workspace.data = workspace.data();
  check(moe.backward(backward, nullptr), "backward");
  check(dw2.back() == 0x4600, "16 products of 0.5 and silu(32) 32");

  float8::AttentionDesc attention_desc;
  attention_desc.heads_q = attention_desc.heads_kv = 1;
  attention_desc.head_dim = 64;
  const auto attention = checked(float8::Attention::plan(context, attention_desc), "attention");
  auto q = ones(kM * 64), o = q;
  std::vector<float> lse(kM);
  float8::AttentionForwardArgs args;
  args.sizes.tokens_q = args.sizes.tokens_kv = kM;
  args.q = args.k = args.v = float8::Heads{q.data(), kM * 64, 64, 64};
  std::fill(o.begin(), o.end(), std::uint16_t{0});
  args.o = o.data();
  args.lse = lse.data();
  Bytes of_heads = buffer(attention.saved_bytes(args.sizes));
  Bytes of_sums = buffer(attention.workspace_bytes(args.sizes));
  args.saved.data = of_heads.data();
  args.workspace.data = of_sums.data();
  check(attention.forward(args, nullptr), "attention");
  check(o.front() == 0x3f80 && o.back() == 0x3f80, "a mean of ones");
}

}  // namespace

int main() {
  std::printf("float8 %s\n", float8::version().c_str());
  auto context = float8::Context::create(0);
  if (context) {
    float8::LinearDesc desc;
    desc.m_max = 16;
    desc.n = 16;
    desc.k = 17;
    auto linear = float8::Linear::plan(context.value(), desc);
    check(!linear && linear.error().code == FLOAT8_INVALID_ARGUMENT, "a K of 17");
  } else {
    const float8::Error& error = context.error();
    std::printf("%s: %s\n", float8_status_string(error.code), error.message.c_str());
    const bool no_gpu = error.code == FLOAT8_ENVIRONMENT || error.code == FLOAT8_UNSUPPORTED;
    check(no_gpu && !error.message.empty(), "a status that says what is missing");
  }
  float8::ContextOptions options;
  options.emulate = true;
  const auto emulated = checked(float8::Context::create(0, options), "emulate");
  train(emulated);
  mix(emulated);
  return failures == 0 ? 0 : 1;
}
