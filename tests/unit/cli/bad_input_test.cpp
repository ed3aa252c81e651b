// Bad input: one line on standard error that names the option or file and the remedy, exit code 1,
// nothing on standard output and nothing written.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Words = std::vector<std::string>;

class BadInput : public ::testing::Test {
 protected:
  void refuse(const Words& arguments, const Words& parts) const {
    tool_.expect_refused(1, arguments, parts);
  }
  // A model for filter, prewarm, plan and explain alike.
  void refuse_model(std::string_view name, std::string_view bytes, const Words& parts) const {
    const std::string file = tool_.write(name, bytes);
    const Words model = {"--model", std::string(name), "--recipe", "rowwise", "--tokens", "8192"};
    for (const Words& command : {Words{"filter"}, {"prewarm"}, {"plan"}, {"explain", "a"}}) {
      refuse(command + model, Words{"--model", std::string(name)} + parts);
    }
  }
  Tool tool_;
};

const Words kFilter = {"filter", "--model", "llama3-8b", "--recipe", "rowwise"};
const Words kQuery = {"query", "--recipe", "rowwise"};

TEST_F(BadInput, CommandLine) {
  refuse({}, {"subcommand", "--help"});
  refuse({"fliter"}, {"'fliter'"});
  refuse({"filter"}, {"--model", "float8-tune filter --help"});
  refuse(kFilter, {"--tokens"});
  refuse(kFilter + Words{"--tokens", "8192", "--frobnicate"}, {"--frobnicate"});
  refuse(kFilter + Words{"--tokens"}, {"--tokens"});
  refuse(kFilter + Words{"--tokens", "8192", "--color", "blue"}, {"--color", "blue"});
  refuse({"db"}, {"subcommand", "db --help"});
  refuse({"db", "frob"}, {"unknown command 'frob'", "db --help"});
}

TEST_F(BadInput, Tokens) {
  for (const char* tokens : {"0", "-1", "abc", "1e4", "8192x", "", "1073741825",
                             "99999999999999999999999", "0x10", "81.92"}) {
    refuse(kFilter + Words{std::string("--tokens=") + tokens}, {"--tokens"});
  }
  refuse(kFilter + Words{"--tokens", "-8192"}, {"--tokens"});
}

TEST_F(BadInput, Names) {
  const Words tokens = {"--tokens", "8192"};
  refuse({"filter", "--model", "llama3-8b", "--recipe", "rowvise", "--tokens", "8192"},
         {"--recipe", "rowvise", "rowwise", "tensorwise"});
  refuse({"filter", "--model", "llama4", "--recipe", "rowwise", "--tokens", "8192"},
         {"--model", "llama4", "llama3-8b"});
  refuse(kFilter + tokens + Words{"--policy", "guess"}, {"--policy", "guess", "measured"});
  refuse(kFilter + tokens + Words{"--filter-fqns", "a,,b"}, {"--filter-fqns", "empty"});
  refuse(kFilter + tokens + Words{"--margin", "-1"}, {"--margin", "-100%"});
  refuse(kFilter + tokens + Words{"--margin", "2"}, {"--margin", "'2' is 200%", "0.5%"});
  refuse(kFilter + tokens + Words{"--margin", "two"}, {"--margin", "'two'", "0.5%"});
  refuse({"thresholds", "--recipe", "x"}, {"--recipe", "x"});
  refuse(kQuery + Words{"--mnk", "8192,4096,4096", "--op", "conv"}, {"--op", "conv", "output"});
  refuse({"query", "--mnk", "8192,4096,4096", "--recipe", ""}, {"--recipe"});
  refuse(
      {"explain", "layers.99.wk", "--model", "llama3-8b", "--tokens", "8", "--recipe", "rowwise"},
      {"layers.99.wk", "llama3-8b", "'layers.*.attention.wq', 'layers.*.attention.wk', "});
  refuse({"explain", "layers.9.wk", "--recipe", "rowwise"}, {"give --model and --tokens,"});
  refuse({"explain", "layers.9.wk", "--recipe", "rowwise", "--model", "llama3-8b"},
         {"give --tokens,"});
  refuse({"explain", "layers.9.wk", "--recipe", "rowwise", "--tokens", "8"}, {"give --model,"});
  refuse({"explain", "--model", "llama3-8b", "--tokens", "8", "--recipe", "rowwise"},
         {"takes a layer, such as layers.0.attention.wk", "M,N,K"});
}

TEST_F(BadInput, Shapes) {
  for (const char* mnk :
       {"0,4096,4096", "8192,0,4096", "8192,4096,0", "8192,4096,4095", "8192,4095,4096",
        "8192,4096", "8192,4096,4096,1", "a,b,c", "", ";", "-1,4096,4096",
        "8192,4096,99999999999999999999", "1:0:1,16,16", "1:1000000000:1,16,16"}) {
    refuse(kQuery + Words{"--mnk", mnk}, {"--mnk"});
    refuse({"emit", "--recipe", "rowwise", "--mnk", mnk}, {"--mnk"});
    refuse({"plan", "--recipe", "rowwise", "--mnk", mnk}, {"--mnk"});
  }
  refuse({"explain", "8192,4096", "--recipe", "rowwise"}, {"8192,4096"});
  refuse({"emit", "--recipe", "rowwise", "--mnk", "1,16,16;2,16,16"}, {"--mnk", "2 shapes"});
}

TEST_F(BadInput, Sharding) {
  const Words tokens = {"--tokens", "8192"};
  refuse(kFilter + tokens + Words{"--tp", "5"}, {"--tp", "5", "divide"});
  refuse(kFilter + tokens + Words{"--tp", "0"}, {"--tp"});
  refuse(kFilter + tokens + Words{"--tp", "-8"}, {"--tp"});
}

TEST_F(BadInput, ModelFiles) {
  refuse_model("half.json", R"([{"fqn": "a", "in_features": )", {"not valid JSON"});
  refuse_model("empty.json", "", {"not valid JSON"});
  refuse_model("none.json", "[]", {"no layers"});
  refuse_model("text.json", "\x01\x02\nhello\n", {"not valid JSON"});
  refuse_model("zero.json", R"([{"fqn": "a", "in_features": 0, "out_features": 16}])",
               {"in_features", "from 1"});
  refuse_model("count.json", R"([{"fqn": "a", "in_features": 16, "out_features": 16, "count": 0}])",
               {"count"});
  refuse_model("twice.json", R"([{"fqn": "a", "fqn": "b", "in_features": 16, "out_features": 16}])",
               {"fqn", "twice"});
  refuse_model("missing.json", R"([{"fqn": "a", "in_features": 16}])", {"out_features"});
  refuse_model("huge.json", R"([{"fqn": "a", "in_features": 1e99, "out_features": 16}])",
               {"in_features"});
  refuse_model("config.json", R"({"model_type": "bert", "hidden_size": 768})", {"bert"});
  refuse_model("cut.safetensors", little_endian(4000) + "{\"a\":", {"truncated"});
  refuse_model("long.safetensors", little_endian(UINT64_MAX) + "{}", {"header would be"});
  refuse_model("tiny.safetensors", "abc", {"3 bytes"});
  refuse_model("bad.safetensors", safetensors("{\"a\": }"), {"not valid JSON"});
  refuse_model("model.safetensors.index.json",
               R"({"weight_map": {"a.weight": "gone.safetensors"}})", {"gone.safetensors"});
}

TEST_F(BadInput, FilesThatAreNoFiles) {
  std::filesystem::create_directory(tool_.path() / "folder");
  const Words rest = {"--recipe", "rowwise", "--tokens", "8192"};
  refuse(Words{"filter", "--model", "folder"} + rest, {"--model", "folder", "directory"});
  refuse(Words{"filter", "--model", "gone.json"} + rest, {"--model", "gone.json"});
  refuse(Words{"filter", "--model", ""} + rest, {"--model"});
  refuse(kFilter + Words{"--tokens", "8192", "-o", "folder"}, {"-o", "folder"});
  refuse(kFilter + Words{"--tokens", "8192", "-o", "gone/file.json"}, {"-o", "gone"});
  if (::geteuid() != 0) {
    const std::string secret = tool_.write("secret.json", "[]");
    ::chmod(secret.c_str(), 0);
    refuse(Words{"filter", "--model", "secret.json"} + rest, {"--model", "secret.json"});
  }
}

TEST_F(BadInput, LayersThatCannotBeFloat8) {
  tool_.write("odd.json", R"([{"fqn": "a", "in_features": 17, "out_features": 16}])");
  refuse({"prewarm", "--model", "odd.json", "--recipe", "rowwise"}, {"--model", "multiples of 16"});
}

TEST_F(BadInput, Databases) {
  tool_.write("text.db",
              "this is no database, but it is longer than a header of SQLite would be: "
              "a hundred bytes and some more");
  tool_.write("empty.db", "");
  std::filesystem::create_directory(tool_.path() / "folder");
  for (const char* name : {"text.db", "empty.db", "folder", "gone.db"}) {
    const Words db = {"--db", name};
    refuse(kFilter + Words{"--tokens", "8192"} + db, {"--db", name});
    refuse(kQuery + Words{"--mnk", "8192,4096,4096"} + db, {"--db", name});
    refuse(Words{"thresholds", "--recipe", "rowwise"} + db, {"--db", name});
    refuse(Words{"explain", "8192,4096,4096", "--recipe", "rowwise"} + db, {"--db", name});
    refuse(Words{"prewarm", "--model", "llama3-8b", "--recipe", "rowwise"} + db, {"--db", name});
    refuse(Words{"emit", "--mnk", "8192,4096,4096", "--recipe", "rowwise"} + db, {"--db", name});
    for (const char* command : {"info", "check", "migrate"}) {
      refuse(Words{"db", command} + db, {"--db", name});
    }
    refuse(Words{"db", "export", "-o", "out.jsonl"} + db, {"--db", name});
    refuse({"db", "merge", name, "--db", "new.db"}, {name});
  }
  tool_.set("FLOAT8_DB", "text.db");
  refuse(kFilter + Words{"--tokens", "8192"}, {"FLOAT8_DB", "text.db"});
}

TEST_F(BadInput, WholeDatabases) {
  refuse({"db", "migrate"}, {"--db"});
  refuse({"db", "merge"}, {"files"});
  refuse({"db", "merge", "a.db"}, {"--db"});
  refuse({"db", "import", "gone.jsonl", "--db", "new.db"}, {"gone.jsonl"});
  refuse({"db", "export"}, {"-o"});
  refuse({"db", "export", "-o", "x", "--format", "xml"}, {"--format", "xml"});
  refuse({"db", "export", "-o", "gone/x"}, {"-o", "gone"});
  tool_.write("broken.jsonl", "{\"a\":\n");
  refuse({"db", "import", "broken.jsonl", "--db", "new.db"}, {"broken.jsonl"});
}

TEST_F(BadInput, Emit) {
  const Words shape = {"--mnk", "8192,4096,4096", "--recipe", "rowwise"};
  refuse({"emit"}, {"--recipe"});
  refuse({"emit", "--recipe", "rowwise"}, {"--mnk"});
  refuse(Words{"emit", "--op", "gemv"} + shape, {"--op", "gemv"});
  refuse(Words{"emit", "--config", "potato"} + shape, {"--config", "potato"});
  refuse(Words{"emit", "--config", "999x256s4c2x1w2g8"} + shape, {"--config"});
  refuse(Words{"emit", "--config", "128x256s90c2x1w2g8"} + shape, {"--config"});
  refuse(Words{"emit", "--op", "cast", "--config", "128x256s4c2x1w2g8"} + shape, {"--config"});
  refuse(Words{"emit", "--cubin"} + shape, {"--cubin", "-o"});
  refuse({"emit", "--kernel", "gemm/x"}, {"--kernel"});
  refuse({"emit", "--kernel", "amax/bf16/tensor", "--mnk", "8192,4096,4096"}, {"--kernel"});
  tool_.write("file", "");
  refuse(Words{"emit", "-o", "file"} + shape, {"-o", "file"});
  refuse(Words{"emit", "-o", "file/folder"} + shape, {"-o", "file"});
}

TEST_F(BadInput, CacheThatOthersCanWriteIsAnUnfitMachine) {
  const auto cache = tool_.path() / "open";
  std::filesystem::create_directory(cache);
  ::chmod(cache.c_str(), 0777);
  tool_.expect_refused(
      2, {"prewarm", "--model", "llama3-8b", "--recipe", "rowwise", "--cache-dir", "open"},
      {"open", "write"});
}

}  // namespace
}  // namespace f8::testing
