// A candidate is what a trial times: a kernel of a GEMM, a whole linear under a choice of kernels,
// a way to cast a list of weights, or a way to compute and cast a tensor. Its text goes to the worker
// process, and that of GEMMs and linears into the database.
//
// impl   := "generated"             a generated kernel of a GEMM
//         | "generated+" epilogue   the same with an epilogue that does more than scale and write
//         | "cublaslt"              cuBLASLt in the recipe's types and scales
//         | "cublaslt_tensorwise"   cuBLASLt in the recipe's types with one scale for each operand
//         | "bf16_cublaslt"         cuBLASLt in bf16; of a grouped GEMM, a call for each group
//         | "float8"                a linear, an expert linear or an MLP, forward and backward; attention, or one of both
//         | "float8_reused"         the same with fp8 copies of the weight that exist already
//         | "bf16"                  a linear of three bf16 GEMMs, the baseline; of experts each is a
//                                   generated grouped GEMM or, by cuBLASLt, a call for each group; an MLP
//                                   of such linears, where copies move what its activation would; attention is
//                                   cuDNN's
//         | "cast_list"             all weights of a list cast in few launches
//         | "cast_each"             the same weights cast one after the other
//         | "produce"               a tensor that a cast computes as it reads its operands
//         | "produce_apart"         the cast of such a tensor behind a copy that moves what computing it in bf16 moves
//         | "copy"                  a copy on the device
// config := GEMM config             a generated kernel's
//         | "h" INT                 cuBLASLt's: the index of its suggestion
//         | choice "," choice "," choice   a linear's: output, grad_input, grad_weight; an MLP's: those of up,
//                                   which gate has too, and of down
//         | ""                      the others'
// choice := "generated:" config | "cublaslt:" config
// epilogue := part ("+" part)*      each part once
// part   := "bias" | "amax" | "add"
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/context.hpp"
#include "runtime/experts/experts.hpp"
#include "runtime/gemm/gemm.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

enum class Impl : uint8_t {
  kGenerated,
  kCublasLt,
  kCublasLtTensorwise,
  kBf16CublasLt,
  kFloat8,
  kFloat8Reused,
  kBf16,
  kCastList,
  kCastEach,
  kProduce,
  kProduceApart,
  kCopy
};
[[nodiscard]] std::string_view to_string(Impl impl);

// The work of a GEMM's epilogue besides scaling and writing; `add` adds to what the result holds.
struct Epilogue {
  bool bias = false, amax = false, add = false;
  bool operator==(const Epilogue&) const = default;
};
[[nodiscard]] std::string to_string(const Epilogue& epilogue);  // "plain" where it does nothing
[[nodiscard]] Result<Epilogue> parse_epilogue(std::string_view text);

struct Candidate {
  Impl impl = Impl::kGenerated;
  std::string config{};  // {}: so that designated initialisers may leave members out
  Epilogue epilogue{};   // a generated kernel's
  bool operator==(const Candidate&) const = default;
};
[[nodiscard]] std::string impl_text(const Candidate& candidate);
[[nodiscard]] Result<Candidate> parse_candidate(std::string_view impl, std::string config);

using LinearChoices = std::array<runtime::GemmChoice, 3>;  // indexed by Gemm
[[nodiscard]] std::string choices_text(const LinearChoices& choices);
[[nodiscard]] Result<LinearChoices> parse_choices(std::string_view text);

struct MlpChoices {
  LinearChoices up, down;  // gate has those of up
};
[[nodiscard]] std::string choices_text(const MlpChoices& choices);
[[nodiscard]] Result<MlpChoices> parse_mlp_choices(std::string_view text);

// The GEMM that a problem is, in its recipe's fp8 types or, as its baseline, in bf16. kUnsupported
// where there is none: for a linear, and in fp8 for a GEMM that the recipe leaves in bf16 and for
// scales that no kernel has.
[[nodiscard]] Result<runtime::GemmDesc> gemm_desc(const Problem& problem, bool bf16,
                                                  const Epilogue& epilogue = {});
// The same types and accumulation with one scale for each operand.
[[nodiscard]] Problem with_one_scale(Problem problem);
// The expert linear that a problem is, or is a GEMM of: the recipe's own, with bf16 results.
[[nodiscard]] Result<runtime::ExpertsDesc> experts_desc(const Problem& problem);
// The grouped GEMM that a problem is.
[[nodiscard]] Result<runtime::GroupedDesc> grouped_desc(const Problem& problem);
// The same in bf16, of the baseline.
[[nodiscard]] Result<runtime::GroupedDesc> grouped_bf16_desc(const Problem& problem);
// The kernel family that a problem needs; its config is not set.
[[nodiscard]] Result<codegen::GemmSpec> gemm_spec(const Problem& problem,
                                                  const Epilogue& epilogue = {});
// Problems with one identity are the same GEMM for the device, whatever linear they come from, and
// are measured once.
[[nodiscard]] std::string gemm_identity(const Problem& problem, bool bf16);

[[nodiscard]] Candidate to_candidate(const runtime::GemmChoice& choice);
[[nodiscard]] Result<runtime::GemmChoice> to_choice(const Candidate& candidate);  // of a GEMM
// A candidate as the database keeps it, and back.
[[nodiscard]] tuning_db::Candidate to_row(const Candidate& candidate, std::string source_hash);
[[nodiscard]] Result<Candidate> from_row(const tuning_db::Candidate& row);
// The kernels of a linear as its row keeps them.
[[nodiscard]] std::vector<tuning_db::PartKernel> part_kernels(const LinearChoices& choices);
[[nodiscard]] std::vector<tuning_db::PartKernel> part_kernels(const MlpChoices& choices);

// The device that plans are made for where there is none: an H100 SXM with 80 GB.
[[nodiscard]] runtime::DeviceInfo h100();

}  // namespace f8::tuner
