#include "tools/float8-tune/bench/measured_gemms.hpp"

#include "base/file.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"

namespace f8::cli {
namespace {

using tuner::MeasuredGemm;

// Reads one source: "builtin", a database, or a .jsonl file of `db export`, which "-" reads from
// standard input.
Result<std::vector<MeasuredGemm>> gemms_in(const std::string& source) {
  if (source.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "an empty name; give builtin, databases or .jsonl files, separated by commas");
  }
  if (source == "builtin") {
    const tuning_db::Database database = F8_TRY(tuning_db::Database::builtin());
    return tuner::measured_gemms(database);
  }
  if (!source.ends_with(".jsonl") && !is_standard_stream(source)) {
    const tuning_db::Database database =
        F8_TRY(tuning_db::Database::open(source, tuning_db::OpenMode::kReadOnly));
    return tuner::measured_gemms(database);
  }
  const fs::path folder =
      F8_TRY(make_temp_directory(fs::temp_directory_path(), "float8-cost-model-"));
  auto gemms = [&]() -> Result<std::vector<MeasuredGemm>> {
    tuning_db::Database database =
        F8_TRY(tuning_db::Database::open(folder / "t.f8db", tuning_db::OpenMode::kCreate));
    const std::string text = F8_TRY(read_input(source, tuning_db::kMaxImportBytes));
    F8_TRY(database.import_jsonl(text, input_name(source)));
    return tuner::measured_gemms(database);
  }();
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return gemms;
}

}  // namespace

Result<std::vector<MeasuredGemm>> gemms_of(const char* option, const std::string& list) {
  std::vector<MeasuredGemm> all;
  for (const std::string& source : items_of(list)) {
    for (MeasuredGemm& gemm : F8_TRY(of_option(option, gemms_in(source)))) {
      all.push_back(std::move(gemm));
    }
  }
  if (all.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: no GEMM with two or more timed configurations; measure some with "
                "`float8-tune sweep --exhaustive`",
                option);
  }
  return all;
}

}  // namespace f8::cli
