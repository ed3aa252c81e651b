// Groups of linears of one x: calls and plans that are refused, and memory that is not taken.
#include <functional>

#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/lists/linear_group_fixture.hpp"

namespace f8::runtime {
namespace {

using namespace testing;  // NOLINT: the fixture's names

class LinearGroupMisuse : public LinearGroupTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearGroupMisuse,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise", "bf16"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearGroupMisuse, RunDoesNotAllocate) {
  const Trio trio(cuda_, GetParam(), true, NonFinite::kPropagate);
  Tensors to(trio, 9);
  const auto linears = members(trio, to, {});
  Buffer workspace(trio.group->workspace_bytes()), saved(trio.group->saved_bytes());
  const LinearGroupCall call{.m = kM,
                             .x = {to.x.data()},
                             .dx = {to.dx.data()},
                             .linears = linears.data(),
                             .count = linears.size(),
                             .saved = {saved.data()},
                             .step = &kFirstOfSteps};
  cuda_.emulate = false;
  bool ok = false;
  int allocations = 0;
  {
    const CountAllocations counting;
    ok = trio.group->forward(with_workspace(call, workspace.data()), nullptr).has_value() &&
         trio.group->backward(with_workspace(call, workspace.data()), nullptr).has_value();
    allocations = counting.count();
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0);
}

TEST_P(LinearGroupMisuse, BadArgumentsLeaveNothingEnqueued) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  Tensors to(trio, 10);
  Buffer workspace(trio.group->workspace_bytes()), saved(trio.group->saved_bytes());
  cuda_.emulate = false;
  using Linears = std::array<GroupedLinearCall, 3>;
  const auto refused = [&](const std::function<void(LinearGroupCall&, Linears&)>& change,
                           std::string_view forward, std::string_view backward) {
    Linears linears = members(trio, to, {});
    LinearGroupCall call{.m = kM,
                         .x = {to.x.data()},
                         .dx = {to.dx.data()},
                         .count = linears.size(),
                         .saved = {saved.data()},
                         .step = &kFirstOfSteps};
    change(call, linears);
    call.linears = linears.data();
    const size_t before = cuda_.launches.size();
    const int memsets = cuda_.memsets;
    for (const auto& [part, is_forward] : {std::pair{forward, true}, {backward, false}}) {
      if (part.empty()) continue;
      const Status status =
          is_forward ? trio.group->forward(with_workspace(call, workspace.data()), nullptr)
                     : trio.group->backward(with_workspace(call, workspace.data()), nullptr);
      ASSERT_FALSE(status) << part;
      EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
      EXPECT_TRUE(says(status.error(), part)) << status.error().message;
    }
    EXPECT_EQ(cuda_.launches.size(), before) << forward;
    EXPECT_EQ(cuda_.memsets, memsets) << forward;
  };
  using Call = LinearGroupCall;
  refused([](Call& c, Linears&) { c.count = 2; }, "count is 2, the group has 3 linears",
          "count is 2, the group has 3 linears");
  refused([](Call& c, Linears&) { c.m = kM + 1; }, "float8_linear_group_args.m is 161",
          "float8_linear_group_args.m is 161");
  refused([](Call& c, Linears&) { c.x.data = nullptr; }, "float8_linear_group_args.x.data is NULL",
          "");
  refused([](Call&, Linears& l) { l[1].w.data = nullptr; },
          "float8_linear_group_args.linears[1].w.data is NULL", "");
  refused([](Call&, Linears& l) { l[2].y.data = nullptr; },
          "float8_linear_group_args.linears[2].y.data is NULL", "");
  refused([](Call&, Linears& l) { l[2].dy.data = nullptr; }, "",
          "float8_linear_group_args.linears[2].dy.data is NULL");
  refused([](Call&, Linears& l) { l[0].y.ld = 7; }, "float8_linear_group_args.linears[0].y.ld is 7",
          "");
  refused([](Call&, Linears& l) { l[1].y = l[0].y; },
          "float8_linear_group_forward: float8_linear_group_args.linears[0].y (", "");
  refused([](Call&, Linears& l) { l[2].dw = l[0].dw; }, "",
          "float8_linear_group_args.linears[0].dw (");
  refused([&](Call& c, Linears&) { c.dx.data = to.dy.data(); }, "",
          "float8_linear_group_args.dx (");
  refused([&](Call&, Linears& l) { l[1].y.data = workspace.data() + 4096; }, "workspace (", "");
  refused([&](Call&, Linears& l) { l[1].bias = l[0].w.data; },
          "float8_linear_group_args.linears[1].bias is given", "");
  const auto linears = members(trio, to, {});
  const LinearGroupCall call{
      .m = kM, .x = {to.x.data()}, .linears = linears.data(), .count = 3, .step = &kFirstOfSteps};
  EXPECT_TRUE(says(trio.group->forward(with_workspace(call, nullptr), nullptr).error(),
                   "float8_linear_group_args.workspace.data is NULL"));
}

class LinearGroupPlan : public ::testing::Test {
 protected:
  FakeCuda cuda_;
  FakeCublasLt library_;
};

TEST_F(LinearGroupPlan, RefusesLinearsThatDoNotGoTogether) {
  const auto context = cuda_.context();
  const auto linear = [&](const std::function<void(LinearDesc&)>& change) {
    LinearDesc desc = testing::describe("rowwise", {kM, 32, kK});
    desc.accumulate_grad_input = true;
    change(desc);
    return Linear::plan(context, desc).value();
  };
  const auto first = linear([](LinearDesc& d) { d.accumulate_grad_input = false; });
  const auto refused = [&](const std::function<void(LinearDesc&)>& change, ErrorCode code,
                           std::string_view part) {
    const std::vector<std::shared_ptr<const Linear>> both = {first, linear(change)};
    const auto group = LinearGroup::plan(context, both);
    ASSERT_FALSE(group) << part;
    EXPECT_EQ(group.error().code, code);
    EXPECT_TRUE(says(group.error(), part)) << group.error().message;
  };
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  refused([](LinearDesc& d) { d.shape.k = 32; }, kInvalid, "differ in k");
  refused([](LinearDesc& d) { d.shape.m = 16; }, kInvalid, "differ in m_max");
  refused([](LinearDesc& d) { d.tensor_dtype = Dtype::kF16; }, kInvalid, "differ in tensor_dtype");
  refused([](LinearDesc& d) { d.count = true; }, kInvalid, "differ in count");
  refused([](LinearDesc& d) { d.non_finite = NonFinite::kSaturate; }, kInvalid,
          "differ in non_finite");
  refused([](LinearDesc& d) { d.recompute = true; }, ErrorCode::kUnsupported,
          "linears[1] has recompute");
  refused([](LinearDesc& d) { d.recipe = find_recipe("tensorwise").value(); }, kInvalid,
          "recipes rowwise of linears[0] and tensorwise of linears[1] cast x differently");
  refused([](LinearDesc& d) { d.accumulate_grad_input = false; }, kInvalid,
          "linears[1] adds to the dx of those before it");
  refused([](LinearDesc& d) { d.needs_grad_input = false; }, kInvalid, "differ in no_grad_input");
  EXPECT_TRUE(says(LinearGroup::plan(context, {}).error(), "count is 0; 1 to 16"));
  const std::vector<std::shared_ptr<const Linear>> none = {first, nullptr};
  EXPECT_TRUE(says(LinearGroup::plan(context, none).error(), "linears[1] is NULL"));
  const std::vector<std::shared_ptr<const Linear>> many(17, first);
  EXPECT_TRUE(says(LinearGroup::plan(context, many).error(), "count is 17; 1 to 16"));
  const std::vector<std::shared_ptr<const Linear>> one = {first};
  EXPECT_TRUE(LinearGroup::plan(context, one));
  EXPECT_TRUE(says(LinearGroup::plan(cuda_.context(), one).error(), "another context's"));
}

}  // namespace
}  // namespace f8::runtime
