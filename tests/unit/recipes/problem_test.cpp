#include "recipes/problem.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace f8 {
namespace {

constexpr Op kOps[] = {Op::kOutput, Op::kGradInput, Op::kGradWeight, Op::kLinear};
constexpr Groups kGroups[] = {{}, {1, kEven}, {128, kZipf}, {kMaxExperts, kOneExpert}};
constexpr std::string_view kExample = "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096";

std::string message_of(const auto& result) {
  return result ? "no error" : result.error().message;
}

TEST(ProblemKey, GoldenKeys) {
  const auto key = [](Op op, std::string_view recipe, Shape shape) {
    const auto problem = Problem::make(op, *find_recipe(recipe), shape);
    return problem ? problem->key() : problem.error().message;
  };
  const Shape shape = {8192, 4096, 1024};
  EXPECT_EQ(key(Op::kOutput, "tensorwise", {8192, 4096, 4096}), kExample);
  EXPECT_EQ(key(Op::kGradInput, "tensorwise", shape),
            "grad_input/tensorwise/e5m2.e4m3.bf16/m8192n4096k1024");
  EXPECT_EQ(key(Op::kLinear, "rowwise", shape),
            "linear/rowwise+fast/e4m3.e4m3.bf16/m8192n4096k1024");
  EXPECT_EQ(key(Op::kGradWeight, "rowwise_with_gw_hp", shape),
            "grad_weight/rowwise_with_gw_hp/bf16.bf16.bf16/m8192n4096k1024");
  EXPECT_EQ(key(Op::kOutput, "blockwise", {1, 16, kMaxDim}),
            "output/blockwise/e4m3.e4m3.bf16/m1n16k1073741824");
}

TEST(ProblemKey, RoundTripsForEveryRecipeAndOp) {
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Op op : kOps) {
      for (const Dtype d : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
        for (const Groups& groups : kGroups) {
          auto problem = Problem::make(op, recipe, {17, 2064, 48}, groups);
          ASSERT_TRUE(problem) << message_of(problem);
          EXPECT_EQ(problem->groups(), groups);
          EXPECT_EQ(problem->shape(), (Shape{17, 2064, 48}));
          EXPECT_EQ(is_gemm(problem->op), op != Op::kLinear);
          EXPECT_EQ(to_gemm(problem->op), to_gemm(op));
          EXPECT_EQ(dense(problem->op), op);
          const bool bias = groups.skew == kZipf;
          problem->d = d;
          problem->bias = bias;
          const auto parsed = Problem::parse(problem->key());
          ASSERT_TRUE(parsed) << message_of(parsed);
          EXPECT_EQ(*parsed, *problem);
          EXPECT_EQ(parsed->key(), problem->key());
        }
      }
    }
  }
}

TEST(ProblemKey, ARecipeOfTheUserRoundTrips) {
  const auto parsed = Problem::parse("linear/my_recipe_2+bias/e5m2.e4m3.f32/m1n16k16");
  ASSERT_TRUE(parsed) << message_of(parsed);
  EXPECT_EQ(parsed->recipe, "my_recipe_2");
  EXPECT_TRUE(parsed->bias);
  EXPECT_FALSE(parsed->fast);
}

TEST(ProblemKey, TheSpellingOfVersion0_1IsTheSameProblem) {
  const struct {
    const char* old_key;
    const char* key;
  } kCases[] = {
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8192n4096k4096/b0f1",
       "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096"},
      {"linear/rowwise/e4m3.e4m3.f16/tn/m1n16k32/b1f1",
       "linear/rowwise+bias+fast/e4m3.e4m3.f16/m1n16k32"},
      {"grad_input/mine/e5m2.e4m3.f32/tn/m1n16k32/b1f0",
       "grad_input/mine+bias/e5m2.e4m3.f32/m1n16k32"},
      {"grad_weight/custom_0123/bf16.bf16.bf16/tn/m1n16k32/b0f0",
       "grad_weight/custom_0123/bf16.bf16.bf16/m1n16k32"},
  };
  for (const auto& [old_key, key] : kCases) {
    const auto old_problem = Problem::parse(old_key);
    ASSERT_TRUE(old_problem) << message_of(old_problem);
    EXPECT_EQ(old_problem->key(), key);
    EXPECT_EQ(*old_problem, Problem::parse(key).value());
  }
}

// The grammar of dims is one for all operations.
TEST(ProblemKey, DimsAreThoseOfTheOperation) {
  constexpr DimSpec kExperts[] = {{.name = "e", .meaning = "experts"},
                                  {.name = "m", .meaning = "tokens"},
                                  {.name = "n", .meaning = "out_features", .multiple = 16},
                                  {.name = "k", .meaning = "in_features", .multiple = 16},
                                  {.name = "skew", .meaning = "percent", .least = 0}};
  constexpr DimSpec kCast[] = {{.name = "rows", .meaning = "rows"},
                               {.name = "cols", .meaning = "columns", .multiple = 16}};
  const Dims experts = {64, 8192, 4096, 2048, 0};
  EXPECT_EQ(to_string(experts, kExperts), "e64m8192n4096k2048skew0");
  EXPECT_EQ(parse_dims("e64m8192n4096k2048skew0", kExperts).value(), experts);
  EXPECT_EQ(parse_dims("rows4096cols128", kCast).value(), (Dims{4096, 128}));
  EXPECT_NE(message_of(parse_dims("e0m8n16k16skew0", kExperts)).find("e (experts) is 0"),
            std::string::npos);
  EXPECT_NE(message_of(parse_dims("m8n16k16", kExperts)).find("not eINTmINTnINTkINTskewINT"),
            std::string::npos);
}

TEST(Op, EachIsRegisteredOnce) {
  std::vector<std::string_view> names;
  for (const OpSpec& spec : registered_ops()) {
    EXPECT_EQ(&spec_of(spec.op), &spec);
    names.push_back(spec.name);
  }
  EXPECT_EQ(names, (std::vector<std::string_view>{
                       "output", "grad_input", "grad_weight", "linear", "grouped_output",
                       "grouped_grad_input", "grouped_grad_weight", "experts", "attention",
                       "attention_forward", "attention_backward", "mlp"}));
}

TEST(ProblemKey, MakeRefusesABadRecipeOrShape) {
  Recipe bad = *find_recipe("rowwise");
  bad.gemms[0].b.dtype = Dtype::kF32;
  EXPECT_NE(message_of(Problem::make(Op::kOutput, bad, {16, 16, 16})).find("GEMM output operand b"),
            std::string::npos);
  EXPECT_NE(message_of(Problem::make(Op::kOutput, *find_recipe("rowwise"), {16, 8, 16}))
                .find("n (out_features) is 8"),
            std::string::npos);
}

TEST(ProblemKey, MalformedKeysAreRefusedWithTheReason) {
  const struct {
    const char* key;
    const char* reason;
  } kCases[] = {
      {"", "1 fields"},
      {"output", "1 fields"},
      {"/tensorwise/e4m3.e4m3.bf16/m8n16k16", "unknown op ''"},
      {"cast/tensorwise/e4m3.e4m3.bf16/m8n16k16", "unknown op 'cast'"},
      {"fprop/tensorwise/e4m3.e4m3.bf16/m8n16k16", "written 'output'"},
      {" output/tensorwise/e4m3.e4m3.bf16/m8n16k16", "unknown op ' output'"},
      {"output//e4m3.e4m3.bf16/m8n16k16", "recipe ''"},
      {"output/Tensor wise/e4m3.e4m3.bf16/m8n16k16", "recipe 'Tensor wise'"},
      {"output/tensorwise/e4m3.e4m3/m8n16k16", "not a.b.d"},
      {"output/tensorwise/e4m3.e4m3.bf16.f32/m8n16k16", "not a.b.d"},
      {"output/tensorwise/e4m3.e4m4.bf16/m8n16k16", "unknown type 'e4m4'"},
      {"output/tensorwise/e4m3..bf16/m8n16k16", "unknown type ''"},
      {"output/tensorwise/e4m3.bf16.bf16/m8n16k16", "both operands are fp8 or neither"},
      {"output/tensorwise/e5m2.e5m2.bf16/m8n16k16", "one operand must be e4m3"},
      {"output/tensorwise/e4m3.e4m3.e4m3/m8n16k16", "result type e4m3"},
      {"output/tensorwise/e4m3.e4m3.bf16/n16m8k16", "no 'm' where due"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16", "no 'k' where due"},
      {"output/tensorwise/e4m3.e4m3.bf16/mn16k16", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/m08n16k16", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/m+8n16k16", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/m-8n16k16", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16k1073741840", "k is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16k99999999999999999999", "k is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16k16x", "unexpected 'x'"},
      {"output/tensorwise/e4m3.e4m3.bf16/m0n16k16", "m (tokens) is 0"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n0k16", "n (out_features) is 0"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16k24", "k (in_features) is 24"},
      {"output/tensorwise+/e4m3.e4m3.bf16/m8n16k16", "settings 'tensorwise+'"},
      {"output/tensorwise+slow/e4m3.e4m3.bf16/m8n16k16", "settings 'tensorwise+slow'"},
      {"output/tensorwise+fast+bias/e4m3.e4m3.bf16/m8n16k16",
       "behind it +bias, +fast or +bias+fast"},
      {"output/tensorwise+fast+fast/e4m3.e4m3.bf16/m8n16k16", "settings"},
      {"output/+fast/e4m3.e4m3.bf16/m8n16k16", "recipe ''"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16k16 ", "unexpected ' '"},
      {"output/tensorwise/e4m3.e4m3.bf16/m8n16k16\n", "unexpected '\\x0a'"},
      {"output/tensorwise/e4m3.e4m3.bf16/e4m8n16k16", "no 'm' where due"},
      {"convolution/blockwise/e4m3.e4m3.bf16/b8h32s4096d128c1",
       "unknown op 'convolution'; this float8 knows output, grad_input, grad_weight, linear, "
       "grouped_output, grouped_grad_input, grouped_grad_weight, experts, attention, "
       "attention_forward, attention_backward, mlp, so use the newer float8 that wrote it"},
      {"convolution/blockwise/any/other/form", "use the newer float8"},
      {"experts/blockwise/e4m3.e4m3.bf16/m8n16k16", "no 'e' where due"},
      {"experts/blockwise/e4m3.e4m3.bf16/e8m8n16k16", "no 'skew' where due"},
      {"experts/blockwise/e4m3.e4m3.bf16/e0m8n16k16skew0",
       "e (experts) is 0; it must be from 1 to 1024"},
      {"experts/blockwise/e4m3.e4m3.bf16/e1025m8n16k16skew0", "e (experts) is 1025"},
      {"experts/blockwise/e4m3.e4m3.bf16/e8m8n16k16skew101", "skew (of the routing) is 101"},
      // Of the form of version 0.1.
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16", "5 fields"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/b0f1/", "7 fields"},
      {"fprop/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/b0f1", "written 'output'"},
      {"output//e4m3.e4m3.bf16/tn/m8n16k16/b0f1", "recipe ''"},
      {"output/tensorwise/e4m3..bf16/tn/m8n16k16/b0f1", "unknown type ''"},
      {"output/tensorwise/e4m3.e4m3.bf16/nt/m8n16k16/b0f1", "layout 'nt'"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/n16m8k16/b0f1", "no 'm' where due"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/mn16k16/b0f1", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m08n16k16/b0f1", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m+8n16k16/b0f1", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m-8n16k16/b0f1", "m is not a plain number"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/", "flags ''"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/f1b0", "flags 'f1b0'"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/b2f0", "flags 'b2f0'"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/b0f1 ", "flags 'b0f1 '"},
      {"output/tensorwise/e4m3.e4m3.bf16/tn/m8n16k16/b0f1\n", "flags 'b0f1\\x0a'"},
      {"output/tensorwise+fast/e4m3.e4m3.bf16/tn/m8n16k16/b0f1", "recipe 'tensorwise+fast'"},
  };
  for (const auto& [key, reason] : kCases) {
    const auto parsed = Problem::parse(key);
    ASSERT_FALSE(parsed) << key;
    EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(parsed.error().message.find(reason), std::string::npos) << parsed.error().message;
    EXPECT_TRUE(parsed.error().message.starts_with("problem '")) << parsed.error().message;
    EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos);
  }
}

TEST(ProblemKey, EveryPrefixIsRefused) {
  for (size_t length = 0; length < kExample.size(); ++length) {
    EXPECT_FALSE(Problem::parse(kExample.substr(0, length))) << kExample.substr(0, length);
  }
}

TEST(ProblemKey, ThoseOfExperts) {
  const Groups groups = {128, kZipf};
  const auto p = Problem::make(Op::kGradWeight, *find_recipe("rowwise_with_gw_hp"),
                               {65536, 768, 2048}, groups);
  ASSERT_TRUE(p) << message_of(p);
  EXPECT_EQ(p->key(),
            "grouped_grad_weight/rowwise_with_gw_hp/bf16.bf16.bf16/e128m65536n768k2048skew1");
  EXPECT_EQ(p->group_shape(), (Shape{512, 768, 2048}));
  EXPECT_EQ(p->flops(), 2.0 * 65536 * 768 * 2048);
  EXPECT_EQ(p->bytes(), 2.0 * (65536.0 * (768 + 2048) + 128.0 * 768 * 2048));
  const auto output = Problem::make(Op::kOutput, *find_recipe("rowwise"), {64, 16, 32}, groups);
  EXPECT_EQ(output->bytes(), 64 * 32 + 128 * 16 * 32 + 2 * 64 * 16) << "each expert has a weight";
}

TEST(RowsOfExperts, AreSharedByTheSkew) {
  using Rows = std::vector<int64_t>;
  EXPECT_EQ(rows_of_experts(8, {4, kEven}), (Rows{2, 2, 2, 2}));
  EXPECT_EQ(rows_of_experts(10, {4, kEven}), (Rows{3, 3, 2, 2}));
  EXPECT_EQ(rows_of_experts(2, {4, kEven}), (Rows{1, 1, 0, 0}));
  EXPECT_EQ(rows_of_experts(25, {4, kZipf}), (Rows{12, 6, 4, 3}));
  EXPECT_EQ(rows_of_experts(777, {3, kOneExpert}), (Rows{777, 0, 0}));
  EXPECT_EQ(rows_of_experts(5, {1, 7}), (Rows{5}));
  for (const Groups& groups : kGroups) {
    if (groups.experts == 0) continue;
    const Rows rows = rows_of_experts(65521, groups);
    EXPECT_EQ(std::ssize(rows), groups.experts);
    EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), 65521);
    EXPECT_TRUE(std::ranges::is_sorted(rows, std::greater<>()));
  }
}

TEST(Op, NamesAndTheFieldsOtherNames) {
  for (const Op op : kOps) EXPECT_EQ(parse_op(to_string(op)).value(), op);
  for (const Gemm g : kGemms) EXPECT_EQ(to_string(to_op(g)), to_string(g));
  for (const OpSpec& spec : registered_ops()) {
    EXPECT_EQ(parse_any_op(spec.name).value(), spec.op);
    EXPECT_EQ(parse_op(spec.name).has_value(), spec.op <= Op::kLinear);
  }
  EXPECT_EQ(parse_any_op("fprop").value(), Op::kOutput);
  EXPECT_EQ(parse_op("fprop").value(), Op::kOutput);
  EXPECT_EQ(parse_op("dgrad").value(), Op::kGradInput);
  EXPECT_EQ(parse_op("wgrad").value(), Op::kGradWeight);
  EXPECT_NE(message_of(parse_op("forward")).find("unknown op 'forward'; one of output"),
            std::string::npos);
}

TEST(Shape, GemmShapesContractTheRightDimension) {
  const Shape linear = {3, 32, 16};
  EXPECT_EQ(gemm_shape(linear, Gemm::kOutput), (Shape{3, 32, 16}));
  EXPECT_EQ(gemm_shape(linear, Gemm::kGradInput), (Shape{3, 16, 32}));
  EXPECT_EQ(gemm_shape(linear, Gemm::kGradWeight), (Shape{32, 16, 3}));
}

TEST(Shape, ValidationNamesTheDimension) {
  EXPECT_TRUE(validate_shape({1, 16, 16}));
  EXPECT_TRUE(validate_shape({kMaxDim, kMaxDim, kMaxDim}));
  const auto check = [](Shape shape, const char* part) {
    const Status valid = validate_shape(shape);
    ASSERT_FALSE(valid) << to_string(shape);
    EXPECT_EQ(valid.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(valid.error().message.find(part), std::string::npos) << valid.error().message;
  };
  check({0, 16, 16}, "m (tokens) is 0");
  check({-5, 16, 16}, "m (tokens) is -5");
  check({kMaxDim + 1, 16, 16}, "m (tokens) is 1073741825");
  check({1, 0, 16}, "n (out_features) is 0");
  check({1, 8, 16}, "n (out_features) is 8; it must be a positive multiple of 16");
  check({1, 16, -16}, "k (in_features) is -16");
  check({1, 16, 17}, "k (in_features) is 17");
  check({1, 16, kMaxDim + 16}, "k (in_features) is 1073741840; it must be at most 1073741824");
}

TEST(Shape, DimsRoundTrip) {
  const Shape shape = {17, 2064, 48};
  EXPECT_EQ(to_string(shape), "m17n2064k48");
  EXPECT_EQ(parse_dims(to_string(shape)).value(), shape);
  EXPECT_FALSE(parse_dims("17,2064,48"));
}

TEST(Problem, FlopsAndBytes) {
  const auto problem = [](Op op, const char* recipe) {
    return *Problem::make(op, *find_recipe(recipe), {8, 32, 16});
  };
  EXPECT_EQ(problem(Op::kOutput, "rowwise").flops(), 2.0 * 8 * 32 * 16);
  EXPECT_EQ(problem(Op::kGradWeight, "rowwise").flops(), 2.0 * 8 * 32 * 16);
  EXPECT_EQ(problem(Op::kLinear, "rowwise").flops(), 6.0 * 8 * 32 * 16);
  // x and w as fp8, y as bf16.
  EXPECT_EQ(problem(Op::kOutput, "rowwise").bytes(), 8 * 16 + 32 * 16 + 2 * 8 * 32);
  // dy and w, dx.
  EXPECT_EQ(problem(Op::kGradInput, "rowwise").bytes(), 8 * 32 + 32 * 16 + 2 * 8 * 16);
  // dy and x, dw; all bf16.
  EXPECT_EQ(problem(Op::kGradWeight, "rowwise_with_gw_hp").bytes(),
            2 * (8 * 32 + 8 * 16 + 32 * 16));
  EXPECT_EQ(problem(Op::kLinear, "rowwise").bytes(), 2 * 2 * (8 * 16 + 32 * 16 + 8 * 32));
  const auto largest =
      Problem::make(Op::kLinear, *find_recipe("rowwise"), {kMaxDim, kMaxDim, kMaxDim});
  EXPECT_EQ(largest->flops(), 6.0 * 0x1p90);  // no overflow
}

std::string shapes_text(std::string_view text) {
  const auto shapes = parse_shapes(text);
  if (!shapes) return shapes.error().message;
  std::string joined;
  for (const Shape& s : *shapes) joined += f8::format("{},{},{} ", s.m, s.n, s.k);
  return joined;
}

TEST(Shapes, ListsAndRanges) {
  EXPECT_EQ(shapes_text("8192,4096,4096"), "8192,4096,4096 ");
  EXPECT_EQ(shapes_text("1,16,32;2,48,64"), "1,16,32 2,48,64 ");
  EXPECT_EQ(shapes_text("1:8:x2,16,16"), "1,16,16 2,16,16 4,16,16 8,16,16 ");
  EXPECT_EQ(shapes_text("1:9:x2,16,16"), "1,16,16 2,16,16 4,16,16 8,16,16 ");
  EXPECT_EQ(shapes_text("5,16:64:16,16"), "5,16,16 5,32,16 5,48,16 5,64,16 ");
  EXPECT_EQ(shapes_text("5,16:64:32,16"), "5,16,16 5,48,16 ");
  EXPECT_EQ(shapes_text("7:7:1,16:16:x2,16"), "7,16,16 ");
  EXPECT_EQ(shapes_text("1:2:1,16:32:16,48:64:16"),
            "1,16,48 1,16,64 1,32,48 1,32,64 2,16,48 2,16,64 2,32,48 2,32,64 ");
  EXPECT_EQ(shapes_text("2,16,16;1,16,16;2,16,16;1:2:1,16,16"), "2,16,16 1,16,16 ");
  EXPECT_EQ(shapes_text("1:1073741824:x1073741824,16,16"), "1,16,16 1073741824,16,16 ");
}

TEST(Shapes, MalformedTextIsRefusedWithTheReason) {
  const struct {
    const char* text;
    const char* reason;
  } kCases[] = {
      {"", "shape '' is not M,N,K"},
      {";", "shape '' is not M,N,K"},
      {"8,16,16;", "shape '' is not M,N,K"},
      {"8,16", "shape '8,16' is not M,N,K"},
      {"8,16,16,16", "is not M,N,K"},
      {"8x16x16", "is not M,N,K"},
      {",16,16", "m is ''"},
      {"8,,16", "n is ''"},
      {"8,16, 16", "k is ' 16'"},
      {"-8,16,16", "m is '-8'"},
      {"8.0,16,16", "m is '8.0'"},
      {"1e3,16,16", "m is '1e3'"},
      {"0x10,16,16", "m is '0x10'"},
      {"99999999999999999999,16,16", "m is '99999999999999999999'"},
      {"0,16,16", "m (tokens) is 0"},
      {"8,20,16", "n (out_features) is 20"},
      {"8,16,0", "k (in_features) is 0"},
      {"8,16,2147483648", "k is '2147483648': not a number of at most 2^30"},
      {"1:8,16,16", "m is '1:8': a range has three parts"},
      {"1:8:2:2,16,16", "a range has three parts"},
      {"::,16,16", "m is '::'"},
      {"1:8:,16,16", "not numbers"},
      {"1:8:x,16,16", "not numbers"},
      {"1:8:X2,16,16", "not numbers"},
      {"0:8:x2,16,16", "starts below 1"},
      {"8:1:1,16,16", "starts above its end"},
      {"1:8:0,16,16", "never reaches its end"},
      {"1:8:x1,16,16", "never reaches its end"},
      {"1:8:x0,16,16", "never reaches its end"},
      {"1:8:-1,16,16", "not numbers"},
      {"1,16:64:8,16", "n (out_features) is 24"},
      {"1:1073741824:1,16,16", "too many values"},
      {"1:1000:1,16:16000:16,16:16000:16", "more than 100000 shapes"},
      {"1:60000:1,16,16;1:60000:1,32,16", "more than 100000 shapes"},
  };
  for (const auto& [text, reason] : kCases) {
    const auto parsed = parse_shapes(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(parsed.error().message.find(reason), std::string::npos)
        << text << ": " << parsed.error().message;
  }
}

}  // namespace
}  // namespace f8
