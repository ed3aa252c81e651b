// db: whole databases: info, check, schema, migrate, merge, export, import; diff is in db_diff.cpp
// and gc in db_gc.cpp.
#include <algorithm>
#include <memory>

#include "base/file.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/db/db_gc.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"

namespace f8::cli {
namespace {

using tuning_db::Database;
using tuning_db::OpenMode;
namespace fs = std::filesystem;

// The user's database, or the built-in one where none is named.
Result<Database> open_for_reading(const Global& global) {
  if (global.db.empty()) return Database::builtin();
  return open_user_database(global, OpenMode::kReadOnly);
}

std::string name_of(const Global& global) {
  return global.db.empty() ? "built-in" : global.db.string();
}

Result<int> info(const Global& global) {
  const Database database = F8_TRY(open_for_reading(global));
  const auto runs = F8_TRY(database.runs());
  const auto devices = F8_TRY(database.devices());
  const TuningTable table = F8_TRY(database.table());
  const Databases databases = F8_TRY(open_databases(global));
  const std::string hash = F8_TRY(merged_table(databases)).hash();
  Json json = {{"database", name_of(global)},
               {"schema_version", tuning_db::kSchemaVersion},
               {"devices", Json::array()},
               {"runs", Json::array()},
               {"kernels", table.choices().size()},
               {"linears", table.speedups().size()},
               {"table_hash", hash}};
  const auto linears_on = [&](const DeviceClass& device) {
    return std::ranges::count_if(table.speedups(), [&](const LinearSpeedup& linear) {
      return table.devices[linear.device] == device;
    });
  };
  for (const DeviceClass& d : devices) {
    json["devices"].push_back({{"name", d.name},
                               {"linears", linears_on(d)},
                               {"cc", d.cc},
                               {"sm_count", d.sm_count},
                               {"mem_bytes", d.mem_bytes},
                               {"power_limit_w", d.power_limit_w},
                               {"mig", d.mig}});
  }
  for (const tuning_db::RunInfo& run : runs) {
    json["runs"].push_back({{"uuid", run.uuid},
                            {"state", run.state},
                            {"started_at", run.started_at},
                            {"planned", run.planned},
                            {"done", run.done}});
  }
  if (global.json) {
    print_json(json);
    return kExitOk;
  }
  print(f8::format("{}: schema {}, {} kernels and {} linears in its table ({})\n", name_of(global),
                   tuning_db::kSchemaVersion, table.choices().size(), table.speedups().size(),
                   hash));
  for (const DeviceClass& d : devices) {
    print(f8::format("  device {}, {} SMs, {} W: {} linears\n", d.name, d.sm_count, d.power_limit_w,
                     linears_on(d)));
  }
  for (const tuning_db::RunInfo& run : runs) {
    print(f8::format("  run {}  {}  {}  {}/{} cells\n", run.uuid, run.started_at, run.state,
                     run.done, run.planned));
  }
  return kExitOk;
}

Result<int> check(const Global& global) {
  const Database database = F8_TRY(open_for_reading(global));
  F8_TRY(database.check());
  if (global.json) {
    print_json({{"database", name_of(global)}, {"ok", true}});
  } else {
    print(f8::format("{}: ok\n", name_of(global)));
  }
  return kExitOk;
}

Result<int> schema(const Global& global) {
  if (global.json) {
    print_json({{"schema_version", tuning_db::kSchemaVersion}, {"sql", Database::schema()}});
  } else {
    print(Database::schema());
  }
  return kExitOk;
}

Result<int> migrate(const Global& global) {
  F8_TRY(open_user_database(global, OpenMode::kReadWrite));  // opening for writing migrates
  if (global.json) {
    print_json({{"database", name_of(global)}, {"schema_version", tuning_db::kSchemaVersion}});
  } else {
    print(f8::format("{}: schema {}\n", name_of(global), tuning_db::kSchemaVersion));
  }
  return kExitOk;
}

int report_counts(const Global& global, const Database::MergeCount& count) {
  if (global.json) {
    print_json({{"database", name_of(global)}, {"added", count.added}, {"known", count.known}});
  } else {
    print(f8::format("{}: {} trials added, {} known already\n", name_of(global), count.added,
                     count.known));
  }
  return kExitOk;
}

Result<int> merge(const std::vector<fs::path>& sources, const Global& global) {
  for (const fs::path& source : sources) {  // all are sound before the first is merged
    std::error_code error;
    if (is_standard_stream(source)) {
      return fail(ErrorCode::kInvalidArgument, "{}", kNoStreamDatabase);
    }
    if (fs::equivalent(source, global.db, error)) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} cannot be merged into itself; leave it out, or name another --db",
                  source.string());
    }
    F8_TRY(Database::open(source, OpenMode::kReadOnly));
  }
  Database target = F8_TRY(open_user_database(global, OpenMode::kCreate));
  Database::MergeCount total;
  for (const fs::path& source : sources) {
    const Database::MergeCount count = F8_TRY(target.merge_from(source));
    total.added += count.added;
    total.known += count.known;
  }
  return report_counts(global, total);
}

Result<int> import_file(const fs::path& source, const Global& global) {
  const std::string text =
      F8_TRY(read_input(source, tuning_db::kMaxImportBytes));  // before a database is created
  std::error_code error;
  const bool existed = global.db.empty() || fs::exists(global.db, error);
  Result<Database::MergeCount> count;
  {
    Database target = F8_TRY(open_user_database(global, OpenMode::kCreate));
    count = target.import_jsonl(text, input_name(source));
  }
  if (!count) {
    if (!existed) fs::remove(global.db, error);
    return std::unexpected(count.error());
  }
  return report_counts(global, *count);
}

struct ExportOptions {
  std::string format = "jsonl";
  fs::path output;
};

Result<int> export_file(const ExportOptions& options, const Global& global) {
  F8_TRY(check_output(global, "-o", options.output));
  const Database database = F8_TRY(open_for_reading(global));
  const fs::path output = output_path(options.output);
  if (options.format == "jsonl") {
    F8_TRY(of_option("-o", database.export_jsonl(output)));
  } else if (options.format == "db") {
    F8_TRY(of_option("-o", database.export_db(output)));
  } else {
    // The filter and the kernel choice ask this table with this --db, the built-in rows too: a
    // trainer that loads it decides alike.
    const Databases databases = F8_TRY(open_databases(global));
    const TuningTable table = F8_TRY(merged_table(databases));
    F8_TRY(of_option("-o", write_file_atomic(output, table.serialize())));
  }
  if (global.json) {
    print_json({{"database", name_of(global)},
                {"format", options.format},
                {"output", options.output.string()}});
  } else if (!is_standard_stream(options.output)) {
    note(global, "wrote {}", options.output.string());
  }
  return kExitOk;
}

}  // namespace

void add_db(CLI::App& app, Program& program) {
  CLI::App* group = add_group(app, "db", "whole databases: --db FILE, else the built-in one");
  const Global& global = program.global;
  add_command(*group, program, "info", "devices, runs and sizes", Needs::kNothing,
              [&global] { return info(global); });
  add_command(*group, program, "check", "integrity of the file", Needs::kNothing,
              [&global] { return check(global); });
  refuse_db(*add_command(*group, program, "schema", "print schema.sql", Needs::kNothing,
                         [&global] { return schema(global); }),
            "the schema is this version's; `float8-tune db check` compares a file's with it");
  add_command(*group, program, "migrate", "bring a file to this version's schema", Needs::kNothing,
              [&global] { return migrate(global); });

  auto sources = std::make_shared<std::vector<fs::path>>();
  add_command(*group, program, "merge", "add the trials of other databases to --db",
              Needs::kNothing, [sources, &global] { return merge(*sources, global); })
      ->add_option("files", *sources, "databases to read")
      ->required()
      ->type_name("FILE");

  auto source = std::make_shared<fs::path>();
  add_command(*group, program, "import", "add the trials of an exported file to --db",
              Needs::kNothing, [source, &global] { return import_file(*source, global); })
      ->add_option("file", *source, "the JSON lines of db export; - is standard input")
      ->required()
      ->type_name("FILE");

  auto options = std::make_shared<ExportOptions>();
  CLI::App* exporting =
      add_command(*group, program, "export", "write a database to a file", Needs::kNothing,
                  [options, &global] { return export_file(*options, global); });
  exporting
      ->add_option("--format", options->format,
                   "jsonl: all rows as text; db: a compact copy; table: what a trainer loads")
      ->check(CLI::IsMember({"jsonl", "db", "table"}));
  add_output(*exporting, "-o,--output", options->output, "the file to write")->required();
  add_db_diff(*group, program);
  add_db_gc(*group, program);
}

}  // namespace f8::cli
