// db diff: what one database has and another has not. compare tells their times apart.
#include <memory>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tuning_db/compare/diff.hpp"

namespace f8::cli {
namespace {

using tuning_db::DiffRecord;
using tuning_db::KindDiff;

struct DbDiffOptions {
  std::filesystem::path a, b;
  int64_t limit = 5;
};

Json records_json(const std::vector<DiffRecord>& records) {
  Json json = Json::array();
  for (const DiffRecord& record : records) {
    json.push_back({{"key", record.key}, {"text", record.text}});
  }
  return json;
}

Json to_json(const std::vector<KindDiff>& kinds, const DbDiffOptions& options) {
  Json json = {
      {"a", options.a.string()}, {"b", options.b.string()}, {"equal", true}, {"kinds", {}}};
  for (const KindDiff& kind : kinds) {
    if (!kind.only_a.empty() || !kind.only_b.empty() || !kind.changed.empty()) {
      json["equal"] = false;
    }
    json["kinds"][kind.kind] = {{"in_a", kind.in_a},
                                {"in_b", kind.in_b},
                                {"only_a", records_json(kind.only_a)},
                                {"only_b", records_json(kind.only_b)},
                                {"changed", records_json(kind.changed)}};
  }
  return json;
}

void print_records(const std::string& title, const std::vector<DiffRecord>& records, size_t limit) {
  if (records.empty() || limit == 0) return;
  print(f8::format("\n{}\n", title));
  for (size_t i = 0; i < records.size() && i < limit; ++i) {
    print(f8::format("  {}  {}\n", records[i].key, records[i].text));
  }
  if (records.size() > limit) {
    print(f8::format("  and {} more; --limit shows them\n", records.size() - limit));
  }
}

void print_text(const std::vector<KindDiff>& kinds, const DbDiffOptions& options, bool color) {
  Table table({{"kind", Table::Align::kLeft},
               {"in A"},
               {"in B"},
               {"only in A"},
               {"only in B"},
               {"changed"}});
  for (const KindDiff& kind : kinds) {
    table.add({kind.kind, f8::format("{}", kind.in_a), f8::format("{}", kind.in_b),
               f8::format("{}", kind.only_a.size()), f8::format("{}", kind.only_b.size()),
               f8::format("{}", kind.changed.size())});
  }
  print(f8::format("A {}\nB {}\n", options.a.string(), options.b.string()));
  print_styled(table.text(color));
  const auto limit = static_cast<size_t>(options.limit);
  for (const KindDiff& kind : kinds) {
    print_records("only in A: " + kind.kind, kind.only_a, limit);
    print_records("only in B: " + kind.kind, kind.only_b, limit);
    print_records("changed: " + kind.kind, kind.changed, limit);
  }
}

Result<int> diff(const DbDiffOptions& options, const Global& global) {
  const auto a = F8_TRY(open_named_database(options.a));
  const auto b = F8_TRY(open_named_database(options.b));
  const std::vector<KindDiff> kinds = F8_TRY(tuning_db::diff(a, b));
  if (global.json) {
    print_json(to_json(kinds, options));
  } else {
    print_text(kinds, options, stdout_color(global));
  }
  return kExitOk;
}

}  // namespace

void add_db_diff(CLI::App& group, Program& program) {
  auto options = std::make_shared<DbDiffOptions>();
  CLI::App* command =
      add_command(group, program, "diff", "what one database has and another has not",
                  Needs::kNothing, [options, &program] { return diff(*options, program.global); });
  refuse_db(*command, "diff takes both databases as arguments: `float8-tune db diff A B`");
  command->add_option("a", options->a, "a database; built-in is the one that ships")
      ->required()
      ->type_name("FILE");
  command->add_option("b", options->b, "another one")->required()->type_name("FILE");
  add_integer(*command, "--limit", options->limit, "how many records of a kind to list", 0,
              1'000'000);
  command->footer(
      "A decision is the kernel that a database chooses for a GEMM. `float8-tune compare` "
      "compares the times.");
}

}  // namespace f8::cli
