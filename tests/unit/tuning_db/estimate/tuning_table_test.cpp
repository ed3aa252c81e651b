#include "tuning_db/estimate/tuning_table.hpp"

#include <gtest/gtest.h>

#include "base/file.hpp"
#include "base/hash.hpp"

namespace f8 {
namespace {

Problem problem(Op op, Shape shape, const char* recipe = "tensorwise") {
  return *Problem::make(op, *find_recipe(recipe), shape);
}

KernelChoice choice(Op op, Shape shape, const char* config = "128x256s4c2x1w2g8",
                    double median_ns = 1000) {
  return {problem(op, shape), {.config = parse_gemm_config(config).value()}, median_ns};
}

DeviceClass h100(int power_limit_w = 700) {
  return {.name = "NVIDIA H100 80GB HBM3",
          .cc = 90,
          .sm_count = 132,
          .l2_bytes = 52428800,
          .mem_bytes = 85017493504,
          .mem_clock_mhz = 2619,
          .sm_clock_max_mhz = 1980,
          .power_limit_w = power_limit_w};
}

TuningTable example() {
  TuningTable table;
  table.devices = {h100(), h100(500)};
  table.sources = {{"my sweep.f8db"}, {"built-in", {3, "13.0", "13.1.0"}}};
  table.add(choice(Op::kOutput, {8192, 4096, 4096}));
  table.add(choice(Op::kGradInput, {8192, 4096, 4096}, "128x128s6c1x2w2pg4", 0.1));
  table.add({problem(Op::kGradWeight, {8192, 4096, 4096}, "rowwise"),
             {Provider::kCublasLt, {}, 3},
             123456.789});
  table.add({"rowwise",
             {8192, 4096, 4096},
             1.25,
             1.24,
             1.2600000000000002,
             2e6,
             0,
             1,
             "2026-11-22",
             "e18a4bfb-d429-4cfd-9945-1aa374c7689f"});
  table.add({"rowwise", {8192, 1024, 4096}, 0.9, 0.9, 0.9, 123456.5, 1});
  return table;
}

// The table's text with `from` replaced by `to`, and the end line made to fit again.
std::string resigned(std::string_view from, std::string_view to) {
  std::string text = example().serialize();
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  text.resize(text.rfind("end "));
  return text + "end " + hash_hex(text) + "\n";
}

void expect_refused(std::string_view text, ErrorCode code, std::string_view reason) {
  const auto parsed = TuningTable::parse(text);
  ASSERT_FALSE(parsed) << text;
  EXPECT_EQ(parsed.error().code, code) << parsed.error().message;
  EXPECT_NE(parsed.error().message.find(reason), std::string::npos) << parsed.error().message;
  EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos);
}

TEST(TuningTable, GoldenText) {
  EXPECT_EQ(example().serialize(),
            "float8-table 5\n"
            "device 90 132 52428800 85017493504 2619 1980 700 0 NVIDIA H100 80GB HBM3\n"
            "device 90 132 52428800 85017493504 2619 1980 500 0 NVIDIA H100 80GB HBM3\n"
            "source 0 - - my sweep.f8db\n"
            "source 3 13.0 13.1.0 built-in\n"
            "kernel grad_input/tensorwise/e5m2.e4m3.bf16/m8192n4096k4096 generated "
            "128x128s6c1x2w2pg4 0.1\n"
            "kernel grad_weight/rowwise/e4m3.e4m3.bf16/m8192n4096k4096 cublaslt h3 123456.789\n"
            "kernel output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096 generated "
            "128x256s4c2x1w2g8 1000\n"
            "linear rowwise m8192n1024k4096 1 0.9 0.9 0.9 123456.5 0 1970-01-01 -\n"
            "linear rowwise m8192n4096k4096 0 1.25 1.24 1.2600000000000002 2000000 1 2026-11-22 "
            "e18a4bfb-d429-4cfd-9945-1aa374c7689f\n"
            "end " +
                example().hash() + "\n");
}

// A table that float8 0.1 wrote, with the five recipes' GEMMs and linears.
TEST(TuningTable, AFileOfVersion3Opens) {
  const std::string text = read_file(FLOAT8_SOURCE_DIR "/tests/fixtures/table_v3.txt").value();
  const auto table = TuningTable::parse(text);
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_EQ(table->device_name(), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(table->choices().size(), 16U);
  EXPECT_EQ(table->speedups().size(), 5U);
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Gemm gemm : kGemms) {
      if (!recipe.at(gemm).is_fp8()) continue;
      const Problem problem = Problem::make(to_op(gemm), recipe, {8192, 4096, 1024}).value();
      const KernelChoice* row = table->find(problem);
      ASSERT_NE(row, nullptr) << problem.key();
      EXPECT_EQ(config_text(row->kernel), "128x256s4c2x1w2g8");
    }
  }
}

// Version 4 differs in having no MLPs.
TEST(TuningTable, AFileOfVersion4Opens) {
  const auto table = TuningTable::parse(resigned("float8-table 5", "float8-table 4"));
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_EQ(table->speedups(), example().speedups());
  EXPECT_EQ(table->serialize(), example().serialize());
}

// MLPs are records of their own kind, beside linears and experts of the same sizes.
TEST(TuningTable, HasMlps) {
  LinearSpeedup gated = {"rowwise", {8192, 1024, 4096}, 1.2, 1.1, 1.3, 1e6};
  gated.gate = true;
  LinearSpeedup plain = gated;
  plain.gate = false;
  LinearSpeedup experts = gated;
  experts.groups = {.experts = 8, .skew = kZipf};
  TuningTable table = example();
  for (const LinearSpeedup& row : {gated, plain, experts}) table.add(row);
  EXPECT_EQ(table.speedups(), example().speedups());
  EXPECT_TRUE(table.experts().empty());
  EXPECT_EQ(table.mlps(), (std::vector{plain, gated, experts}));
  const auto parsed = TuningTable::parse(table.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed->mlps(), table.mlps());
  EXPECT_NE(
      table.serialize().find("\nmlp rowwise m8192n1024k4096gate1e8skew1 0 1.2 1.1 1.3 1000000 "),
      std::string::npos);
  TuningTable other = example();
  other.add_behind(table);
  EXPECT_EQ(other.mlps(), table.mlps());
  EXPECT_EQ(table.linears([](const LinearSpeedup& row) { return row.gate.has_value(); }).mlps(),
            table.mlps());
}

TEST(TuningTable, RoundTrips) {
  const TuningTable table = example();
  const auto parsed = TuningTable::parse(table.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed->devices, table.devices);
  EXPECT_EQ(parsed->sources, table.sources);
  EXPECT_EQ(parsed->choices(), table.choices());
  EXPECT_EQ(parsed->speedups(), table.speedups());
  EXPECT_EQ(parsed->hash(), table.hash());
  EXPECT_EQ(parsed->serialize(), table.serialize());

  const auto empty = TuningTable::parse(TuningTable().serialize());
  ASSERT_TRUE(empty) << empty.error().message;
  EXPECT_TRUE(empty->choices().empty() && empty->speedups().empty() && empty->devices.empty());
  EXPECT_EQ(empty->device_name(), "");
}

// Expert linears are records of their own kind, beside linears of the same sizes.
TEST(TuningTable, HasExpertLinears) {
  const LinearSpeedup linear = {"rowwise", {8192, 1024, 4096}, 1.2, 1.1, 1.3, 1e6};
  LinearSpeedup even = linear;
  even.groups = {.experts = 8};
  LinearSpeedup zipf = even;
  zipf.groups.skew = kZipf;
  zipf.speedup = 1.15;
  TuningTable table = example();
  for (const LinearSpeedup& row : {zipf, even}) table.add(row);
  EXPECT_EQ(table.speedups(), example().speedups());
  EXPECT_EQ(table.experts(), (std::vector{even, zipf}));
  const std::string text = table.serialize();
  EXPECT_NE(
      text.find("\nexperts rowwise e8m8192n1024k4096skew1 0 1.15 1.1 1.3 1000000 0 1970-01-01 "
                "-\nkernel "),
      std::string::npos)
      << text;
  const auto parsed = TuningTable::parse(text);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed->experts(), table.experts());
  EXPECT_EQ(parsed->serialize(), text);
  // What a table has of its own stays.
  TuningTable other = example();
  even.speedup = 1.25;
  other.add(even);
  other.add_behind(table);
  EXPECT_EQ(other.experts(), (std::vector{even, zipf}));
  expect_refused(resigned("linear rowwise m8192n1024k4096", "experts rowwise m8192n1024k4096"),
                 ErrorCode::kCorrupt, "no 'e' where due");
  expect_refused(resigned("linear rowwise m8192n1024k4096", "expertsrowwise m8192n1024k4096"),
                 ErrorCode::kCorrupt, "experts or mlp");
}

TEST(TuningTable, OrderOfAddingDoesNotMatter) {
  TuningTable reversed;
  reversed.devices = example().devices;
  reversed.sources = example().sources;
  const TuningTable table = example();
  for (size_t i = table.choices().size(); i-- > 0;) reversed.add(table.choices()[i]);
  for (size_t i = table.speedups().size(); i-- > 0;) reversed.add(table.speedups()[i]);
  EXPECT_EQ(reversed.serialize(), table.serialize());
  EXPECT_EQ(reversed.hash(), table.hash());
  reversed.devices[0].name += " ";
  EXPECT_NE(reversed.hash(), table.hash());
}

TEST(TuningTable, AddReplacesTheSameProblem) {
  TuningTable table = example();
  table.add(choice(Op::kOutput, {8192, 4096, 4096}, "64x256s4c1x1w1g8", 900));
  table.add({"rowwise", {8192, 1024, 4096}, 1.1, 1.0, 1.2, 1e6, 1});
  EXPECT_EQ(table.choices().size(), 3U);
  EXPECT_EQ(table.speedups().size(), 2U);
  EXPECT_EQ(table.find(problem(Op::kOutput, {8192, 4096, 4096}))->median_ns, 900);
  EXPECT_EQ(table.speedups()[0].speedup, 1.1);
}

TEST(TuningTable, WhatLiesBehindFillsTheGaps) {
  TuningTable table;
  table.devices = {h100(500)};
  table.sources = {{"my sweep.f8db"}};
  table.add(choice(Op::kOutput, {8192, 4096, 4096}, "64x256s4c1x1w1g8", 900));
  table.add({"rowwise", {8192, 1024, 4096}, 1.1, 1.0, 1.2, 1e6});
  table.add_behind(example());
  EXPECT_EQ(table.devices, (std::vector<DeviceClass>{h100(500), h100()})) << "the own one first";
  ASSERT_EQ(table.sources.size(), 2U);
  EXPECT_EQ(table.sources[0], (TableSource{"my sweep.f8db"})) << "without versions";
  EXPECT_EQ(table.sources[1], example().sources[1]);
  EXPECT_EQ(table.choices().size(), 3U);
  EXPECT_EQ(table.find(problem(Op::kOutput, {8192, 4096, 4096}))->median_ns, 900);
  ASSERT_EQ(table.speedups().size(), 2U);
  EXPECT_EQ(table.speedups()[0].speedup, 1.1) << "the class's own row stays";
  EXPECT_EQ(table.speedups()[1].device, 1U);
  EXPECT_EQ(table.speedups()[1].source, 1U);
  const auto parsed = TuningTable::parse(table.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message;
  TuningTable copy;
  copy.add_behind(example());
  EXPECT_EQ(copy.serialize(), example().serialize());
}

TEST(TuningTable, TheNearestClassIsTaken) {
  const auto of = [](DeviceClass device) {
    TuningTable table;
    table.devices = {std::move(device)};
    return table;
  };
  DeviceClass pcie = h100(350);
  pcie.name = "NVIDIA H100 PCIe";
  pcie.sm_count = 114;
  pcie.mem_clock_mhz = 1593;
  DeviceClass next = h100();
  next.name = "NVIDIA B200";
  next.cc = 100;
  const std::vector<TuningTable> tables = {of(h100()), of(pcie), of(next), TuningTable{}};
  const auto nearest = [&](const DeviceClass& device) {
    const TuningTable* table = nearest_table(tables, device);
    return table == nullptr ? std::string_view("none") : table->device_name();
  };
  EXPECT_EQ(nearest(h100()), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(nearest(h100(350)), "NVIDIA H100 80GB HBM3") << "the name comes first";
  EXPECT_EQ(nearest(pcie), "NVIDIA H100 PCIe");
  DeviceClass h200 = h100();
  h200.name = "NVIDIA H200";
  h200.mem_clock_mhz = 3201;
  EXPECT_EQ(nearest(h200), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(nearest({.name = "emulated", .cc = 90, .sm_count = 132}), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(nearest({.name = "emulated", .cc = 90, .sm_count = 110}), "NVIDIA H100 PCIe");
  EXPECT_EQ(nearest({.name = "old", .cc = 80, .sm_count = 108}), "none");
  EXPECT_EQ(nearest_table({}, h100()), nullptr);
}

TEST(TuningTable, FindsTheExactProblemAndThoseNearIt) {
  TuningTable table;
  table.add(choice(Op::kOutput, {4096, 4096, 4096}, "64x64s4c1x1w1g1"));
  table.add(choice(Op::kOutput, {8192, 4096, 4096}, "64x64s4c1x1w1g2"));
  table.add(choice(Op::kGradInput, {1024, 4096, 4096}, "64x64s4c1x1w1g3"));
  const auto name = [](const KernelChoice& row) -> std::string {
    constexpr const char* kNames[] = {"near", "exact", "otherop"};
    return kNames[row.kernel.config.raster_group - 1];
  };
  const auto config = [&](const Problem& p) {
    const KernelChoice* found = table.find(p);
    return found == nullptr ? std::string("none") : name(*found);
  };
  const auto neighbours = [&](const Problem& p, size_t most = 8) {
    std::string names;
    for (const auto& [near, octaves] : table.neighbours(p, most)) {
      names += f8::format("{} {:.2f} ", name(*near), octaves);
    }
    return names;
  };
  EXPECT_EQ(config(problem(Op::kOutput, {8192, 4096, 4096})), "exact");
  EXPECT_EQ(config(problem(Op::kOutput, {16384, 4096, 4096})), "none");
  EXPECT_EQ(neighbours(problem(Op::kOutput, {8192, 4096, 4096})), "near 1.00 ");
  EXPECT_EQ(neighbours(problem(Op::kOutput, {16384, 4096, 4096})), "exact 1.00 near 2.00 ");
  EXPECT_EQ(neighbours(problem(Op::kOutput, {16384, 4096, 4096}), 1), "exact 1.00 ");
  EXPECT_EQ(neighbours(problem(Op::kOutput, {2048, 2048, 8192})), "near 1.73 exact 2.45 ");
  // Another recipe, type or accumulation is another kernel; a bias is not.
  Problem other = problem(Op::kOutput, {8192, 4096, 4096});
  const auto expect_unknown = [&](const Problem& p) {
    EXPECT_EQ(config(p), "none") << p.key();
    EXPECT_EQ(neighbours(p), "") << p.key();
  };
  expect_unknown(problem(Op::kOutput, {8192, 4096, 4096}, "rowwise"));
  expect_unknown(problem(Op::kGradWeight, {8192, 4096, 4096}));
  other.d = Dtype::kF32;
  expect_unknown(other);
  other = problem(Op::kOutput, {8192, 4096, 4096});
  other.fast = false;
  expect_unknown(other);
  other = problem(Op::kOutput, {8192, 4096, 4096});
  other.bias = true;
  EXPECT_EQ(config(other), "exact");
}

TEST(TuningTable, EveryTruncationIsRefused) {
  const std::string text = example().serialize();
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(TuningTable::parse(text.substr(0, length))) << length;
  }
  const std::string_view view = text;
  expect_refused(view.substr(0, 14), ErrorCode::kCorrupt, "truncated: its first line");
  expect_refused(view.substr(0, 100), ErrorCode::kCorrupt, "truncated: its last line");
  expect_refused(view.substr(0, text.rfind("end ")), ErrorCode::kCorrupt,
                 "truncated: its last line");
  expect_refused(view.substr(0, text.size() - 1), ErrorCode::kCorrupt, "truncated: its last line");
}

TEST(TuningTable, EveryChangedByteIsRefused) {
  const std::string text = example().serialize();
  for (size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(TuningTable::parse(changed)) << i;
  }
}

TEST(TuningTable, EachKindOfDamageHasItsOwnMessage) {
  const std::string text = example().serialize();
  expect_refused("", ErrorCode::kCorrupt, "not a float8 tuning table");
  expect_refused("SQLite format 3", ErrorCode::kCorrupt, "not a float8 tuning table");
  expect_refused(resigned("float8-table 5", "float8-table 2"), ErrorCode::kUnsupported,
                 "export it again");
  expect_refused(resigned("float8-table 5", "float8-table 6"), ErrorCode::kUnsupported,
                 "use the newer float8");
  expect_refused(resigned("float8-table 5", "float8-table 01"), ErrorCode::kUnsupported,
                 "version '01'");
  std::string changed = text;
  changed.replace(changed.find("8 1000\n"), 6, "8 1001");
  expect_refused(changed, ErrorCode::kCorrupt, "changed or damaged");
  expect_refused(text + "\n", ErrorCode::kCorrupt, "goes on after its 'end' line");
  expect_refused(text + "linear rowwise m1n16k16 0 1 1 1 1 0 1970-01-01 -\n", ErrorCode::kCorrupt,
                 "goes on after its 'end' line");
}

TEST(TuningTable, WellSignedNonsenseIsRefusedWithItsLine) {
  const auto refused = [](std::string_view from, std::string_view to, std::string_view reason) {
    expect_refused(resigned(from, to), ErrorCode::kCorrupt, reason);
  };
  refused("device ", "devize ", "line 2: it is no kernel");
  refused("device 90 ", "device x ", "line 2: cc 'x'");
  refused("device 90 ", "device -9 ", "line 2: cc '-9'");
  refused("700 0 NVIDIA", "700 2 NVIDIA", "line 2: mig '2'");
  refused("700 0 NVIDIA H100 80GB HBM3", "700 0", "line 2: a device has 10 fields");
  refused("source 3 13.0 13.1.0 built-in\n", "", "line 9: source '1'");
  refused("source 3 13.0 13.1.0 built-in\n", "source 3 13.0 13.1.0 \n", "line 5: source ''");
  refused("source 3 13.0 13.1.0 built-in\n", "source 3 13.0 13.1.0\n",
          "line 5: a source has 5 fields");
  refused("source 3 13.0", "source x 13.0", "line 5: generator 'x'");
  refused("3 13.0 13.1.0 ", "3 13.0  ", "line 5: cuBLASLt ''");
  refused("kernel grad_input", "kernal grad_input", "line 6: it is no kernel");
  refused(" generated", "  generated", "line 6: it has 6 fields");
  refused(" 0.1\n", "\n", "line 6: it has 4 fields");
  refused("grad_input/tensorwise", "grad_input/tensorwise/", "line 6: problem '");
  refused("grad_input/tensorwise", "linear/tensorwise", "line 6: a linear as a whole");
  refused("generated", "magic", "line 6: unknown provider 'magic'");
  refused("128x128s6c1x2w2pg4", "128X128", "line 6: GEMM configuration '128X128'");
  refused("h3", "128x256s4c2x1w2g8", "line 7: cublaslt config '128x256s4c2x1w2g8'");
  refused("h3", "h03", "in another way");
  for (const char* number : {"0", "-1", "nan", "inf", "1e999", "0x10", "1000ns", "", "1,5"}) {
    refused("1000\n", std::string(number) + "\n", "line 8: median_ns '");
  }
  refused("0.9 0.9 0.9", "0.9 0.9", "line 9: it has 10 fields");
  refused("m8192n1024k4096 1 ", "m8192n1024k4096 2 ", "line 9: device '2'");
  refused("0.9 123456.5", "0.9 -1", "line 9: bf16_ns '-1'");
  refused("1970-01-01", "1970-1-01", "line 9: date '1970-1-01'");
  refused("1970-01-01 -", "1970-01-01 A", "line 9: trial 'A'");
  refused("linear rowwise m8192n1024k4096", "linear Rowwise m8192n1024k4096", "line 9: recipe");
  refused("linear rowwise m8192n1024k4096", "linear rowwise m8192n1024k4095", "line 9: k (in");
  refused("0.9 0.9 0.9", "0.9 0.9 0.8", "line 9: lo 0.9");
  refused("linear rowwise m8192n1024", "linear rowwise m8192n8192", "line 10: not in sorted order");
  refused("\nlinear", "\n\nlinear", "line 9: it is no kernel");
  refused("\nlinear", "\nsource 0 - - late\nlinear", "line 9: it is no kernel");
  // Another spelling of the same value is another hash: refused, or ranks could differ.
  refused("1000\n", "1000.0\n", "in another way");
  refused("1000\n", "1e3\n", "in another way");
}

TEST(TuningTable, ARepeatedProblemIsRefused) {
  expect_refused(resigned("linear rowwise m8192n4096k4096 0", "linear rowwise m8192n1024k4096 1"),
                 ErrorCode::kCorrupt, "repeats a problem");
}

TEST(TuningTable, ADeviceNameCannotSmuggleALine) {
  TuningTable table = example();
  table.devices[0].name = "H100\nkernel x";
  EXPECT_FALSE(TuningTable::parse(table.serialize()));
}

}  // namespace
}  // namespace f8
