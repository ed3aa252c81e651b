// The C interface and the C++ one over it, on the fake device. Its cache is filled beforehand by
// the fake compiler, since a context made here compiles for real.
#include <array>
#include <cstring>
#include <float8/float8.hpp>
#include <fstream>
#include <functional>
#include <thread>

#include "codegen/emit.hpp"
#include "recipes/reference/reference.hpp"
#include "recipes/sealed_text.hpp"
#include "runtime/c_abi/struct_fields.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"

namespace f8::runtime {
namespace {

using testing::FakeCuda;
using testing::says;
using testing::ScratchDirectory;

class CAbi : public ::testing::Test {
 protected:
  // The kernels of a linear of that shape, as the fake device wants them.
  void fill_cache(const char* recipe) {
    LinearDesc desc;
    desc.shape = {kM, kN, kK};
    desc.recipe = find_recipe(recipe).value();
    auto cache = codegen::CubinCache::open(directory_.path(), FakeCuda::compiler()).value();
    const auto specs = choose_kernels(desc, nullptr, cuda_.sm_count)->specs();
    for (const auto& spec : specs) {
      ASSERT_TRUE(cache.get(codegen::emit(spec).value()));
    }
  }
  [[nodiscard]] float8::Context context() {
    return float8::Context::create(0, {directory_.path(), false}).value();
  }
  [[nodiscard]] static float8_linear_desc desc() {
    float8_linear_desc d{};
    d.struct_size = sizeof d;
    d.m_max = kM;
    d.n = kN;
    d.k = kK;
    d.recipe = "rowwise";
    return d;
  }

  FakeCuda cuda_;
  ScratchDirectory directory_;
};

TEST_F(CAbi, ForwardAndBackward) {
  for (const char* recipe : {"tensorwise", "rowwise"}) {
    fill_cache(recipe);
    const float8::Context ctx = context();
    float8::LinearDesc d;
    d.m_max = kM;
    d.n = kN;
    d.k = kK;
    d.recipe = float8::Recipe::named(recipe);
    const auto linear = float8::Linear::plan(ctx, d).value();
    const auto x = reference::random_matrix(kM, kK, 1);
    const auto w = reference::random_matrix(kN, kK, 2);
    const auto dy = reference::random_matrix(kM, kN, 3);
    const auto bits_x = reference::to_bf16_bits(x);
    const auto bits_w = reference::to_bf16_bits(w);
    const auto bits_dy = reference::to_bf16_bits(dy);
    std::vector<uint16_t> y(kM * kN);
    std::vector<uint16_t> dx(kM * kK);
    std::vector<uint16_t> dw(kN * kK);
    std::vector<double> saved(linear.saved_bytes() / 8);
    std::vector<double> workspace(linear.workspace_bytes() / 8);
    const float8::Status forward = linear.forward({.x = {bits_x.data()},
                                                   .w = {bits_w.data()},
                                                   .y = {y.data()},
                                                   .saved = {saved.data()},
                                                   .workspace = {workspace.data()}},
                                                  nullptr);
    ASSERT_TRUE(forward.ok()) << forward.message();
    const float8::Status backward = linear.backward({.dy = {bits_dy.data()},
                                                     .dx = {dx.data()},
                                                     .dw = {dw.data()},
                                                     .saved = {saved.data()},
                                                     .workspace = {workspace.data()}},
                                                    nullptr);
    ASSERT_TRUE(backward.ok()) << backward.message();
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    const auto expected = reference::linear(find_recipe(recipe).value(), x, w, dy).value();
    const auto error = [](const std::vector<double>& want, std::span<const uint16_t> bits) {
      return reference::relative_error(want, reference::to_doubles(reference::from_bf16_bits(
                                                 1, static_cast<int64_t>(bits.size()), bits)));
    };
    EXPECT_LT(error(expected.y, y), 2.5e-3);
    EXPECT_LT(error(expected.dx, dx), 2.5e-3);
    EXPECT_LT(error(expected.dw, dw), 2.5e-3);
  }
}

TEST_F(CAbi, ALinearOutlivesItsContext) {
  fill_cache("rowwise");
  float8_linear* linear = nullptr;
  {
    const float8::Context ctx = context();
    const float8_linear_desc d = desc();
    ASSERT_EQ(float8_linear_plan(ctx.get(), &d, &linear), FLOAT8_OK) << float8_last_error();
  }
  EXPECT_EQ(cuda_.retained, 1);
  EXPECT_GT(float8_linear_workspace_bytes(linear), 0U);
  float8_linear_destroy(linear);
  EXPECT_EQ(cuda_.retained, 0);
}

TEST_F(CAbi, NullIsAnErrorOrNothing) {
  EXPECT_EQ(float8_context_create(0, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says(float8_last_error(), "out is NULL")) << float8_last_error();
  EXPECT_EQ(float8_context_load_table(nullptr, "x", nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_linear_plan(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  float8_linear* linear = reinterpret_cast<float8_linear*>(uintptr_t{1});
  const float8_linear_desc d = desc();
  EXPECT_EQ(float8_linear_plan(nullptr, &d, &linear), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(linear, nullptr);
  EXPECT_EQ(float8_linear_forward(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_linear_backward(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_amax_sync(nullptr, 1, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_linear_workspace_bytes(nullptr), 0U);
  EXPECT_EQ(float8_linear_forward_workspace_bytes(nullptr, 0, 0), 0U);
  EXPECT_EQ(float8_linear_backward_workspace_bytes(nullptr, 0, 0, 1), 0U);
  EXPECT_EQ(float8_linear_saved_bytes(nullptr), 0U);
  float8_context_destroy(nullptr);
  float8_linear_destroy(nullptr);
}

TEST_F(CAbi, StructSizeIsChecked) {
  const float8::Context ctx = context();
  float8_linear* linear = nullptr;
  float8_linear_desc d = desc();
  d.struct_size = 0;
  EXPECT_EQ(float8_linear_plan(ctx.get(), &d, &linear), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says(float8_last_error(), "float8_linear_desc")) << float8_last_error();

  // A caller with an older, shorter header: what it does not know is 0, here bf16 gradients.
  fill_cache("rowwise");
  d = desc();
  d.struct_size = offsetof(float8_linear_desc, grad_weight_dtype);
  d.grad_weight_dtype = FLOAT8_F32;
  EXPECT_EQ(float8_linear_plan(ctx.get(), &d, &linear), FLOAT8_OK) << float8_last_error();
  float8_linear_destroy(linear);

  // A caller with a newer, longer one: fine until it uses what this version lacks.
  struct {
    float8_linear_desc known;
    uint64_t future;
  } longer{desc(), 0};
  longer.known.struct_size = sizeof longer;
  EXPECT_EQ(float8_linear_plan(ctx.get(), &longer.known, &linear), FLOAT8_OK)
      << float8_last_error();
  float8_linear_destroy(linear);
  longer.future = 1;
  EXPECT_EQ(float8_linear_plan(ctx.get(), &longer.known, &linear), FLOAT8_UNSUPPORTED);
  EXPECT_EQ(linear, nullptr);
}

// Every size of every struct: those of whole fields are a version's, and the others are refused
// before a field is looked at.
template <class Struct>
void expect_whole_fields(const std::function<float8_status(const Struct*)>& call) {
  size_t refused = 0;
  for (size_t bytes = 0; bytes <= sizeof(Struct) + 16; ++bytes) {
    bool whole = bytes >= sizeof(size_t) && bytes % sizeof(size_t) == 0;
    for (const auto& field : c_abi::StructFields<Struct>::kAll) {
      whole = whole && (bytes <= field.begin || bytes >= field.end);
    }
    std::array<unsigned char, sizeof(Struct) + 16> raw{};
    std::memcpy(raw.data(), &bytes, sizeof bytes);
    alignas(Struct) std::array<unsigned char, sizeof raw> aligned = raw;
    (void)call(reinterpret_cast<const Struct*>(aligned.data()));
    const bool said = says(float8_last_error(), f8::format("struct_size is {};", bytes));
    EXPECT_EQ(said, !whole) << bytes << ": " << float8_last_error();
    refused += said ? 1 : 0;
  }
  EXPECT_GT(refused, sizeof(Struct) / 2);
}

TEST_F(CAbi, AStructSizeThatEndsInsideAFieldIsRefused) {
  fill_cache("delayed");
  const float8::Context ctx = context();
  float8_linear_desc d = desc();
  d.recipe = "delayed";
  float8_linear* linear = nullptr;
  ASSERT_EQ(float8_linear_plan(ctx.get(), &d, &linear), FLOAT8_OK) << float8_last_error();
  float8_context* made = nullptr;
  expect_whole_fields<float8_context_options>([&](const float8_context_options* options) {
    const float8_status status = float8_context_create(9, options, &made);  // there is no device 9
    EXPECT_NE(status, FLOAT8_OK);
    return status;
  });
  expect_whole_fields<float8_recipe>([&](const float8_recipe* recipe) {
    return float8_recipe_named("no such recipe", const_cast<float8_recipe*>(recipe));
  });
  expect_whole_fields<float8_linear_desc>([&](const float8_linear_desc* desc) {
    float8_linear* out = nullptr;
    return float8_linear_plan(ctx.get(), desc, &out);
  });
  expect_whole_fields<float8_forward_args>([&](const float8_forward_args* args) {
    return float8_linear_forward(linear, args, nullptr);
  });
  expect_whole_fields<float8_backward_args>([&](const float8_backward_args* args) {
    return float8_linear_backward(linear, args, nullptr);
  });
  expect_whole_fields<float8_scales_desc>([&](const float8_scales_desc* desc) {
    float8_scales* out = nullptr;
    const float8_status status = float8_scales_plan(ctx.get(), desc, &out);
    float8_scales_destroy(out);
    return status == FLOAT8_OK ? float8_recipe_named(nullptr, nullptr) : status;
  });
  expect_whole_fields<float8_model_desc>([&](const float8_model_desc* desc) {
    float8_model* out = nullptr;
    return float8_model_plan(ctx.get(), desc, &out);
  });
  expect_whole_fields<float8_model_layer>([&](const float8_model_layer* layer) {
    float8_model_desc desc{};
    desc.struct_size = sizeof desc;
    desc.layers = layer;
    desc.count = 1;
    desc.tokens = 16;
    desc.recipe = "rowwise";
    float8_model* out = nullptr;
    return float8_model_plan(ctx.get(), &desc, &out);
  });
  float8_linear_destroy(linear);
}

// The list of fields that the check goes by is the header's.
TEST(CAbiLayout, TheListsOfFieldsAreTheStructs) {
  const auto is = [](const c_abi::Field& field, size_t begin, size_t size) {
    return field.begin == begin && field.end == begin + size;
  };
  const auto& forward = c_abi::StructFields<float8_forward_args>::kAll;
  EXPECT_TRUE(is(forward[2], offsetof(float8_forward_args, x), sizeof(float8_matrix)));
  EXPECT_TRUE(is(forward[9], offsetof(float8_forward_args, scales), sizeof(float8_scale_slots)));
  const auto& backward = c_abi::StructFields<float8_backward_args>::kAll;
  EXPECT_TRUE(is(backward[7], offsetof(float8_backward_args, db), sizeof(float8_result)));
  EXPECT_TRUE(backward[10].is_pointer) << "a step";
  const auto& recipe = c_abi::StructFields<float8_recipe>::kAll;
  EXPECT_TRUE(is(recipe[3], offsetof(float8_recipe, grad_input), sizeof(float8_gemm_setting)));
  const auto& model = c_abi::StructFields<float8_model_desc>::kAll;
  EXPECT_TRUE(is(model[11], offsetof(float8_model_desc, margin), sizeof(double)));
  EXPECT_TRUE(model[8].is_pointer) << "a callback";
}

TEST_F(CAbi, BadDescriptions) {
  const float8::Context ctx = context();
  float8_linear* linear = nullptr;
  const auto refused = [&](auto change, float8_status status, std::string_view part) {
    float8_linear_desc d = desc();
    change(d);
    EXPECT_EQ(float8_linear_plan(ctx.get(), &d, &linear), status) << part;
    EXPECT_TRUE(says(float8_last_error(), part)) << float8_last_error();
  };
  refused([](auto& d) { d.recipe = nullptr; }, FLOAT8_INVALID_ARGUMENT, "recipe is NULL");
  refused([](auto& d) { d.m_max = 0; }, FLOAT8_INVALID_ARGUMENT, "");
  refused([](auto& d) { d.n = 24; }, FLOAT8_INVALID_ARGUMENT, "24");
  refused([](auto& d) { d.grad_weight_dtype = 3; }, FLOAT8_INVALID_ARGUMENT, "grad_weight_dtype");
  float8_linear_desc unknown = desc();
  unknown.recipe = "no_such_recipe";
  EXPECT_NE(float8_linear_plan(ctx.get(), &unknown, &linear), FLOAT8_OK);
  EXPECT_TRUE(says(float8_last_error(), "blockwise, bf16")) << float8_last_error();
}

TEST_F(CAbi, LoadsTables) {
  float8::Context ctx = context();
  const std::string path = directory_.path() + "/table";
  TuningTable table;
  table.devices = {{.name = "Fake H100"}};
  table.sources = {{"made"}};
  table.add(LinearSpeedup{"rowwise", {kM, kN, kK}, 1.2, 1.1, 1.3, 1e6});
  std::ofstream(path) << table.serialize();
  const auto first = ctx.load_table(path);
  ASSERT_TRUE(first.ok()) << first.error().message;
  EXPECT_EQ(f8::format("{:016x}", first.value()), table.hash().substr(0, 16));
  std::ofstream(path) << "not a table";
  const auto corrupt = ctx.load_table(path);
  ASSERT_FALSE(corrupt.ok());
  EXPECT_EQ(corrupt.error().code, FLOAT8_CORRUPT);
  EXPECT_TRUE(says(corrupt.error().message, path)) << corrupt.error().message;
  const auto missing = ctx.load_table(directory_.path() + "/nothing");
  ASSERT_FALSE(missing.ok());
  EXPECT_TRUE(says(missing.error().message, "/nothing")) << missing.error().message;
}

// A table whose grammar is right, with a kernel that cannot be: refused by its line when it is
// loaded, and not when a layer near it is planned.
TEST_F(CAbi, RefusesTablesWithKernelsThatCannotBeCompiled) {
  float8::Context ctx = context();
  const std::string path = directory_.path() + "/table";
  TuningTable good;
  good.devices = {{.name = "Fake H100"}};
  good.sources = {{"made"}};
  const auto row = [](const char* key, const char* config, Provider provider) {
    return KernelChoice{Problem::parse(key).value(), parse_gemm_kernel(provider, config).value(),
                        1000};
  };
  constexpr const char* kTensor = "output/tensorwise/e4m3.e4m3.bf16/tn/m64n64k64/b0f1";
  constexpr const char* kBlocks = "output/blockwise/e4m3.e4m3.bf16/tn/m64n64k64/b0f0";
  good.add(row("output/blockwise/e4m3.e4m3.bf16/tn/m32n64k64/b0f0", "h0", Provider::kCublasLt));
  good.add(row("output/mine/e4m3.e4m3.bf16/tn/m64n64k64/b0f1", "128x96s4c1x1w2g8",
               Provider::kGenerated));
  good.add(row(kTensor, "128x256s4c2x1w2g8", Provider::kGenerated));
  good.add(LinearSpeedup{"rowwise", {kM, kN, kK}, 1.2, 1.1, 1.3, 1e6});
  std::ofstream(path) << good.serialize();
  ASSERT_TRUE(ctx.load_table(path)) << ctx.load_table(path).error().message;
  const auto hash = ctx.load_table(path).value();

  struct Bad {
    const char* key;
    const char* config;
    const char* words;
  };
  for (const Bad& bad : {
           Bad{kTensor, "banana", ", line 6: GEMM configuration"},
           Bad{kTensor, "128x256s9c2x1w2g8", ", line 6: configuration 128x256s9c2x1w2g8: needs"},
           Bad{kTensor, "128x250s4c2x1w2g8", ", line 6: configuration 128x250s4c2x1w2g8: tile_n"},
           Bad{kTensor, "128x256s4c8x1w2g8", ", line 6: "},
           Bad{kTensor, "128x256s4c2x1w2g0", ", line 6: "},
           Bad{kTensor, "128x256s4c2x1w2g99999999999", ", line 6: "},
           Bad{kBlocks, "128x96s4c1x1w2g8", ", line 5: configuration 128x96s4c1x1w2g8: block"},
           Bad{"output/tensorwise/bf16.bf16.bf16/tn/m64n64k64/b0f1", "128x256s4c2x1w2g8",
               ", line 6: configuration 128x256s4c2x1w2g8: operands must be"},
       }) {
    // No table holds such a row, but a text may.
    constexpr const char* kPlaceholder = "64x64s2c1x1w1g1";
    TuningTable table = good;
    table.add(row(bad.key, kPlaceholder, Provider::kGenerated));
    std::string text = table.serialize();
    text.replace(text.find(kPlaceholder), std::strlen(kPlaceholder), bad.config);
    text.resize(text.rfind("end "));
    std::ofstream(path) << seal(text);
    const auto loaded = ctx.load_table(path);
    ASSERT_FALSE(loaded.ok()) << bad.config;
    EXPECT_EQ(loaded.error().code, FLOAT8_CORRUPT);
    EXPECT_TRUE(says(loaded.error().message, path + ": tuning table" + bad.words))
        << loaded.error().message;
  }
  std::ofstream(path) << good.serialize();
  EXPECT_EQ(ctx.load_table(path).value(), hash);
}

TEST_F(CAbi, TheLastErrorIsTheThreadsOwn) {
  EXPECT_EQ(float8_context_create(7, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  const std::string mine = float8_last_error();
  EXPECT_FALSE(mine.empty());
  std::thread([] {
    EXPECT_STREQ(float8_last_error(), "");
    EXPECT_EQ(float8_linear_forward(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(float8_last_error(), "linear is NULL"));
  }).join();
  EXPECT_EQ(mine, float8_last_error());
}

TEST_F(CAbi, DeviceErrorsReachTheCaller) {
  float8_context* out = nullptr;
  cuda_.cc_major = 8;
  EXPECT_EQ(float8_context_create(0, nullptr, &out), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says(float8_last_error(), "Hopper"));
  cuda_.cc_major = 9;
  cuda_.driver_version = 12040;
  EXPECT_EQ(float8_context_create(0, nullptr, &out), FLOAT8_ENVIRONMENT);
  EXPECT_EQ(out, nullptr);
  cuda_.driver_version = 13000;
  fill_cache("rowwise");
  const float8::Context ctx = context();
  cuda_.load_result = CUDA_ERROR_OUT_OF_MEMORY;
  float8_linear* linear = nullptr;
  const float8_linear_desc d = desc();
  EXPECT_EQ(float8_linear_plan(ctx.get(), &d, &linear), FLOAT8_OUT_OF_MEMORY);
}

// A struct ends where its last field does: the next version's field must not lie in bytes that an
// older caller leaves as they are. Sizes only grow.
TEST(CAbiLayout, StructsHaveNoLooseEnds) {
#define F8_ENDS(type, field, bytes)                                                    \
  EXPECT_EQ(offsetof(type, field) + sizeof(std::declval<type>().field), sizeof(type)); \
  EXPECT_EQ(sizeof(type), bytes)
  F8_ENDS(float8_context_options, database, 48U);
  F8_ENDS(float8_cast_setting, pow2, 16U);
  F8_ENDS(float8_gemm_setting, fast, 36U);
  F8_ENDS(float8_recipe, reserved, 128U);
  F8_ENDS(float8_tensor, whole_rows, 120U);
  F8_ENDS(float8_quantizer_desc, less_workspace, 96U);
  F8_ENDS(float8_quantize_args, up_row_amax, 344U);
  F8_ENDS(float8_fingerprint_args, noop_flag, 80U);
  F8_ENDS(float8_adamw_tensor, cast, 136U);
  F8_ENDS(float8_adamw_args, found_inf, 96U);
  F8_ENDS(float8_attention_desc, reserved, 64U);
  F8_ENDS(float8_attention_forward_args, sequence_error, 216U);
  F8_ENDS(float8_attention_dequantize_args, v, 160U);
  F8_ENDS(float8_attention_backward_args, v, 320U);
  F8_ENDS(float8_rotary_args, reserved, 216U);
  F8_ENDS(float8_rms_norm_args, out_dtype, 112U);
  F8_ENDS(float8_rms_norm_backward_args, reserved, 176U);
  F8_ENDS(float8_gemm_desc, reserved, 72U);
  F8_ENDS(float8_gemm_args, workspace, 72U);
  F8_ENDS(float8_linear_desc, no_grad_weight, 104U);
  F8_ENDS(float8_forward_args, counters, 176U);
  F8_ENDS(float8_backward_args, counters, 240U);
  F8_ENDS(float8_matrix, fp8, 24U);
  F8_ENDS(float8_result, reserved, 24U);
  F8_ENDS(float8_buffer, bytes, 16U);
  F8_ENDS(float8_step, launch_counts, 40U);
  F8_ENDS(float8_quantize_list_args, noop_flag, 56U);
  F8_ENDS(float8_gather_args, workspace, 56U);
  F8_ENDS(float8_cast_counters, non_finite, 40U);
  F8_ENDS(float8_scales_desc, experts_count, 56U);
  F8_ENDS(float8_scale_slots, opaque, 32U);
  F8_ENDS(float8_experts_desc, reserved, 96U);
  F8_ENDS(float8_experts_forward_args, w_amax, 208U);
  F8_ENDS(float8_experts_backward_args, w_amax, 256U);
  F8_ENDS(float8_expert_quantizer_desc, reserved, 72U);
  F8_ENDS(float8_expert_quantize_args, scales, 168U);
  F8_ENDS(float8_moe_desc, reserved, 96U);
  F8_ENDS(float8_moe_forward_args, buffers, 376U);
  F8_ENDS(float8_moe_backward_args, reserved_2, 488U);
  F8_ENDS(float8_model_layer, skew, 40U);
  F8_ENDS(float8_model_desc, device, 152U);
  F8_ENDS(float8_model_verdict, measured_on, 120U);
  F8_ENDS(float8_attention_verdict, reserved, 104U);
#undef F8_ENDS
}

TEST(CAbiText, StatusesHaveNames) {
  for (int i = FLOAT8_OK; i <= FLOAT8_INTERNAL; ++i) {
    EXPECT_STRNE(float8_status_string(static_cast<float8_status>(i)), "unknown status") << i;
  }
  EXPECT_STREQ(float8_version(), "0.2.0");
}

TEST(CppHeader, ValueOfAnErrorThrowsIt) {
  const auto failed = [] { return float8::Result<int>(float8::Error{FLOAT8_IO, "no disk"}); };
  try {
    (void)failed().value();
    FAIL();
  } catch (const float8::Exception& e) {
    EXPECT_STREQ(e.what(), "no disk");
    EXPECT_EQ(e.code(), FLOAT8_IO);
  }
  EXPECT_EQ(float8::Result<int>(3).value(), 3);
}

}  // namespace
}  // namespace f8::runtime
