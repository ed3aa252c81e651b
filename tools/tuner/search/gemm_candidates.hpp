// Which candidates a GEMM's tuning looks at: all legal generated configurations, ranked by the cost
// model, of which the best are measured and the others pruned with their bound as the reason; and
// all of cuBLASLt's suggestions, always, so that tuning cannot lose to the library.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "codegen/kernel_spec.hpp"
#include "runtime/device/context.hpp"
#include "tools/tuner/backend/backend.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

// The product that a problem is, in its recipe's fp8 types or, as its bf16 twin, in bf16.
// kUnsupported where there is none: a linear; in fp8 a GEMM that the recipe leaves in bf16, or
// scales that no kernel has.
[[nodiscard]] Result<runtime::GemmDesc> gemm_desc(const Problem& problem, bool bf16,
                                                  const Epilogue& epilogue = {});
// The same types and accumulation with one scale for each operand.
[[nodiscard]] Problem with_one_scale(Problem problem);
// The kernel family that a problem needs; its config is not set.
[[nodiscard]] Result<codegen::GemmSpec> gemm_spec(const Problem& problem,
                                                  const Epilogue& epilogue = {});

struct Generated {
  codegen::GemmSpec spec;
  double predicted_ns = 0;
  std::string pruned;  // why it is not measured; empty: it is
};
// Best first by the model. `keep` are measured, and those of `also` that are generated.
[[nodiscard]] Result<std::vector<Generated>> generated_candidates(
    const Problem& problem, const runtime::DeviceInfo& device, int keep,
    std::span<const runtime::GemmChoice> also = {}, const Epilogue& epilogue = {});

// What a plan takes without a search, each once: the cost model's choice, the table's.
[[nodiscard]] Result<std::vector<runtime::GemmChoice>> prior_choices(
    const Problem& problem, const runtime::DeviceInfo& device, const TuningTable& table);

// Problems with one identity are one product for the device, whatever linear it came from: they are
// measured once.
[[nodiscard]] std::string gemm_identity(const Problem& problem, bool bf16);

// As the database keeps a candidate, and back.
[[nodiscard]] tuning_db::Candidate to_candidate(const Subject& subject, std::string source_hash);
[[nodiscard]] Subject to_subject(const runtime::GemmChoice& choice);
[[nodiscard]] Result<runtime::GemmChoice> to_choice(const Subject& subject);  // of a GEMM
[[nodiscard]] Result<Subject> to_subject(const tuning_db::Candidate& candidate);

// As a linear's row keeps its kernels.
[[nodiscard]] tuning_db::LinearKernels linear_kernels(const LinearChoices& choices);

// The device that plans are made for where there is none: an H100 SXM with 80 GB.
[[nodiscard]] runtime::DeviceInfo h100();
[[nodiscard]] tuning_db::DeviceClass device_class(const runtime::DeviceInfo& device);

// A rough time of a linear's forward and backward, for predicting how long a sweep takes: operands
// at the rates that an H100 sustains.
[[nodiscard]] double rough_linear_ns(Shape shape, bool fp8);

}  // namespace f8::tuner
