#include "codegen/emit.hpp"

#include <algorithm>

#include "codegen/kernels/fingerprint_args.cuh"
#include "codegen/kernels/kernel_args.cuh"
#include "codegen/mma_text.hpp"

namespace f8::codegen {
namespace embedded {
extern const std::string_view kernel_args_cuh, ptx_cuh, matrix_tile_cuh, amax_cuh, cast_cuh,
    cast_counters_cuh, column_sums_cuh, fingerprint_cuh, fingerprint_args_cuh, tile_amax_cuh,
    scale_cuh, scale_update_cuh, quantize_cuh, quantize_rows_cuh, gemm_schedule_cuh,
    gemm_block_scales_cuh, gemm_split_cuh, gemm_epilogue_operands_cuh, gemm_traits_cuh,
    gemm_mainloop_cuh, gemm_epilogue_cuh, gemm_cuh;
}
namespace {

struct Template {
  std::string_view name;
  const std::string_view* text;
};

constexpr Template kTemplates[] = {
    {"kernel_args.cuh", &embedded::kernel_args_cuh},
    {"ptx.cuh", &embedded::ptx_cuh},
    {"matrix_tile.cuh", &embedded::matrix_tile_cuh},
    {"amax.cuh", &embedded::amax_cuh},
    {"cast.cuh", &embedded::cast_cuh},
    {"cast_counters.cuh", &embedded::cast_counters_cuh},
    {"column_sums.cuh", &embedded::column_sums_cuh},
    {"fingerprint.cuh", &embedded::fingerprint_cuh},
    {"fingerprint_args.cuh", &embedded::fingerprint_args_cuh},
    {"tile_amax.cuh", &embedded::tile_amax_cuh},
    {"scale.cuh", &embedded::scale_cuh},
    {"scale_update.cuh", &embedded::scale_update_cuh},
    {"quantize.cuh", &embedded::quantize_cuh},
    {"quantize_rows.cuh", &embedded::quantize_rows_cuh},
    {"gemm_schedule.cuh", &embedded::gemm_schedule_cuh},
    {"gemm_block_scales.cuh", &embedded::gemm_block_scales_cuh},
    {"gemm_split.cuh", &embedded::gemm_split_cuh},
    {"gemm_epilogue_operands.cuh", &embedded::gemm_epilogue_operands_cuh},
    {"gemm_traits.cuh", &embedded::gemm_traits_cuh},
    {"gemm_mainloop.cuh", &embedded::gemm_mainloop_cuh},
    {"gemm_epilogue.cuh", &embedded::gemm_epilogue_cuh},
    {"gemm.cuh", &embedded::gemm_cuh},
};

// The text of a template with its includes in place, each once.
void append_template(std::string_view name, std::vector<std::string_view>& seen, std::string& out) {
  if (std::ranges::find(seen, name) != seen.end()) return;
  seen.push_back(name);
  const auto found = std::ranges::find(kTemplates, name, &Template::name);
  std::string_view text = *found->text;
  out += f8::format("// ---- {}\n", name);
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1);
    const std::string_view line = text.substr(0, end + 1);
    text.remove_prefix(end + 1);
    constexpr std::string_view kInclude = "#include \"";
    if (line.starts_with(kInclude)) {
      append_template(line.substr(kInclude.size(), line.rfind('"') - kInclude.size()), seen, out);
    } else if (!line.starts_with("#pragma once")) {
      out += line;
    }
  }
}

const char* input_name(Dtype in, bool from_f32 = false) {
  if (from_f32) return in == Dtype::kF16 ? "Input::kF32AsF16" : "Input::kF32AsBf16";
  return in == Dtype::kF32 ? "Input::kF32" : in == Dtype::kF16 ? "Input::kF16" : "Input::kBf16";
}

const char* scale_name(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kTensor:
      return "Scale::kTensor";
    case ScaleMode::kAxis:
      return "Scale::kAxis";
    case ScaleMode::kBlock1x128:
      return "Scale::kBlock1x128";
    case ScaleMode::kBlock128x128:
      return "Scale::kBlock128x128";
  }
  return "";
}

std::string constant(std::string_view type, std::string_view name, std::string_view value) {
  return f8::format("  static constexpr {} {} = {};\n", type, name, value);
}
std::string constant(std::string_view name, int value) {
  return constant("int", name, fmt::to_string(value));
}
std::string constant(std::string_view name, bool value) {
  return constant("bool", name, value ? "true" : "false");
}

// Asserts a value that the host restates: a stub whose template disagrees does not compile. `host`
// names the place that restates it.
std::string check(std::string_view device, size_t value, std::string_view host) {
  return f8::format("static_assert({} == {}, \"{} on the host\");\n", device, value, host);
}
template <class Args>
std::string check_args(std::string_view name) {
  return check(f8::format("sizeof({})", name), sizeof(Args), "kernel_args.cuh");
}
std::string check_threads(std::string_view device, const KernelSpec& spec) {
  return check(device, static_cast<size_t>(threads_per_block(spec)), "threads_per_block()");
}

std::string check_gemm(const GemmSpec& s) {
  const GemmConfig& c = s.config;
  const auto of_traits = [](std::string_view name, int value, std::string_view host) {
    return check(f8::format("GemmTraits<Config>::{}", name), static_cast<size_t>(value), host);
  };
  return check_args<kernels::GemmArgs>("GemmArgs") +
         check_threads("GemmTraits<Config>::kThreads", s) +
         of_traits("kSharedBytes", dynamic_smem_bytes(s), "dynamic_smem_bytes()") +
         of_traits("kOutRowBytes", out_row_bytes(s), "out_row_bytes()") +
         of_traits("kAccumulators", gemm_accumulators(s), "gemm_accumulators()") +
         of_traits("Schedule::kClusterSize", c.cluster_m * c.cluster_n * c.split_k,
                   "the cluster's size");
}

// True where the cast, which takes more registers than others, has four blocks an SM without
// spills.
bool fits_four_blocks(const CastSpec& s) {
  return memory_type(s) != Dtype::kF32 && has_scale(s, ScaleMode::kBlock1x128) &&
         !has_scale(s, ScaleMode::kBlock128x128) && !s.count && !s.sums;
}

struct Stub {
  std::string_view file;  // the template that it instantiates
  std::string entry;
  std::string text;
};

// True where the epilogue rounds first and multiplies by the scales in bf16, two values at a time:
// scales are powers of two, but promoted sums of smaller tiles would lose by it.
bool scales_in_bf16(const GemmSpec& s) {
  return s.pow2 && (s.fast || s.config.tile_m * s.config.tile_n >= 128 * 256);
}

struct StubOf {
  Stub operator()(const AmaxSpec& s) const {
    Stub stub{"amax.cuh", "float8_amax", {}};
    stub.text = "struct Config {\n" + constant("Input", "kInput", input_name(s.in, s.from_f32)) +
                constant("kTensor", s.tensor) + constant("kRow", s.row) + constant("kCol", s.col) +
                constant("kBlock", s.block) + constant("kNoopFlag", s.noop_flag) + "};\n" +
                (s.list ? check_args<kernels::AmaxListArgs>("AmaxListArgs")
                        : check_args<kernels::AmaxArgs>("AmaxArgs")) +
                check_threads("kTileThreads", s) +
                f8::format(
                    "extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                    "float8_amax(const __grid_constant__ {} args) {{\n"
                    "  Amax<Config>::run(args);\n"
                    "}}\n",
                    s.list ? "AmaxListArgs" : "AmaxArgs");
    return stub;
  }

  Stub operator()(const CastSpec& s) const {
    Stub stub{"cast.cuh", "float8_cast", {}};
    if (s.one_launch) {
      stub = {scales_rows_alone(s) ? "quantize_rows.cuh" : "quantize.cuh", "float8_quantize", {}};
    }
    stub.text = "struct Config {\n" + constant("Input", "kInput", input_name(s.in, s.from_f32)) +
                constant("Fp8", "kFormat", s.out == Dtype::kE4m3 ? "Fp8::kE4m3" : "Fp8::kE5m2") +
                constant("Scale", "kScaleQ", scale_name(s.scale_q)) +
                constant("Scale", "kScaleQt", scale_name(s.scale_qt)) +
                constant("kDelayed", s.delayed) + constant("kRowMajor", s.q) +
                constant("kTransposed", s.qt) + constant("kPow2", s.pow2) +
                constant("kSaturate", s.saturate) + constant("kCount", s.count) +
                constant("kSums", s.sums) + constant("kNoopFlag", s.noop_flag) +
                constant("kShard", s.shard) + "};\n";
    stub.text += s.one_launch ? check_args<kernels::QuantizeArgs>("QuantizeArgs")
                 : s.list     ? check_args<kernels::CastListArgs>("CastListArgs")
                              : check_args<kernels::CastArgs>("CastArgs");
    stub.text += check_threads("kTileThreads", s);
    if (is_cooperative(s)) {
      stub.text += check("Quantize<Config>::kSharedBytes",
                         static_cast<size_t>(dynamic_smem_bytes(s)), "dynamic_smem_bytes()");
    }
    stub.text += s.one_launch
                     ? f8::format(
                           "extern \"C\" __global__ void __launch_bounds__(kTileThreads, {})\n"
                           "float8_quantize(const __grid_constant__ QuantizeArgs args) {{\n"
                           "  {}<Config>::run(args);\n"
                           "}}\n",
                           kQuantizeBlocksPerSm, scales_rows_alone(s) ? "QuantizeRows" : "Quantize")
                     : f8::format(
                           "extern \"C\" __global__ void __launch_bounds__(kTileThreads{})\n"
                           "float8_cast(const __grid_constant__ {} args) {{\n"
                           "  Cast<Config>::run(args);\n"
                           "}}\n",
                           fits_four_blocks(s) ? ", 4" : "", s.list ? "CastListArgs" : "CastArgs");
    return stub;
  }

  Stub operator()(const ScaleUpdateSpec& s) const {
    return {"scale_update.cuh", "float8_scale_update",
            check_args<kernels::ScaleUpdateArgs>("ScaleUpdateArgs") +
                check_threads("kUpdateThreads", s) +
                "extern \"C\" __global__ void __launch_bounds__(kUpdateThreads)\n"
                "float8_scale_update(const __grid_constant__ ScaleUpdateArgs args) {\n"
                "  scale_update(args);\n"
                "}\n"};
  }

  Stub operator()(const FoundInfSpec&) const {
    return {"scale_update.cuh", "float8_found_inf",
            "extern \"C\" __global__ void __launch_bounds__(kUpdateThreads)\n"
            "float8_found_inf(const __grid_constant__ FoundInfArgs args) {\n"
            "  found_inf(args);\n"
            "}\n"};
  }

  Stub operator()(const FingerprintSpec& s) const {
    return {"fingerprint.cuh", "float8_fingerprint",
            check_args<kernels::FingerprintArgs>("FingerprintArgs") +
                check_threads("kTileThreads", s) +
                "extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                "float8_fingerprint(const __grid_constant__ FingerprintArgs args) {\n"
                "  fingerprint(args);\n"
                "}\n"};
  }

  Stub operator()(const ColumnSumsSpec& s) const {
    return {"column_sums.cuh", "float8_column_sums",
            check_args<kernels::ColumnSumsArgs>("ColumnSumsArgs") +
                check_threads("kTileThreads", s) +
                f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                           "float8_column_sums(const __grid_constant__ ColumnSumsArgs args) {{\n"
                           "  column_sums<{}>(args);\n"
                           "}}\n",
                           input_name(s.in))};
  }

  Stub operator()(const BiasGradSpec& s) const {
    return {"column_sums.cuh", "float8_bias_grad",
            check_args<kernels::BiasGradArgs>("BiasGradArgs") + check_threads("kTileThreads", s) +
                f8::format("extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
                           "float8_bias_grad(const __grid_constant__ BiasGradArgs args) {{\n"
                           "  bias_grad<{}>(args);\n"
                           "}}\n",
                           input_name(s.out))};
  }

  Stub operator()(const GemmSpec& s) const {
    const GemmConfig& c = s.config;
    const GemmRegisters registers = gemm_registers(c.warpgroups);
    const GemmMma mma = gemm_mma(s);
    Stub stub{"gemm.cuh", "float8_gemm", {}};
    stub.text =
        "struct Config {\n" + constant("kTileM", c.tile_m) + constant("kTileN", c.tile_n) +
        constant("kStages", c.stages) + constant("kClusterM", c.cluster_m) +
        constant("kClusterN", c.cluster_n) + constant("kSplitK", c.split_k) +
        constant("kWarpgroups", c.warpgroups) + constant("kPingpong", c.pingpong) +
        constant("kProblems", s.problems) + constant("kConsumerRegisters", registers.consumer) +
        constant("kProducerRegisters", registers.producer) +
        constant("Scale", "kScale", scale_name(s.scale)) + "  // main loop\n" +
        constant("kShards", s.shards) + constant("kFast", s.fast) + constant("kMmaN", mma.n) +
        constant("kPromotionAccumulators", mma.promotion_accumulators) +
        mma_function(s.a, s.b, mma.n) + "  // epilogue\n" +
        constant("kFloatOutput", s.d == Dtype::kF32) + constant("kHalfOutput", s.d == Dtype::kF16) +
        constant("kBias", s.bias) + constant("kAdd", s.add) + constant("kAmax", s.amax) +
        constant("kPow2", scales_in_bf16(s)) + constant("kOutBuffers", gemm_out_buffers(s)) +
        "};\n" + check_gemm(s) +
        f8::format(
            "extern \"C\" __global__ void __launch_bounds__({}, 1)\n"
            "float8_gemm(const __grid_constant__ GemmMaps<{}> maps,\n"
            "            const __grid_constant__ GemmArgs args) {{\n"
            "  extern __shared__ __align__(1024) u8 shared[];\n"
            "  Gemm<Config>::run(maps, args, shared);\n"
            "}}\n",
            threads_per_block(s), s.problems);
    return stub;
  }
};

}  // namespace

Result<KernelSource> emit(const KernelSpec& spec) {
  F8_TRY(validate(spec));
  Stub stub = std::visit(StubOf{}, spec);
  KernelSource kernel;
  kernel.key = key(spec);
  kernel.entry = stub.entry;
  kernel.source = f8::format(
      "// {0}\n// Generated by float8 (generator {1}); re-create with: float8-tune emit --kernel "
      "{0}\n\n",
      kernel.key, kGeneratorVersion);
  std::vector<std::string_view> seen;
  append_template(stub.file, seen, kernel.source);
  kernel.source += "// ---- instantiation\nnamespace f8::kernels {\n" + stub.text +
                   "}  // namespace f8::kernels\n";
  // NVRTC's own cache would answer with an empty log, and the log is what tells spills and C75xx.
  kernel.options = {"--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v", "--no-cache"};
  return kernel;
}

}  // namespace f8::codegen
