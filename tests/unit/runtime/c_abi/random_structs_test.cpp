// Structs at the C interface with random bytes in their fields, on an emulated device: every call
// returns a status of the list and one line of words, and touches nothing but what it was given,
// which sanitizer builds watch. What no library can survive is left out: a pointer that leads
// nowhere, and a count or a stride beyond the memory that it is about.
//
// FLOAT8_LONG_CAMPAIGN makes a hundred times as many rounds, FLOAT8_CAMPAIGN_SEED another seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <float8/float8.hpp>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/format.hpp"
#include "runtime/c_abi/struct_fields.hpp"
#include "tests/call_args.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"

namespace f8::runtime {
namespace {

constexpr int64_t kLongestStride = 256;     // kM such rows of 4 bytes are in a slice
constexpr size_t kSlice = size_t{1} << 21;  // more than any workspace here
constexpr size_t kSlices = 12;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class RandomStructs : public ::testing::Test {
 protected:
  bool rarely() { return random_() % 6 == 0; }
  // Memory of which any tensor may begin in any slice, or a little behind its beginning.
  void* slice(size_t i) { return memory_.data() + i * kSlice; }
  void* somewhere() { return memory_.data() + random_() % kSlices * kSlice + random_() % 4 * 8; }
  void* pointer(void* usual) {
    if (!rarely()) return usual;
    return rarely() ? nullptr : somewhere();
  }

  // Random bytes in some of a struct's fields that are no pointers, and another struct_size.
  template <class Struct>
  void mutate(Struct& to) {
    auto* bytes = reinterpret_cast<unsigned char*>(&to);
    for (const c_abi::Field& field : c_abi::StructFields<Struct>::kAll) {
      if (field.is_pointer || field.begin == 0 || !rarely()) continue;
      const size_t size = field.end - field.begin;
      switch (random_() % 4) {
        case 0:
          bytes[field.begin + random_() % size] ^= static_cast<unsigned char>(1U << random_() % 8);
          break;
        case 1:
          std::memset(bytes + field.begin, random_() % 2 == 0 ? 0 : 0xff, size);
          break;
        case 2:
          bytes[field.begin] = static_cast<unsigned char>(random_() % 5);
          break;
        default:
          for (size_t i = field.begin; i < field.end; ++i) {
            bytes[i] = static_cast<unsigned char>(random_());
          }
      }
    }
    to.struct_size = rarely() && rarely() ? random_() % (sizeof(Struct) + 1) : sizeof(Struct);
  }
  void keep_small(std::initializer_list<int64_t*> strides) {
    for (int64_t* stride : strides) *stride = std::min(*stride, kLongestStride);
  }

  void expect_told(const char* call, float8_status status) {
    ++(status == FLOAT8_OK ? good_ : bad_)[call];
    if (status == FLOAT8_OK) return;
    ASSERT_STRNE(float8_status_string(status), "unknown status") << call;
    EXPECT_NE(status, FLOAT8_INTERNAL) << call << ": " << float8_last_error();
    const std::string_view words = float8_last_error();
    EXPECT_FALSE(words.empty()) << call;
    EXPECT_TRUE(std::ranges::none_of(words, [](char c) { return c >= 0 && c < ' '; })) << words;
  }

  // --- one round of each call

  void contexts() {
    float8_context_options options{};
    mutate(options);
    options.emulate = 1;  // the machine may have a GPU
    options.struct_size = std::max(options.struct_size, offsetof(float8_context_options, no_table));
    options.cache_dir = rarely() ? "" : nullptr;
    options.tune_on_first_use = rarely() ? static_cast<int32_t>(random_()) : 0;
    options.database = rarely() ? "" : nullptr;
    float8_context* context = nullptr;
    const int device = rarely() ? static_cast<int>(random_()) : 0;
    const float8_status status = float8_context_create(device, &options, &context);
    expect_told("context", status);
    EXPECT_EQ(status == FLOAT8_OK, context != nullptr);
    float8_context_destroy(context);
  }

  float8_recipe recipe() {
    float8_recipe recipe{};
    recipe.struct_size = sizeof recipe;
    static constexpr const char* kNames[] = {"rowwise", "delayed", "blockwise", "tensorwise",
                                             "bf16"};
    expect_told("recipe_named", float8_recipe_named(kNames[random_() % 5], &recipe));
    mutate(recipe);
    recipe.name = rarely() ? "no \x1b[31m name\n" : nullptr;
    return recipe;
  }

  float8_linear_desc description(const float8_recipe* custom) {
    float8_linear_desc desc{};
    desc.m_max = kM;
    desc.n = kN;
    desc.k = kK;
    mutate(desc);
    desc.custom_recipe = rarely() ? custom : nullptr;
    desc.recipe = desc.custom_recipe == nullptr || rarely() ? "delayed" : nullptr;
    if (rarely() && rarely()) desc.recipe = "%s\x01\n";
    return desc;
  }

  void plans() {
    const float8_recipe custom = recipe();
    const float8_linear_desc desc = description(&custom);
    float8_linear* linear = nullptr;
    expect_told("linear_plan", float8_linear_plan(context_.get(), &desc, &linear));
    char text[100];
    if (linear != nullptr) {
      expect_told("linear_info",
                  float8_linear_info(linear, text, random_() % sizeof text, nullptr));
    }

    const float8_linear* const linears[] = {linear_.get(), linear == nullptr ? nullptr : linear};
    float8_scales_desc of{};
    of.linears = linears;
    of.count = 2;
    mutate(of);
    of.linears = rarely() ? nullptr : linears;
    of.count = std::min<size_t>(of.count, 2);
    float8_scales* scales = nullptr;
    expect_told("scales_plan", float8_scales_plan(context_.get(), &of, &scales));
    float8_scales_destroy(scales);
    float8_linear_destroy(linear);
  }

  void models() {
    const float8_recipe custom = recipe();
    std::array<float8_linear_desc, 2> descs = {description(nullptr), description(nullptr)};
    for (auto& desc : descs) {
      if (rarely()) continue;
      desc.m_max = 0;
      desc.recipe = nullptr;
      desc.custom_recipe = nullptr;
    }
    std::array<float8_model_layer, 2> layers{};
    for (size_t i = 0; i < layers.size(); ++i) {
      mutate(layers[i]);
      if (!rarely()) layers[i].struct_size = sizeof layers[i];
      layers[i].name = rarely() ? nullptr : i == 0 ? "first" : "second\n";
      layers[i].desc = rarely() ? nullptr : &descs[i];
    }
    const char* const names[] = {"sec", "auto_filter_small_kn"};
    float8_model_desc desc{};
    desc.count = layers.size();
    desc.tokens = kM;
    mutate(desc);
    desc.layers = rarely() ? nullptr : layers.data();
    desc.count = std::min(desc.count, layers.size());
    desc.filter_fqns = rarely() ? nullptr : names;
    desc.filter_fqn_count = std::min<size_t>(desc.filter_fqn_count, 2);
    desc.custom_recipe = rarely() ? &custom : nullptr;
    desc.recipe = desc.custom_recipe == nullptr ? "rowwise" : nullptr;
    desc.verdicts = rarely() && rarely() ? "/nonexistent/\x1b[0m" : nullptr;
    desc.callback = nullptr;
    float8_model* model = nullptr;
    expect_told("model_plan", float8_model_plan(context_.get(), &desc, &model));
    float8_model_verdict verdict{};
    mutate(verdict);
    expect_told("model_verdict", float8_model_layer_verdict(model, random_() % 3, &verdict));
    float8_model_destroy(model);
  }

  const float8_step* random_step() {
    step_ = {};
    mutate(step_);
    step_.ranks = rarely() ? reinterpret_cast<float8_nccl_comm>(uintptr_t{16}) : nullptr;
    step_.launch_counts = {};
    if (rarely()) step_.launch_counts.data = somewhere();
    if (!rarely()) step_.first_step = 1;
    if (!rarely()) step_.evaluate = 0;
    return rarely() ? nullptr : &step_;
  }

  // The parts of matrices, results and buffers that are no pointers stay as mutate() made them.
  static void clear(float8_matrix& matrix) { matrix.data = matrix.fp8 = nullptr; }
  void clear(float8_result& result) {
    result.data = nullptr;
    if (!rarely()) result.accumulate = result.reserved = 0;
  }
  void clear(float8_buffer& buffer) {
    buffer.data = nullptr;
    if (!rarely()) buffer.bytes = 0;
  }

  template <class Args>
  void fill_common(Args& args) {
    mutate(args);
    for (void*& slot : args.scales.opaque) slot = nullptr;
    if (!rarely()) float8_scales_slots(scales_.get(), state_, 0, &args.scales);
    if (rarely()) args.scales.opaque[random_() % 4] = somewhere();
    args.counters = static_cast<float8_cast_counters*>(rarely() ? pointer(slice(8)) : nullptr);
    args.step = random_step();
    clear(args.workspace);
  }

  void* workspace() {
    std::memset(slice(0), 0, float8_workspace_reserved_bytes(context_.get()));
    return pointer(slice(0));
  }

  void calls() {
    float8_forward_args forward{};
    forward.m = kM;
    fill_common(forward);
    clear(forward.x), clear(forward.w), clear(forward.y), clear(forward.saved);
    keep_small({&forward.x.ld, &forward.w.ld, &forward.y.ld});
    forward.x.data = pointer(slice(1));
    forward.w.data = pointer(slice(2));
    forward.y.data = pointer(slice(3));
    forward.saved.data = pointer(slice(4));
    forward.bias = rarely() ? somewhere() : nullptr;
    expect_told("forward",
                float8_linear_forward(linear_.get(), given(forward, workspace()), nullptr));

    float8_backward_args backward{};
    backward.m = forward.m;
    fill_common(backward);
    clear(backward.dy), clear(backward.x), clear(backward.w), clear(backward.saved);
    clear(backward.dx), clear(backward.dw), clear(backward.db);
    if (!rarely()) backward.db.ld = 0;
    keep_small({&backward.dy.ld, &backward.dx.ld, &backward.dw.ld, &backward.x.ld, &backward.w.ld});
    backward.dy.data = pointer(slice(5));
    backward.saved.data = pointer(slice(4));
    backward.dx.data = pointer(slice(6));
    backward.dw.data = pointer(slice(7));
    backward.x.data = rarely() ? somewhere() : nullptr;
    backward.w.data = rarely() ? somewhere() : nullptr;
    backward.db.data = rarely() ? somewhere() : nullptr;
    expect_told("backward",
                float8_linear_backward(linear_.get(), given(backward, workspace()), nullptr));

    expect_told("scales_sync", float8_scales_sync(scales_.get(), rarely() ? nullptr : state_,
                                                  step_.ranks, nullptr));
  }

  void lists() {
    std::array<float8_quantize_args, 2> tensors{};
    for (size_t i = 0; i < tensors.size(); ++i) {
      float8_quantize_args& args = tensors[i];
      args.rows = kN;
      fill_common(args);
      if (!rarely()) args.struct_size = sizeof args;
      clear(args.x), clear(args.up), clear(args.tensor), clear(args.transposed);
      clear(args.grad), clear(args.up_tensor), clear(args.up_transposed);
      args.up_counters = nullptr;
      args.norm_weight = rarely() ? somewhere() : nullptr;
      args.norm_bias = rarely() ? somewhere() : nullptr;
      args.rstd = rarely() ? static_cast<const float*>(somewhere()) : nullptr;
      args.mean = rarely() ? static_cast<const float*>(somewhere()) : nullptr;
      for (void*& slot : args.up_scales.opaque) slot = nullptr;
      if (!rarely()) args.rows = kN;
      keep_small({&args.x.ld});
      args.x.data = pointer(slice(2));
      args.tensor.data = pointer(slice(9 + i));
      if (rarely()) args.transposed.data = somewhere();
      args.amax = rarely() ? static_cast<uint32_t*>(somewhere()) : nullptr;
      args.row_amax = rarely() ? static_cast<uint32_t*>(somewhere()) : nullptr;
      args.up_amax = rarely() ? static_cast<uint32_t*>(somewhere()) : nullptr;
      args.up_row_amax = rarely() ? static_cast<uint32_t*>(somewhere()) : nullptr;
      args.noop_flag = rarely() ? static_cast<uint32_t*>(somewhere()) : nullptr;
    }
    expect_told("quantize",
                float8_quantize(quantizer_.get(), given(tensors[0], workspace()), nullptr));
    for (float8_quantize_args& args : tensors) {
      if (!rarely()) args.step = nullptr;
      if (!rarely()) args.noop_flag = nullptr;
    }
    float8_quantize_list_args list{};
    mutate(list);
    list.tensors = tensors.data();
    if (!rarely()) list.count = 2;
    list.count %= 3;
    clear(list.workspace);
    list.workspace.data = workspace();
    list.step = random_step();
    list.noop_flag = rarely() ? static_cast<uint32_t*>(somewhere()) : nullptr;
    expect_told("quantize_list", float8_quantize_list(list_, &list, nullptr));
    const float8_status found = float8_quantize_list_amax(list_, &list, nullptr);
    EXPECT_NE(found, FLOAT8_OK) << "the quantizers are not over ranks";
    expect_told("quantize_list_amax", found);
  }

  // One rank's, so that no thread waits for another.
  void gathers() {
    float8_tensor shard{}, whole{};
    for (float8_tensor* view : {&shard, &whole}) {
      const size_t first = view == &shard ? 1 : 5;
      view->rows = kM;
      view->cols = kK;
      view->ld_q = view->ld_qt = 128;
      view->q_setting.granularity = view->qt_setting.granularity = FLOAT8_AXIS;
      mutate(*view);
      keep_small({&view->rows, &view->cols, &view->ld_q, &view->ld_qt});
      view->q = pointer(slice(first));
      view->qt = pointer(slice(first + 1));
      view->q_inverse_scale = static_cast<const float*>(pointer(slice(first + 2)));
      view->qt_inverse_scale = static_cast<const float*>(pointer(slice(first + 3)));
    }
    float8_gather_args args{};
    args.shard_rows = kM;
    mutate(args);
    clear(args.workspace);
    args.shard = rarely() && rarely() ? nullptr : &shard;
    args.whole = rarely() && rarely() ? nullptr : &whole;
    args.communicator = rarely() && rarely() ? reinterpret_cast<float8_nccl_comm>(uintptr_t{16})
                                             : ranks_.front().get();
    const size_t bytes =
        float8_gather_workspace_bytes(args.whole, args.shard_rows, rarely() ? 0 : 1);
    if (bytes > kSlice) return;
    expect_told("gather",
                float8_gather_tensor(context_.get(), given(args, pointer(slice(0))), nullptr));
  }

  RandomStructs() {
    const float8_quantizer* const quantizers[] = {quantizer_.get(), quantizer_.get()};
    EXPECT_EQ(float8_quantizer_list_plan(context_.get(), quantizers, 2, &list_), FLOAT8_OK);
    EXPECT_LT(float8_quantizer_list_workspace_bytes(list_), kSlice);
    EXPECT_LT(linear_.workspace_bytes(), kSlice);
    EXPECT_TRUE(scales_.init(state_, nullptr));
  }
  ~RandomStructs() override { float8_quantizer_list_destroy(list_); }

  static float8::Linear plan(const float8::Context& context) {
    float8::LinearDesc desc;
    desc.m_max = kM;
    desc.n = kN;
    desc.k = kK;
    desc.recipe = float8::Recipe::delayed();
    return float8::Linear::plan(context, desc).value();
  }

  struct alignas(256) Line {
    std::array<unsigned char, 256> bytes;
  };
  struct Memory {
    std::vector<Line> lines{(kSlices + 1) * kSlice / sizeof(Line)};  // the last slice has no tensor
    unsigned char* data() { return lines.front().bytes.data(); }
  };
  std::mt19937_64 random_{setting("FLOAT8_CAMPAIGN_SEED", 18)};
  Memory memory_;
  float8::Context context_ = float8::Context::create(0, {.cache_dir = "", .emulate = true}).value();
  float8::Linear linear_ = plan(context_);
  float8::Quantizer quantizer_ =  // of the weight
      float8::Quantizer::plan(context_, {.operand = FLOAT8_WEIGHT,
                                         .rows_max = kN,
                                         .cols = kK,
                                         .recipe = float8::Recipe::delayed(),
                                         .noop_flag = true})
          .value();
  float8::Scales scales_ = float8::Scales::plan(context_, {linear_.get(), linear_.get()}).value();
  void* state_ = slice(11);
  float8_quantizer_list* list_ = nullptr;
  float8_step step_{};
  std::vector<float8::Communicator> ranks_ = float8::Communicator::create({&context_}).value();
  std::map<std::string, int> good_, bad_;
};

TEST_F(RandomStructs, EveryCallReturnsAStatus) {
  const uint64_t rounds = setting("FLOAT8_LONG_CAMPAIGN", 0) != 0 ? 300'000 : 3000;
  for (uint64_t i = 0; i < rounds && !HasFailure(); ++i) {
    calls();
    lists();
    gathers();
    if (i % 4 == 0) contexts();
    if (i % 8 == 0) plans();
    if (i % 8 == 4) models();
    if (HasFailure())
      f8::print(stderr, "round {} of seed {}\n", i, setting("FLOAT8_CAMPAIGN_SEED", 18));
  }
  for (const char* call :
       {"context", "linear_plan", "scales_plan", "model_plan", "model_verdict", "forward",
        "backward", "quantize", "quantize_list", "scales_sync", "gather"}) {
    EXPECT_GT(good_[call], 0) << call;
    EXPECT_GT(bad_[call], 0) << call;
    RecordProperty(call, f8::format("{} good, {} bad", good_[call], bad_[call]));
  }
}

}  // namespace
}  // namespace f8::runtime
