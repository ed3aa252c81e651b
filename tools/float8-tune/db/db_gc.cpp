// db gc: removes from a database what nobody can use, and gives its space back.
#include "tools/float8-tune/db/db_gc.hpp"

#include <algorithm>
#include <memory>

#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/sweep/sweep_args.hpp"
#include "tuning_db/gc/gc.hpp"

namespace f8::cli {
namespace {

using tuning_db::GcOptions;
using tuning_db::GcReport;

struct DbGcOptions {
  int64_t toolchains_but = 0;  // 0: not asked
  std::string older_than;
  bool include_current = false;
  bool dry_run = false;
  bool no_backup = false;
};

constexpr double kLongestAge = 1e10;  // 300 years

Result<std::chrono::seconds> parse_age(std::string_view text) {
  const double seconds = F8_TRY(parse_duration_s(text));
  if (text.back() >= '0' && text.back() <= '9') {
    return fail(ErrorCode::kInvalidArgument, "{} has no unit; write {}d for days", text, text);
  }
  if (seconds > kLongestAge) {
    return fail(ErrorCode::kInvalidArgument, "{} is too long an age; write one such as 90d", text);
  }
  return std::chrono::seconds(static_cast<int64_t>(seconds));
}

Result<GcOptions> gc_options(const DbGcOptions& options) {
  GcOptions gc{.include_current = options.include_current,
               .dry_run = options.dry_run,
               .back_up = !options.no_backup};
  if (options.toolchains_but > 0) gc.toolchains_but = options.toolchains_but;
  if (!options.older_than.empty()) {
    gc.older_than = F8_TRY(of_option("--older-than", parse_age(options.older_than)));
  }
  if (gc.include_current && !gc.toolchains_but && !gc.older_than) {
    return fail(ErrorCode::kInvalidArgument,
                "--include-current says nothing of which trials; add --toolchains-but or "
                "--older-than");
  }
  return gc;
}

Json to_json(const GcReport& report, const GcOptions& options, const Global& global) {
  Json json = {{"database", global.db.string()},
               {"dry_run", options.dry_run},
               {"removed", Json::object()},
               {"bytes_before", report.bytes_before},
               {"bytes_after", report.bytes_after}};
  for (const auto& [kind, rows] : report.removed) json["removed"][std::string(kind)] = rows;
  json["superseded"] = Json::array();
  for (const tuning_db::GcToolchain& of : report.superseded) {
    json["superseded"].push_back(
        {{"device", of.device}, {"toolchain", of.toolchain}, {"trials", of.trials}});
  }
  if (!report.backup.empty()) json["backup"] = report.backup.string();
  return json;
}

void print_text(const GcReport& report, const GcOptions& options, const Global& global) {
  if (report.is_empty()) {
    const bool asked = options.toolchains_but || options.older_than;
    print(f8::format("{}: nothing to remove{}\n", global.db.string(),
                     asked ? ""
                           : "; --toolchains-but N and --older-than 90d ask for superseded trials "
                             "too"));
    return;
  }
  Table table({{options.dry_run ? "would remove" : "removed", Table::Align::kLeft}, {"rows"}});
  for (const auto& [kind, rows] : report.removed) {
    std::string words(kind);
    std::ranges::replace(words, '_', ' ');
    table.add({words, f8::format("{}", rows)});
  }
  print_styled(table.text(stdout_color(global)));
  for (const tuning_db::GcToolchain& of : report.superseded) {
    print(f8::format("superseded: {} trials of {}, {}\n", of.trials, of.device, of.toolchain));
  }
  print(f8::format("{}: {} bytes, {} after\n", global.db.string(), report.bytes_before,
                   report.bytes_after));
}

Result<int> gc(const DbGcOptions& options, const Global& global) {
  const GcOptions how = F8_TRY(gc_options(options));
  if (global.db.empty()) F8_TRY(open_user_database(global, tuning_db::OpenMode::kReadOnly));
  const GcReport report =
      F8_TRY(of_option(global.db_option, tuning_db::collect_garbage(global.db, how)));
  if (global.json) {
    print_json(to_json(report, how, global));
  } else {
    print_text(report, how, global);
  }
  if (!report.backup.empty()) {
    note(global, "the database as it was is {}; remove it when it is not needed",
         report.backup.string());
  }
  return kExitOk;
}

}  // namespace

void add_db_gc(CLI::App& group, Program& program) {
  auto options = std::make_shared<DbGcOptions>();
  CLI::App* command = add_command(
      group, program, "gc", "remove what nobody can use from --db and give its space back",
      Needs::kNothing, [options, &program] { return gc(*options, program.global); });
  add_integer(*command, "--toolchains-but", options->toolchains_but,
              "also remove superseded trials, but for the N newest toolchains of each device class",
              1, 1'000'000)
      ->type_name("N");
  command
      ->add_option(
          "--older-than", options->older_than,
          "also remove superseded trials older than this, e.g. 90d; with --toolchains-but, those "
          "that meet both")
      ->type_name("AGE");
  command->add_flag("--include-current", options->include_current,
                    "of these trials, also those that count now: the best, and what decisions rest "
                    "on");
  command->add_flag("--dry-run", options->dry_run,
                    "print what would be removed, and change nothing");
  command->add_flag("--no-backup", options->no_backup,
                    "no copy of the database as it was, FILE.gc.backup");
  command->footer(
      "Always removed: the trials of screenings and of sweep --hot whose run is finished, runs "
      "without trials, and "
      "the problems, candidates, toolchains, methods and devices that nothing refers to.");
}

}  // namespace f8::cli
