// The examples that --help and the manual page end with. A test runs all that need no GPU.
#include "base/format.hpp"
#include "tools/float8-tune/command.hpp"

namespace f8::cli {
namespace {

struct Example {
  const char* command;
  const char* text;  // a line each
};

constexpr Example kExamples[] = {
    {"doctor", "float8-tune doctor"},
    {"bench matmul", "float8-tune bench matmul --mnk 8192,4096,4096 --recipe rowwise"},
    {"bench linear", "float8-tune bench linear --mnk 8192,4096,4096 --recipe tensorwise,rowwise"},
    {"bench experts",
     "float8-tune bench experts --mnk 65536,768,2048 --experts 128 --skew zipf --recipe rowwise"},
    {"bench attention",
     "float8-tune bench attention --shape 's8192b1h32g8d128;s32768b1h32g8d128' --masks "
     "causal,full\n"
     "float8-tune bench attention --shape s8192b1h32g8d128 --recipe fp8"},
    {"bench epilogue", "float8-tune bench epilogue --mnk 8192,4096,4096 --epilogue bias,amax"},
    {"bench suggestions", "float8-tune bench suggestions --mnk 16,4096,4096 --csv suggestions.csv"},
    {"bench cast", "float8-tune bench cast --mnk 8192,4096,4096 --recipe rowwise"},
    {"bench produce",
     "float8-tune bench produce --source glu,glu_backward --size 8192,14336 --recipe rowwise"},
    {"plan",
     "float8-tune plan --model llama3-8b --tokens 8192 --recipe rowwise\n"
     "float8-tune plan --model llama3-8b --attention --sequence 8192,32768 --masks causal,full"},
    {"sweep",
     "float8-tune sweep --mnk 8192,4096,4096 --recipe rowwise --db tuned.f8db\n"
     "float8-tune sweep --model llama3-8b --tokens 8192 --budget 10m --db tuned.f8db\n"
     "float8-tune sweep --model llama3-8b --tokens 8192 --missing --gpus all --db tuned.f8db\n"
     "float8-tune sweep --model llama3-8b --attention --sequence 8192,32768 --db tuned.f8db"},
    {"resume",
     "float8-tune resume --db tuned.f8db\n"
     "float8-tune resume --gpus 0,2 --db tuned.f8db"},
    {"query",
     "float8-tune query --mnk 8192,4096,4096 --recipe rowwise\n"
     "float8-tune query --problem linear/rowwise+fast/e4m3.e4m3.bf16/m8192n4096k4096\n"
     "float8-tune query --shape s8192b1h32g8d128 --recipe fp8 --op attention_forward\n"
     "float8-tune query --map --mnk 8192,1024:16384:x2,1024:16384:x2 --recipe rowwise"},
    {"filter",
     "float8-tune filter --model llama3-8b --tokens 8192 --recipe rowwise\n"
     "float8-tune filter --model llama3-8b --tokens 8192 --recipe rowwise --attention --sequence "
     "8192\n"
     "float8-tune filter --model mixtral-8x7b --ep 4 --tokens 8192 --recipe tensorwise "
     "--verdicts model.filter"},
    {"thresholds", "float8-tune thresholds --recipe rowwise"},
    {"explain", "float8-tune explain 8192,1024,4096 --recipe rowwise"},
    {"compare",
     "float8-tune compare before.f8db after.f8db\n"
     "float8-tune compare before.f8db after.f8db --op linear --threshold 0.03 --strict\n"
     "float8-tune compare before.f8db after.f8db --op attention_forward"},
    {"report", "float8-tune report -o report.html"},
    {"emit",
     "float8-tune emit --mnk 4096,4096,4096 --recipe rowwise\n"
     "float8-tune emit --list"},
    {"prewarm", "float8-tune prewarm --model llama3-8b --recipe rowwise --tokens 8192"},
    {"cost-model score", "float8-tune cost-model score"},
    {"replay", "float8-tune replay --set exhaustive.jsonl --recipe rowwise"},
    {"profile show", "float8-tune profile show"},
    {"profile fit", "float8-tune profile fit -o device_profiles.cpp"},
    {"estimate score", "float8-tune estimate score"},
    {"wire predict", "float8-tune wire predict --weight 14336,4096 --ranks 8,64"},
    {"verify-dist",
     "float8-tune verify-dist --gpus 0,1\n"
     "float8-tune verify-dist --emulate --ranks 2 --recipe rowwise"},
    {"db info", "float8-tune db info"},
    {"db check", "float8-tune db check --db tuned.f8db"},
    {"db schema", "float8-tune db schema"},
    {"db migrate", "float8-tune db migrate --db tuned.f8db"},
    {"db merge", "float8-tune db merge before.f8db after.f8db --db all.f8db"},
    {"db export",
     "float8-tune db export --db tuned.f8db -o tuned.jsonl\n"
     "float8-tune db export --db tuned.f8db --format table -o tuned.table"},
    {"db import", "float8-tune db import tuned.jsonl --db all.f8db"},
    {"db diff", "float8-tune db diff before.f8db after.f8db --limit 20"},
    {"db gc",
     "float8-tune db gc --toolchains-but 2 --older-than 90d --dry-run --db tuned.f8db\n"
     "float8-tune db gc --toolchains-but 2 --older-than 90d --db tuned.f8db"},
};

CLI::App* find(CLI::App& app, std::string_view path) {
  CLI::App* command = &app;
  while (!path.empty()) {
    const size_t end = path.find(' ');
    command = command->get_subcommand(std::string(path.substr(0, end)));
    path = end == std::string_view::npos ? "" : path.substr(end + 1);
  }
  return command;
}

}  // namespace

void add_examples(CLI::App& app) {
  for (const Example& example : kExamples) {
    CLI::App* command = find(app, example.command);
    // A command's own footer stands before its examples; without one it has the program's.
    const std::string& own = command->get_footer();
    std::string text = own == app.get_footer() ? "" : own + "\n\n";
    text += "Examples:\n";
    std::string_view rest = example.text;
    while (!rest.empty()) {
      const size_t end = rest.find('\n');
      text += f8::format("  {}\n", rest.substr(0, end));
      rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
    }
    command->footer(text + "\n" + app.get_footer());
  }
}

}  // namespace f8::cli
