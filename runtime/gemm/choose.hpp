// The choice of a GEMM's kernel: by the tuning table's row of this shape, else by the cost model and
// the kernels of the rows nearest to it. Deterministic; no GPU needed.
#pragma once

#include "runtime/gemm/k_grouped.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::runtime {

// `table` may be null: there is none. GemmChoice::why gives the reason.
[[nodiscard]] Result<GemmChoice> choose_gemm(const TuningTable* table, const GemmDesc& desc,
                                             int sm_count);

// The same of a grouped GEMM, of which a plan knows the size and not the skew: the table's row of as many
// experts and this shape decides, that of the most even routing where there are several. Else the cost
// model's choice leans on the rows nearest to it and on the winners of known models.
[[nodiscard]] Result<GemmChoice> choose_grouped(const TuningTable* table, const GroupedDesc& desc,
                                                int sm_count);
// The spec of a grouped GEMM without a configuration, and the one GEMM that the cost model takes for all
// of its groups.
[[nodiscard]] codegen::GemmSpec grouped_spec(const GemmDesc& desc);
[[nodiscard]] Shape grouped_shape(const GroupedDesc& desc);

// How often this process has chosen: what tests of planning count.
[[nodiscard]] uint64_t chosen_gemms();

// Reads a table, and checks that each row's configuration is one that can be compiled for the row's
// own GEMM: an error names the line (kCorrupt), and no layer finds it later.
[[nodiscard]] Result<TuningTable> parse_table(std::string_view text);

}  // namespace f8::runtime
